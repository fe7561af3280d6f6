"""Where min-p, top-k and top-p cut a row of logits, found without sorting it.

With depth = (largest − logit) / temperature ≥ 0, the bits of depths order as integers do. The cut of top-k is the least
such integer that k tokens do not exceed, that of top-p the least that tokens of enough mass do not exceed: two bits of
it a pass, sixteen passes.

Those passes go over candidates alone. Many programs a row tally how many tokens, and how much mass, lie within a few
fixed depths, and keep the tokens within the least that is deep enough. Rows so flat that even these are too many are
searched whole.

S draws, V vocabulary, P parts of a row, X logits read at a time, J fixed depths, N candidates that a row may have.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tuning import RowTile

INFINITE = tl.constexpr(0x7F800000)
NUM_DEPTHS = tl.constexpr(8)
TALLY_WARPS = 8
MOST_CANDIDATES = 4096
# of the whole mass: sums over other tokens in another order may differ by so much
MASS_ERROR = tl.constexpr(1e-4)


def sample_floor(
    logits_SV: Tensor,
    temperature_S: Tensor,
    min_p_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    floor_S: Tensor,
    tile: RowTile,
    most_candidates: int = MOST_CANDIDATES,
) -> None:
    """Writes the least −depth that stays in; all that equal it stay in. Each filter sees what the one before left.
    Off are min_p 0, top_k 0 (int32) and top_p 1; temperature 0 leaves all in."""
    num_draws, vocabulary = logits_SV.shape
    elements = min(tile.elements, triton.next_power_of_2(vocabulary))
    parts = triton.cdiv(vocabulary, elements)
    device = logits_SV.device
    largest_SP = torch.empty(num_draws, parts, dtype=torch.float32, device=device)
    counts_SPJ = torch.empty(num_draws, parts, NUM_DEPTHS.value, dtype=torch.int32, device=device)
    masses_SPJ = torch.empty(num_draws, parts, NUM_DEPTHS.value, dtype=torch.float32, device=device)
    candidates_SN = torch.empty(num_draws, most_candidates, dtype=torch.float32, device=device)
    found_S = torch.empty(num_draws, dtype=torch.int32, device=device)
    mass_S = torch.empty(num_draws, dtype=torch.float32, device=device)
    sampling = temperature_S, min_p_S, top_k_S, top_p_S
    shared = {"V": vocabulary, "X": elements, "PARTS": triton.next_power_of_2(parts), "num_warps": TALLY_WARPS}
    grid = parts, num_draws
    stride = logits_SV.stride(0)
    _largest[grid](logits_SV, *sampling, largest_SP, stride, **shared)
    _tally[grid](logits_SV, *sampling, largest_SP, counts_SPJ, masses_SPJ, stride, **shared)
    _keep[grid](
        logits_SV,
        *sampling,
        largest_SP,
        counts_SPJ,
        masses_SPJ,
        candidates_SN,
        found_S,
        mass_S,
        stride,
        N=most_candidates,
        **shared,
    )
    _floor[(num_draws,)](
        logits_SV,
        *sampling,
        largest_SP,
        candidates_SN,
        found_S,
        mass_S,
        floor_S,
        stride,
        parts,
        N=most_candidates,
        V=vocabulary,
        X=elements,
        PARTS=shared["PARTS"],
        num_warps=tile.num_warps,
    )


@triton.jit
def _filters(TEMPERATURE, MIN_P, TOP_K, TOP_P, draw, V: tl.constexpr):
    """(temperature, whether anything cuts, the cut of min-p, whether top-k cuts, top_k, top_p)."""
    temperature = tl.load(TEMPERATURE + draw)
    min_p = tl.load(MIN_P + draw)
    top_k = tl.load(TOP_K + draw)
    top_p = tl.load(TOP_P + draw)
    by_rank = (top_k > 0) & (top_k < V)
    cut = tl.full([], INFINITE, tl.int32)
    if min_p > 0:
        cut = tl.maximum(0.0 - tl.log(min_p), 0.0).to(tl.int32, bitcast=True)
    return temperature, (temperature > 0) & (by_rank | (top_p < 1) | (min_p > 0)), cut, by_rank, top_k, top_p


@triton.jit
def _depth_of(j_J):
    """The fixed depths: 0.5, 1, 2, 3, 4, 6 and 8, behind which the last stands for no limit."""
    step = tl.where(j_J < 5, 1.0, tl.where(j_J < 7, 2.0, 4.0))
    start = tl.where(j_J < 5, 0.0, tl.where(j_J < 7, -4.0, -16.0))
    return tl.where(j_J == 0, 0.5, j_J * step + start)


@triton.jit
def _largest(
    LOGITS, TEMPERATURE, MIN_P, TOP_K, TOP_P, LARGEST, stride, V: tl.constexpr, X: tl.constexpr, PARTS: tl.constexpr
):
    part = tl.program_id(0)
    draw = tl.program_id(1).to(tl.int64)
    _, cuts, _, _, _, _ = _filters(TEMPERATURE, MIN_P, TOP_K, TOP_P, draw, V)
    if cuts:
        token = part * X + tl.arange(0, X)
        logits = tl.load(LOGITS + draw * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
        tl.store(LARGEST + draw * tl.num_programs(0) + part, tl.max(logits, 0))


@triton.jit
def _largest_of(LARGEST, draw, parts, PARTS: tl.constexpr):
    every = tl.arange(0, PARTS)
    return tl.max(tl.load(LARGEST + draw * parts + every, mask=every < parts, other=float("-inf")), 0)


@triton.jit
def _tally(
    LOGITS,
    TEMPERATURE,
    MIN_P,
    TOP_K,
    TOP_P,
    LARGEST,
    COUNTS,
    MASSES,
    stride,
    V: tl.constexpr,
    X: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Of a part's tokens within min-p: how many, and what mass, lie within each fixed depth."""
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    draw = tl.program_id(1).to(tl.int64)
    temperature, cuts, cut, _, _, _ = _filters(TEMPERATURE, MIN_P, TOP_K, TOP_P, draw, V)
    if cuts:
        largest = _largest_of(LARGEST, draw, parts, PARTS)
        depth, bits = _load(LOGITS + draw * stride, part * X, V, largest, temperature, X, False)
        left = bits <= cut
        mass = tl.where(left, tl.exp(0.0 - depth), 0.0)
        place = (draw * parts + part) * NUM_DEPTHS
        for j in tl.static_range(NUM_DEPTHS):
            within = left
            if j < NUM_DEPTHS - 1:
                within = left & (depth <= _depth_of(j + tl.zeros([], tl.int32)))
            tl.store(COUNTS + place + j, tl.sum(within.to(tl.int32), 0))
            tl.store(MASSES + place + j, tl.sum(tl.where(within, mass, 0.0), 0))


