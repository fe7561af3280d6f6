"""kernels.all_reduce by one shot, and what a decoder does next with the sum: the residual added, and the norm of that. It
saves a launch, and a trip of the sum through memory. One program has whole rows: D width."""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from kernels.all_reduce import KINDS, NOTHING_OF, Meeting, _buffer, _receive, _sendable, _turn

MAX_WIDTH = 16384
ELEMENTS_OF_A_WARP = 512


def all_reduce_add_norm(
    x_TD: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    out_TD: Tensor,
    total_TD: Tensor,
    meeting: Meeting,
    num_programs: int,
) -> None:
    """total = sum of x over the ranks + residual; out = rms_norm(total), each to the bit what all_reduce and add_rms_norm
    make. All contiguous and of one dtype; x is left as it is."""
    num_rows, width = x_TD.shape
    integer, number = KINDS[x_TD.dtype]
    padded = triton.next_power_of_2(width)
    _all_reduce_add_norm[(min(num_programs, num_rows),)](
        x_TD.view(integer),
        residual_TD,
        weight_D,
        out_TD,
        total_TD,
        meeting.buffers_P,
        meeting.state,
        num_rows,
        meeting.room_bytes // x_TD.element_size(),
        eps,
        RANK=meeting.rank,
        RANKS=meeting.num_ranks,
        NUMBER=number,
        NOTHING=NOTHING_OF[integer],
        D=width,
        WIDTH=padded,
        num_warps=max(1, min(16, padded // ELEMENTS_OF_A_WARP)),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _all_reduce_add_norm(
    X,
    RESIDUAL,
    WEIGHT,
    OUT,
    TOTAL,
    BUFFERS,
    STATE,
    num_rows,
    room,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    NUMBER: tl.constexpr,
    NOTHING: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    slot = tl.load(STATE)
    d = tl.arange(0, WIDTH)
    held_D = d < D
    mine = _buffer(X, BUFFERS, slot, room, RANK, RANKS)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at_D = row * D + d
        x_D = _sendable(tl.load(X + at_D, mask=held_D, other=0), NOTHING)
        for p in tl.static_range(RANKS):
            if p != RANK:
                tl.store(_buffer(X, BUFFERS, slot, room, p, RANKS) + RANK * room + at_D, x_D, mask=held_D)
    weight_D = tl.load(WEIGHT + d, mask=held_D, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at_D = row * D + d
        residual_D = tl.load(RESIDUAL + at_D, mask=held_D, other=0.0).to(tl.float32)
        sum_D = tl.zeros([WIDTH], tl.float32)
        for p in tl.static_range(RANKS):
            if p == RANK:
                bits_D = tl.load(X + at_D, mask=held_D, other=0)
            else:
                bits_D = _receive(mine + p * room + at_D, held_D, STATE, NOTHING)
            sum_D += bits_D.to(NUMBER, bitcast=True).to(tl.float32)
        total_D = (sum_D.to(NUMBER).to(tl.float32) + residual_D).to(NUMBER)
        tl.store(TOTAL + at_D, total_D, mask=held_D)
        wide_D = total_D.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide_D * wide_D, 0) / D + eps)
        tl.store(OUT + at_D, (wide_D * scale * weight_D).to(NUMBER), mask=held_D)
    _turn(STATE, slot)
