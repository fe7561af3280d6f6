"""Where min-p, top-k and top-p cut a row of logits, found without sorting it.

With x = (logit − largest) / temperature ≤ 0, the bits of −x order as integers do. The cut of top-k is the least such
integer that k tokens do not exceed, that of top-p the least that tokens of enough mass do not exceed: two bits of it a
pass, sixteen passes over a row that stays in the second-level cache. One program a row.

S draws, V vocabulary, X logits read at a time.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from kernels.tuning import RowTile

INFINITE = tl.constexpr(0x7F800000)


def sample_floor(
    logits_SV: Tensor,
    temperature_S: Tensor,
    min_p_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    floor_S: Tensor,
    tile: RowTile,
) -> None:
    """Writes the least x that stays in; all that equal it stay in. Each filter sees what the one before left.
    Off are min_p 0, top_k 0 (int32) and top_p 1; temperature 0 leaves all in."""
    num_draws, vocabulary = logits_SV.shape
    _floor[(num_draws,)](
        logits_SV,
        temperature_S,
        min_p_S,
        top_k_S,
        top_p_S,
        floor_S,
        logits_SV.stride(0),
        V=vocabulary,
        X=min(tile.elements, triton.next_power_of_2(vocabulary)),
        num_warps=tile.num_warps,
    )


@triton.jit
def _floor(LOGITS, TEMPERATURE, MIN_P, TOP_K, TOP_P, FLOOR, stride, V: tl.constexpr, X: tl.constexpr):
    draw = tl.program_id(0).to(tl.int64)
    row = LOGITS + draw * stride
    temperature = tl.load(TEMPERATURE + draw)
    min_p = tl.load(MIN_P + draw)
    top_k = tl.load(TOP_K + draw)
    top_p = tl.load(TOP_P + draw)
    by_rank = (top_k > 0) & (top_k < V)
    if (temperature > 0) & (by_rank | (top_p < 1) | (min_p > 0)):
        largest_X = tl.full([X], float("-inf"), tl.float32)
        for start in range(0, V, X):
            token = start + tl.arange(0, X)
            logits = tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32)
            largest_X = tl.maximum(largest_X, logits)
        largest = tl.max(largest_X, 0)
        cut = tl.full([], INFINITE, tl.int32)
        if min_p > 0:
            cut = tl.maximum(0.0 - tl.log(min_p), 0.0).to(tl.int32, bitcast=True)
        if by_rank:
            by_min_p = cut
            cut = tl.minimum(_reach(row, largest, temperature, by_min_p, top_k.to(tl.float32), V, X, False), by_min_p)
        if top_p < 1:
            mass = _weight(row, largest, temperature, cut, V, X, True)
            if by_rank:  # of those that equal the k-th, only as many as make k have mass
                equal = tl.exp(0.0 - cut.to(tl.float32, bitcast=True))
                surplus = _weight(row, largest, temperature, cut, V, X, False) - top_k
                mass -= tl.maximum(surplus, 0.0) * equal
            cut = tl.minimum(_reach(row, largest, temperature, cut, mass * top_p, V, X, True), cut)
        tl.store(FLOOR + draw, 0.0 - cut.to(tl.float32, bitcast=True))
    else:
        tl.store(FLOOR + draw, float("-inf"))


@triton.jit
def _load(row, start, largest, temperature, V: tl.constexpr, X: tl.constexpr):
    """(−x, its bits) of X tokens; bits beyond every cut past the end of the row."""
    token = start + tl.arange(0, X)
    logits = tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32)
    depth = 0.0 - (logits - largest) / temperature
    return depth, tl.where(token < V, depth.to(tl.int32, bitcast=True), 0x7FFFFFFF)


@triton.jit
def _weight(row, largest, temperature, cut, V: tl.constexpr, X: tl.constexpr, MASS: tl.constexpr):
    """How many tokens, or how much mass (of the largest token's), lie within a cut."""
    sum_X = tl.zeros([X], tl.float32)
    for start in range(0, V, X):
        depth, bits = _load(row, start, largest, temperature, V, X)
        weight = tl.exp(0.0 - depth) if MASS else tl.full([X], 1.0, tl.float32)
        sum_X += tl.where(bits <= cut, weight, 0.0)
    return tl.sum(sum_X, 0)


@triton.jit
def _reach(row, largest, temperature, limit, target, V: tl.constexpr, X: tl.constexpr, MASS: tl.constexpr):
    """The least cut within which tokens of `limit` weigh `target`; past `limit` where they never do."""
    low = tl.full([], 0, tl.int32)
    step = tl.full([], 1 << 29, tl.int32)
    for index in range(16):
        # Three cuts part the range in four, the last time one in two: the end of a range is no cut.
        probe_4 = low + (step - 1) + step * tl.arange(0, 4)
        sum_4X = tl.zeros([4, X], tl.float32)
        for start in range(0, V, X):
            depth, bits = _load(row, start, largest, temperature, V, X)
            weight = tl.exp(0.0 - depth) if MASS else tl.full([X], 1.0, tl.float32)
            weight = tl.where(bits <= limit, weight, 0.0)
            sum_4X += tl.where(bits[None, :] <= probe_4[:, None], weight[None, :], 0.0)
        short = (tl.sum(sum_4X, 1) < target) & (tl.arange(0, 4) < tl.where(index < 15, 3, 1))
        low += step * tl.sum(short.to(tl.int32), 0)
        step = tl.maximum(step // 4, 1)
    return low
