"""x · wᵀ + b whose every row is the same to the bit, however many rows are beside it.

The inputs are cut into parts by the weight's shape alone, each summed by tiles of one depth, and the parts added in their
order. Where output tiles fill the device a program takes all parts of its tile one after the other; where they are too few
each part has a program of its own, and a second launch adds up: the same sums in the same order.

T rows, I inputs, O outputs, P parts; M × N a tile of the output, D inputs of a step.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tuning import LinearTile

FEWEST_ROWS = 64  # of a tile: below, the matrix unit has other instructions, which may round otherwise
MOST_PARTS = 8
FILLING = 264  # programs, of any card: where parts end must not depend on the device
ADDED = 1024  # outputs that a program of the second launch adds up


def fixed_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor, tile: LinearTile) -> None:
    """All contiguous but x and w, whose rows may be strided."""
    num_rows, num_inputs = x_TI.shape
    num_outputs = weight_OI.shape[0]
    columns = triton.cdiv(num_outputs, tile.columns)
    steps = triton.cdiv(num_inputs, tile.depth)
    steps_held = triton.cdiv(steps, max(1, min(MOST_PARTS, FILLING // columns)))
    parts = triton.cdiv(steps, steps_held)
    rows, warps = (FEWEST_ROWS, 4) if num_rows <= FEWEST_ROWS else (2 * FEWEST_ROWS, 8)
    tiles = triton.cdiv(num_rows, rows)
    apart = parts > 1 and tiles * columns < FILLING // 2
    device = x_TI.device
    partial = torch.empty(parts, num_rows, num_outputs, dtype=torch.float32, device=device) if apart else out_TO
    bias = weight_OI if bias_O is None else bias_O
    _linear[(columns, tiles, parts if apart else 1)](
        x_TI,
        weight_OI,
        bias,
        partial,
        num_rows,
        num_inputs,
        num_outputs,
        steps,
        steps_held,
        1 if apart else parts,
        x_TI.stride(0),
        weight_OI.stride(0),
        BIASED=bias_O is not None and not apart,
        EVEN=num_inputs % tile.depth == 0 and num_outputs % tile.columns == 0,
        M=rows,
        N=tile.columns,
        D=tile.depth,
        num_warps=warps,
        num_stages=tile.num_stages,
    )
    if apart:
        _add_up[(triton.cdiv(num_outputs, ADDED), num_rows)](
            partial, bias, out_TO, num_rows, num_outputs, parts, BIASED=bias_O is not None, X=ADDED
        )


@triton.jit(do_not_specialize=["num_rows", "steps", "steps_held", "parts_held"])
def _linear(
    X,
    W,
    BIAS,
    OUT,
    num_rows,
    num_inputs,
    num_outputs,
    steps,
    steps_held,
    parts_held,
    x_stride,
    w_stride,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    t_M = tl.program_id(1) * M + tl.arange(0, M)
    o_N = tl.program_id(0) * N + tl.arange(0, N)
    d = tl.arange(0, D)
    rows_MD = X + t_M.to(tl.int64)[:, None] * x_stride + d[None, :]
    columns_DN = W + o_N.to(tl.int64)[None, :] * w_stride + d[:, None]
    held_M1, held_1N = (t_M < num_rows)[:, None], (o_N < num_outputs)[None, :]
    first = tl.program_id(2)
    total_MN = tl.zeros([M, N], tl.float32)
    for number in range(first, first + parts_held):
        sum_MN = tl.zeros([M, N], tl.float32)
        for step in range(number * steps_held, tl.minimum((number + 1) * steps_held, steps)):
            start = step * D
            if EVEN:
                x_MD = tl.load(rows_MD + start, mask=held_M1, other=0.0)
                w_DN = tl.load(columns_DN + start)
            else:
                inside_D = start + d < num_inputs
                x_MD = tl.load(rows_MD + start, mask=held_M1 & inside_D[None, :], other=0.0)
                w_DN = tl.load(columns_DN + start, mask=held_1N & inside_D[:, None], other=0.0)
            sum_MN = tl.dot(x_MD, w_DN, sum_MN, input_precision="ieee")
        total_MN += sum_MN
    if BIASED:
        total_MN += tl.load(BIAS + o_N, mask=o_N < num_outputs, other=0.0).to(tl.float32)[None, :]
    place_MN = (first * num_rows + t_M).to(tl.int64)[:, None] * num_outputs + o_N[None, :]
    tl.store(OUT + place_MN, total_MN.to(OUT.dtype.element_ty), mask=held_M1 & held_1N)


@triton.jit(do_not_specialize=["num_rows", "parts"])
def _add_up(PARTIAL, BIAS, OUT, num_rows, num_outputs, parts, BIASED: tl.constexpr, X: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * X + tl.arange(0, X)
    held = o < num_outputs
    total = tl.zeros([X], tl.float32)
    for number in range(parts):
        total += tl.load(PARTIAL + (number * num_rows + row) * num_outputs + o, mask=held, other=0.0)
    if BIASED:
        total += tl.load(BIAS + o, mask=held, other=0.0).to(tl.float32)
    tl.store(OUT + row * num_outputs + o, total.to(OUT.dtype.element_ty), mask=held)
