"""silu(gate) · up of one projection that holds both side by side: one pass over memory."""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from kernels.tuning import RowTile


def silu_mul(x_T2F: Tensor, out_TF: Tensor, tile: RowTile) -> None:
    """Both contiguous."""
    num_tokens, width = out_TF.shape
    elements = min(tile.elements, triton.next_power_of_2(width))
    _silu_mul[(triton.cdiv(width, elements), num_tokens)](x_T2F, out_TF, F=width, X=elements, num_warps=tile.num_warps)


@triton.jit
def _silu_mul(INPUT, OUT, F: tl.constexpr, X: tl.constexpr):
    token = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * X + tl.arange(0, X)
    gate = tl.load(INPUT + token * (2 * F) + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(INPUT + token * (2 * F) + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(OUT + token * F + f, (gate / (1.0 + tl.exp(-gate)) * up).to(OUT.dtype.element_ty), mask=f < F)
