"""Decode attention as a model launches it: behind the rotary store, under whose end it may begin.

What a variant of the tile gains alone it can lose there: the store writes while the attention fetches. Variants are timed
in turn, so that a change of the card changes all of them.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from kernels.cuda import CudaOps
from kernels.ops import AttentionBatch
from kernels.tuning import Tuning

ROUNDS = 3

# Seconds of one run in each of some replays of a graph of it.
SecondsOf = Callable[[Callable[[], object]], list[float]]


def without_fetch(tuning: Tuning) -> Tuning:
    """The same tiles; nothing is fetched before q is awaited."""
    long = tuning.decode_long
    return replace(
        tuning,
        decode_few=replace(tuning.decode_few, fetched=0),
        decode_long=None if long is None else replace(long, tile=replace(long.tile, fetched=0)),
    )


@dataclass(frozen=True)
class Behind:
    """A step's attention in all layers. `projection`: what q, k and v are slices of; `angles`: for every position."""

    projection: Tensor
    angles: Tensor
    pool: Tensor
    batch: AttentionBatch
    scale: float
    layers: int

    def microseconds(self, variants: Mapping[str, CudaOps], seconds_of: SecondsOf) -> dict[str, list[float]]:
        """Of a layer's attention beyond the rotary store alone: a median a round."""
        found: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(ROUNDS):
            for name, ops in variants.items():
                store, both = (
                    statistics.median(seconds_of(partial(self._step, ops, attend))) for attend in (False, True)
                )
                found[name].append((both - store) / self.layers * 1e6)
        return found

    def _step(self, ops: CudaOps, attend: bool) -> None:
        kv_heads = self.pool.shape[1]
        query_heads = self.projection.shape[1] - 2 * kv_heads
        q, k, v = self.projection.split((query_heads, kv_heads, kv_heads), 1)
        for layer in range(self.layers):
            turned = ops.rope_store(q, k, v, self.angles, self.pool, layer, self.batch)
            if attend:
                ops.attention(turned, self.pool, layer, self.batch, self.scale)