@triton.jit
def _keep(
    LOGITS,
    TEMPERATURE,
    MIN_P,
    TOP_K,
    TOP_P,
    LARGEST,
    COUNTS,
    MASSES,
    CANDIDATES,
    FOUND,
    MASS,
    stride,
    N: tl.constexpr,
    V: tl.constexpr,
    X: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The depths of the tokens that decide go side by side, in order; FOUND is how many, −1 where they are too many."""
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    draw = tl.program_id(1).to(tl.int64)
    temperature, cuts, cut, by_rank, top_k, top_p = _filters(TEMPERATURE, MIN_P, TOP_K, TOP_P, draw, V)
    if cuts:
        every = tl.arange(0, PARTS)
        j = tl.arange(0, NUM_DEPTHS)
        where_PJ = (draw * parts + every[:, None]) * NUM_DEPTHS + j[None, :]
        counts_PJ = tl.load(COUNTS + where_PJ, mask=(every < parts)[:, None], other=0)
        masses_PJ = tl.load(MASSES + where_PJ, mask=(every < parts)[:, None], other=0.0)
        counts_J = tl.sum(counts_PJ, 0)
        masses_J = tl.sum(masses_PJ, 0)
        mass = tl.sum(tl.where(j == NUM_DEPTHS - 1, masses_J, 0.0), 0)
        enough_J = tl.where(by_rank, counts_J >= top_k, masses_J >= mass * (top_p + MASS_ERROR))
        chosen = tl.min(tl.where(enough_J, j, NUM_DEPTHS - 1), 0)
        count_P = tl.sum(tl.where(j[None, :] == chosen, counts_PJ, 0), 1)
        found = tl.sum(count_P, 0)
        if found <= N:
            largest = _largest_of(LARGEST, draw, parts, PARTS)
            depth, bits = _load(LOGITS + draw * stride, part * X, V, largest, temperature, X, False)
            within = (bits <= cut) & ((depth <= _depth_of(chosen)) | (chosen == NUM_DEPTHS - 1))
            before = tl.sum(tl.where(every < part, count_P, 0), 0)
            place = before + tl.cumsum(within.to(tl.int32), 0) - 1
            tl.store(CANDIDATES + draw * N + place, depth, mask=within)
        if part == 0:
            tl.store(FOUND + draw, tl.where(found <= N, found, -1))
            tl.store(MASS + draw, mass)


@triton.jit
def _floor(
    LOGITS,
    TEMPERATURE,
    MIN_P,
    TOP_K,
    TOP_P,
    LARGEST,
    CANDIDATES,
    FOUND,
    MASS,
    FLOOR,
    stride,
    parts,
    N: tl.constexpr,
    V: tl.constexpr,
    X: tl.constexpr,
    PARTS: tl.constexpr,
):
    draw = tl.program_id(0).to(tl.int64)
    temperature, cuts, cut, by_rank, top_k, top_p = _filters(TEMPERATURE, MIN_P, TOP_K, TOP_P, draw, V)
    if cuts:
        largest = _largest_of(LARGEST, draw, parts, PARTS)
        found = tl.load(FOUND + draw)
        mass = tl.load(MASS + draw)
        if found >= 0:
            kept = CANDIDATES + draw * N
            cut = _cut(kept, found, largest, temperature, mass, cut, by_rank, top_k, top_p, N, True)
        else:
            row = LOGITS + draw * stride
            cut = _cut(row, V, largest, temperature, mass, cut, by_rank, top_k, top_p, X, False)
        tl.store(FLOOR + draw, 0.0 - cut.to(tl.float32, bitcast=True))
    else:
        tl.store(FLOOR + draw, float("-inf"))


@triton.jit
def _cut(
    row,
    size,
    largest,
    temperature,
    mass,
    cut,
    by_rank,
    top_k,
    top_p,
    X: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """Of top-k and top-p over what `cut` leaves, whose mass is `mass`."""
    if by_rank:
        by_min_p = cut
        target = top_k.to(tl.float32)
        cut = tl.minimum(_reach(row, size, largest, temperature, by_min_p, target, X, DEPTHS, False), by_min_p)
    if top_p < 1:
        if by_rank:  # of those that equal the k-th, only as many as make k have mass
            mass = _weight(row, size, largest, temperature, cut, X, DEPTHS, True)
            equal = tl.exp(0.0 - cut.to(tl.float32, bitcast=True))
            surplus = _weight(row, size, largest, temperature, cut, X, DEPTHS, False) - top_k
            mass -= tl.maximum(surplus, 0.0) * equal
        cut = tl.minimum(_reach(row, size, largest, temperature, cut, mass * top_p, X, DEPTHS, True), cut)
    return cut


@triton.jit
def _load(row, start, size, largest, temperature, X: tl.constexpr, DEPTHS: tl.constexpr):
    """(depth, its bits) of X tokens, kept as depths or as logits; bits beyond every cut past the end of the row."""
    token = start + tl.arange(0, X)
    depth = tl.load(row + token, mask=token < size, other=float("-inf")).to(tl.float32)
    if not DEPTHS:
        depth = 0.0 - (depth - largest) / temperature
    return depth, tl.where(token < size, depth.to(tl.int32, bitcast=True), 0x7FFFFFFF)


@triton.jit
def _weight(row, size, largest, temperature, cut, X: tl.constexpr, DEPTHS: tl.constexpr, MASS: tl.constexpr):
    """How many tokens, or how much mass (of the largest token's), lie within a cut."""
    sum_X = tl.zeros([X], tl.float32)
    for start in range(0, size, X):
        depth, bits = _load(row, start, size, largest, temperature, X, DEPTHS)
        weight = tl.exp(0.0 - depth) if MASS else tl.full([X], 1.0, tl.float32)
        sum_X += tl.where(bits <= cut, weight, 0.0)
    return tl.sum(sum_X, 0)


@triton.jit
def _reach(row, size, largest, temperature, limit, target, X: tl.constexpr, DEPTHS: tl.constexpr, MASS: tl.constexpr):
    """The least cut within which tokens of `limit` weigh `target`; past `limit` where they never do."""
    low = tl.full([], 0, tl.int32)
    step = tl.full([], 1 << 29, tl.int32)
    for index in range(16):
        # Three cuts part the range in four, the last time one in two: the end of a range is no cut.
        probe_4 = low + (step - 1) + step * tl.arange(0, 4)
        sum_4X = tl.zeros([4, X], tl.float32)
        for start in range(0, size, X):
            depth, bits = _load(row, start, size, largest, temperature, X, DEPTHS)
            weight = tl.exp(0.0 - depth) if MASS else tl.full([X], 1.0, tl.float32)
            weight = tl.where(bits <= limit, weight, 0.0)
            sum_4X += tl.where(bits[None, :] <= probe_4[:, None], weight[None, :], 0.0)
        short = (tl.sum(sum_4X, 1) < target) & (tl.arange(0, 4) < tl.where(index < 15, 3, 1))
        low += step * tl.sum(short.to(tl.int32), 0)
        step = tl.maximum(step // 4, 1)
    return low
