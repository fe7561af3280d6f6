"""The reference's operations, each row the same to the bit whatever is computed beside it: `deterministic: true` on a CPU.

A library chooses its way by the shape it is given, so every call has a shape that does not depend on the batch: groups of
rows of one size for products and norms, one row where a vector's ragged end would be computed in another way, and each
token of attention alone over its own context. It costs several times the reference's time.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import AttentionBatch
from kernels.reference import ReferenceOps, attend, gather_context

GROUP = 8  # rows


class FixedReferenceOps(ReferenceOps):
    """Holds no state."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        rows = x_TD.reshape(-1, x_TD.shape[-1])
        norm = super().rms_norm
        return _in_groups(rows, lambda group: norm(group, weight_D, eps)).view(x_TD.shape)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return _in_groups(x_TI, lambda group: functional.linear(group, weight_OI, bias_O))

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        rows = [super(FixedReferenceOps, self).silu_mul(row) for row in x_T2F.split(1)]
        return torch.cat(rows) if rows else super().silu_mul(x_T2F)

    def attention(self, q_THE: Tensor, pool: Tensor, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        out_THE = torch.zeros_like(q_THE)
        starts, contexts = batch.starts_R1.tolist(), batch.contexts_R.tolist()
        for row, context in enumerate(contexts):
            for token in range(starts[row], starts[row + 1]) if context else ():
                seen = context - (starts[row + 1] - 1 - token)
                keys_KCE, values_KCE = gather_context(pool, layer, batch.block_tables_RB[row], seen)
                out_THE[token] = attend(q_THE[token].unsqueeze(0).float(), keys_KCE, values_KCE, scale)[0]
        return out_THE


def _in_groups(x_TD: Tensor, of_group: Callable[[Tensor], Tensor]) -> Tensor:
    """`of_group` on groups of GROUP rows each, the last one filled up with zeros."""
    count = x_TD.shape[0]
    if missing := -count % GROUP or (GROUP if not count else 0):
        x_TD = functional.pad(x_TD, (0, 0, 0, missing))
    return torch.cat([of_group(group.contiguous()) for group in x_TD.split(GROUP)])[:count]
