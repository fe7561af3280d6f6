"""RMS norm, alone and with the residual added first: one pass over memory, sums in float32.

Rows are the last axis of any input whose last axis is contiguous: whole tokens, or the heads of a slice of a wider
projection. A program takes as many rows as fill its tile. X rows of a program, D width.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from kernels.tuning import RowTile


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, out: Tensor, tile: RowTile) -> None:
    """`x` is [T, D] or [T, heads, D]; `out` is contiguous and of x's shape."""
    inner = 1 if x.dim() == 2 else x.shape[1]
    num_rows, width = x.shape[0] * inner, x.shape[-1]
    rows = _rows_held(num_rows, width, tile)
    _norm[(triton.cdiv(num_rows, rows),)](
        x,
        weight_D,
        out,
        num_rows,
        inner,
        x.stride(0),
        0 if x.dim() == 2 else x.stride(1),
        eps,
        D=width,
        WIDTH=triton.next_power_of_2(width),
        X=rows,
        num_warps=tile.num_warps,
    )


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor, total_TD: Tensor, tile: RowTile
) -> None:
    """total = x + residual; out = rms_norm(total). All contiguous; `total_TD` may be `residual_TD` or `x_TD` itself."""
    num_rows, width = x_TD.shape
    rows = _rows_held(num_rows, width, tile)
    _add_norm[(triton.cdiv(num_rows, rows),)](
        x_TD,
        residual_TD,
        weight_D,
        out_TD,
        total_TD,
        num_rows,
        eps,
        D=width,
        WIDTH=triton.next_power_of_2(width),
        X=rows,
        num_warps=tile.num_warps,
    )


def _rows_held(num_rows: int, width: int, tile: RowTile) -> int:
    return int(max(1, min(tile.elements // triton.next_power_of_2(width), triton.next_power_of_2(num_rows))))


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    INPUT,
    WEIGHT,
    OUT,
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    X: tl.constexpr,
):
    row_X = (tl.program_id(0) * X + tl.arange(0, X)).to(tl.int64)
    d = tl.arange(0, WIDTH)
    held_XD = (row_X < num_rows)[:, None] & (d < D)[None, :]
    source_X = row_X // inner * outer_stride + row_X % inner * inner_stride
    x_XD = tl.load(INPUT + source_X[:, None] + d[None, :], mask=held_XD, other=0.0).to(tl.float32)
    weight_D = tl.load(WEIGHT + d, mask=d < D, other=0.0).to(tl.float32)
    scale_X = tl.rsqrt(tl.sum(x_XD * x_XD, 1) / D + eps)
    out_XD = x_XD * scale_X[:, None] * weight_D[None, :]
    tl.store(OUT + row_X[:, None] * D + d[None, :], out_XD.to(OUT.dtype.element_ty), mask=held_XD)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm(
    INPUT, RESIDUAL, WEIGHT, OUT, TOTAL, num_rows, eps, D: tl.constexpr, WIDTH: tl.constexpr, X: tl.constexpr
):
    row_X = (tl.program_id(0) * X + tl.arange(0, X)).to(tl.int64)
    d = tl.arange(0, WIDTH)
    held_XD = (row_X < num_rows)[:, None] & (d < D)[None, :]
    where_XD = row_X[:, None] * D + d[None, :]
    x_XD = tl.load(INPUT + where_XD, mask=held_XD, other=0.0).to(tl.float32)
    residual_XD = tl.load(RESIDUAL + where_XD, mask=held_XD, other=0.0).to(tl.float32)
    weight_D = tl.load(WEIGHT + d, mask=d < D, other=0.0).to(tl.float32)
    total_XD = (x_XD + residual_XD).to(TOTAL.dtype.element_ty)
    tl.store(TOTAL + where_XD, total_XD, mask=held_XD)
    # The norm of what was stored, so that it equals rms_norm(total) to the bit.
    wide_XD = total_XD.to(tl.float32)
    scale_X = tl.rsqrt(tl.sum(wide_XD * wide_XD, 1) / D + eps)
    out_XD = wide_XD * scale_X[:, None] * weight_D[None, :]
    tl.store(OUT + where_XD, out_XD.to(OUT.dtype.element_ty), mask=held_XD)
