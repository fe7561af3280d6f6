"""Sums a tensor over the ranks of one machine, each of which has mapped the others' buffers: one launch, no library.

Every rank writes its elements into the others' buffers, and waits in its own for theirs. A place that nothing has come to
is EMPTY, the bits of −0.0, which nobody sends (0.0 goes instead): an element is its own signal, and crosses once. Who has
read a place empties it again. Buffers have two slots, used in turn: a rank writes a slot again after it has heard from all
in the call between, and so after all have emptied it. Sums are float32, in the order of ranks: equal on all to the bit.

One shot: all of x to everybody. Two shots: to each rank its part of x, then the parts' sums to everybody; fewer bytes from
three ranks on, and a trip more.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tuning import ReduceTile

SLOTS = 2
EMPTY = -(2**15)  # of 16 bits each, whatever the elements are
ALIGNMENT = 16  # elements of a part: sizes that Triton knows to be multiples of 16 are read 16 bytes at a time
KINDS = {
    torch.bfloat16: (torch.int16, tl.bfloat16),
    torch.float16: (torch.int16, tl.float16),
    torch.float32: (torch.int32, tl.float32),
}
# two places of 16 bits side by side are one of 32
NOTHING_OF = {torch.int16: EMPTY, torch.int32: EMPTY * 2**16 - EMPTY}


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one rank meets the others. `buffers_P`, int64: where this process has each rank's buffer mapped, its own too.
    `state`, int32: [slot of the next call, programs that are done, whether the others are gone]. All calls of all ranks
    are alike, in one order, on one stream."""

    rank: int
    buffers_P: Tensor
    state: Tensor
    room_bytes: int  # the largest x

    @property
    def num_ranks(self) -> int:
        return self.buffers_P.shape[0]


def buffer_bytes(num_ranks: int, room_bytes: int) -> int:
    return SLOTS * num_ranks * room_bytes


def make_empty(buffer: Tensor) -> None:
    """Before the first call of any rank."""
    buffer.view(torch.int16).fill_(EMPTY)


def two_shots_fit(x: Tensor, num_ranks: int) -> bool:
    """Whether every rank has a part of x."""
    return (num_ranks - 1) * _part(x, num_ranks) < x.numel()


def all_reduce(x: Tensor, meeting: Meeting, tile: ReduceTile, *, two_shots: bool = False) -> None:
    """x, contiguous and at most `room_bytes`, becomes the sum over the ranks. Where they are gone it is anything."""
    if not x.is_contiguous() or x.nbytes > meeting.room_bytes:
        raise ValueError(f"x must be contiguous and at most {meeting.room_bytes} bytes, got {x.nbytes}")
    integer, number = KINDS[x.dtype]
    bits = x.view(integer)
    part = _part(x, meeting.num_ranks) if two_shots else x.numel()
    _all_reduce[(min(tile.num_programs, triton.cdiv(part, tile.elements)),)](
        bits,
        meeting.buffers_P,
        meeting.state,
        x.numel(),
        part,
        meeting.room_bytes // x.element_size(),
        RANK=meeting.rank,
        RANKS=meeting.num_ranks,
        NUMBER=number,
        NOTHING=NOTHING_OF[integer],
        TWO_SHOTS=two_shots,
        E=tile.elements,
        num_warps=tile.num_warps,
    )


def _part(x: Tensor, num_ranks: int) -> int:
    each = -(-x.numel() // num_ranks)
    return -(-each // ALIGNMENT) * ALIGNMENT


@triton.jit
def _all_reduce(
    X,
    BUFFERS,
    STATE,
    size,
    part,
    room,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    NUMBER: tl.constexpr,
    NOTHING: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    E: tl.constexpr,
):
    slot = tl.load(STATE)
    e = tl.arange(0, E)
    first = tl.program_id(0) * E
    step = tl.num_programs(0) * E
    mine = _buffer(X, BUFFERS, slot, room, RANK, RANKS)

    for start in range(first, part, step):
        for p in tl.static_range(RANKS):
            if p != RANK:
                at = start + e
                if TWO_SHOTS:
                    at += p * part
                held = (start + e < part) & (at < size)
                x = _sendable(tl.load(X + at, mask=held, other=0), NOTHING)
                theirs = _buffer(X, BUFFERS, slot, room, p, RANKS)
                tl.store(theirs + RANK * room + start + e, x, mask=held)

    for start in range(first, part, step):
        at = start + e
        if TWO_SHOTS:
            at += RANK * part
        held = (start + e < part) & (at < size)
        total = tl.zeros([E], tl.float32)
        for p in tl.static_range(RANKS):
            if p == RANK:
                bits = tl.load(X + at, mask=held, other=0)
            else:
                bits = _receive(mine + p * room + start + e, held, STATE, NOTHING)
            total += bits.to(NUMBER, bitcast=True).to(tl.float32)
        bits = total.to(NUMBER).to(X.dtype.element_ty, bitcast=True)
        tl.store(X + at, bits, mask=held)
        if TWO_SHOTS:
            for p in tl.static_range(RANKS):
                if p != RANK:
                    theirs = _buffer(X, BUFFERS, slot, room, p, RANKS)
                    tl.store(theirs + RANK * room + part + start + e, _sendable(bits, NOTHING), mask=held)

    if TWO_SHOTS:
        for start in range(first, part, step):
            for p in tl.static_range(RANKS):
                if p != RANK:
                    at = p * part + start + e
                    held = (start + e < part) & (at < size)
                    tl.store(X + at, _receive(mine + p * room + part + start + e, held, STATE, NOTHING), mask=held)

    _turn(STATE, slot)


@triton.jit
def _buffer(X, BUFFERS, slot, room, p, RANKS: tl.constexpr):
    """The slot's places in rank p's buffer, [ranks that send, room]."""
    address = tl.multiple_of(tl.load(BUFFERS + p).to(X.dtype), 16)
    return address + slot * RANKS * room


@triton.jit
def _sendable(bits, NOTHING: tl.constexpr):
    return tl.where(bits == NOTHING, 0, bits).to(bits.dtype)


@triton.jit
def _receive(places, held, STATE, NOTHING: tl.constexpr):
    """What has come to these places, once it has come to all of them; they are empty again."""
    bits = tl.load(places, mask=held, other=0, volatile=True)
    while _missing(bits, STATE, NOTHING):
        bits = tl.load(places, mask=held, other=0, volatile=True)
    tl.store(places, tl.full(bits.shape, NOTHING, bits.dtype), mask=held)
    return bits


@triton.jit
def _missing(bits, STATE, NOTHING: tl.constexpr):
    """Equal on all threads: those that read early may see nobody gone, and those that read late all."""
    gone = tl.load(STATE + 2, volatile=True)
    return tl.max(((bits == NOTHING) & (gone == 0)).to(tl.int32), 0) > 0


@triton.jit
def _turn(STATE, slot):
    """The program that is done last turns the slot: all have read it by then."""
    if tl.atomic_add(STATE + 1, 1) == tl.num_programs(0) - 1:
        tl.store(STATE + 1, 0)
        tl.store(STATE, 1 - slot)
