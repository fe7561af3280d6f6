"""Decode attention as a model launches it: behind the rotary store, under whose end it may begin.

What a tile gains alone it can lose there, where the store still writes as it begins. Both are timed in turn, so that a
change of the card changes both of them.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kernels.cuda import CudaOps
from kernels.ops import AttentionBatch

ROUNDS = 3

# Seconds of one run in each of some replays of a graph of it.
SecondsOf = Callable[[Callable[[], object]], list[float]]


@dataclass(frozen=True)
class Behind:
    """A step's attention in all layers. `projection`: what q, k and v are slices of; `angles`: for every position."""

    projection: Tensor
    angles: Tensor
    pool: Tensor
    batch: AttentionBatch
    scale: float
    layers: int

    def microseconds(self, ops: CudaOps, seconds_of: SecondsOf) -> list[float]:
        """Of a layer's attention beyond the rotary store alone: a median a round."""
        found = []
        for _ in range(ROUNDS):
            store, both = (statistics.median(seconds_of(partial(self._step, ops, attend))) for attend in (False, True))
            found.append((both - store) / self.layers * 1e6)
        return found

    def _step(self, ops: CudaOps, attend: bool) -> None:
        kv_heads = self.pool.shape[1]
        query_heads = self.projection.shape[1] - 2 * kv_heads
        q, k, v = self.projection.split((query_heads, kv_heads, kv_heads), 1)
        for layer in range(self.layers):
            turned = ops.rope_store(q, k, v, self.angles, self.pool, layer, self.batch)
            if attend:
                ops.attention(turned, self.pool, layer, self.batch, self.scale)
