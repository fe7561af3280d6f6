"""What attention over a paged context is made of, in whichever kernel: a walk over a stretch of one row's context, and what
several found in theirs, left for each other and joined.

Shape suffixes as in kernels.ops; M rows of a query tile, C tokens of a KV tile.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

SMALLEST = tl.constexpr(-1e30)  # of scores: a row that sees nothing of a part has weights of 0 there, and no NaN


@triton.jit
def walk(
    q_ME,
    position_M,
    layer_base,
    table,
    first,
    unmasked,
    last,
    context,
    block_stride,
    log2_scale,
    M: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
):
    """Over the context from `first` to `last`, of which all see what is before `unmasked`: the largest score, the sum of
    the weights by it, and that of the values weighted."""
    largest_M = tl.full([M], SMALLEST, tl.float32)
    weight_M = tl.zeros([M], tl.float32)
    sum_ME = tl.zeros([M, E], tl.float32)
    for masked in tl.static_range(2):
        for start in range(unmasked if masked else first, last if masked else unmasked, C):
            largest_M, weight_M, sum_ME = _advance(
                q_ME,
                position_M,
                largest_M,
                weight_M,
                sum_ME,
                layer_base,
                table,
                start,
                context,
                block_stride,
                log2_scale,
                E,
                S,
                C,
                masked,
            )
    return largest_M, weight_M, sum_ME


@triton.jit
def _advance(
    q_ME,
    position_M,
    largest_M,
    weight_M,
    sum_ME,
    layer_base,
    table,
    start,
    context,
    block_stride,
    log2_scale,
    E: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    e = tl.arange(0, E)
    position_C = start + tl.arange(0, C)
    if MASKED:
        inside_C = position_C < context
        block_C = tl.load(table + position_C // S, mask=inside_C, other=0).to(tl.int64)
        where_CE = layer_base + (block_C * block_stride + (position_C % S) * E)[:, None] + e[None, :]
        keys_CE = tl.load(where_CE, mask=inside_C[:, None], other=0.0)
        values_CE = tl.load(where_CE + S * E, mask=inside_C[:, None], other=0.0)
    else:
        block_C = tl.load(table + position_C // S).to(tl.int64)
        where_CE = layer_base + (block_C * block_stride + (position_C % S) * E)[:, None] + e[None, :]
        keys_CE = tl.load(where_CE)
        values_CE = tl.load(where_CE + S * E)
    scores_MC = tl.dot(q_ME, tl.trans(keys_CE), input_precision="ieee")
    if MASKED:
        scores_MC = tl.where(position_C[None, :] <= position_M[:, None], scores_MC, float("-inf"))
    larger_M = tl.maximum(largest_M, tl.max(scores_MC, 1) * log2_scale)
    weights_MC = tl.exp2(scores_MC * log2_scale - larger_M[:, None])
    shrink_M = tl.exp2(largest_M - larger_M)
    weight_M = weight_M * shrink_M + tl.sum(weights_MC, 1)
    sum_ME = sum_ME * shrink_M[:, None]
    sum_ME = tl.dot(weights_MC.to(values_CE.dtype), values_CE, sum_ME, input_precision="ieee")
    return larger_M, weight_M, sum_ME


@triton.jit
def joined(largest, weight, sum_E, part_largest, part_weight, part_sum_E):
    """What was found so far and what a further part found. Products and sums are spelled out, so that every kernel that
    this is compiled into rounds at the same places."""
    larger = tl.maximum(largest, part_largest)
    shrink, part_shrink = tl.exp2(largest - larger), tl.exp2(part_largest - larger)
    weight = tl.fma(weight, shrink, part_weight * part_shrink)
    part_sum_E = part_sum_E * part_shrink[:, None]
    return larger, weight, tl.fma(sum_E, tl.broadcast_to(shrink[:, None], sum_E.shape), part_sum_E)


@triton.jit
def leave_part(
    PARTIAL,
    STATISTICS,
    number,
    begin,
    token_M,
    lane_M,
    held_M,
    largest_M,
    weight_M,
    sum_ME,
    num_tokens,
    num_heads,
    E: tl.constexpr,
):
    """What was found in part `number`, of the query heads `lane_M` of `token_M` behind token `begin`: for join_parts."""
    e = tl.arange(0, E)
    place_M = (number * num_tokens + begin + token_M).to(tl.int64) * num_heads + lane_M
    tl.store(PARTIAL + place_M[:, None] * E + e[None, :], sum_ME, mask=held_M[:, None])
    largest_at_M = (number * 2 * num_tokens + begin + token_M).to(tl.int64) * num_heads + lane_M
    tl.store(STATISTICS + largest_at_M, largest_M, mask=held_M)
    tl.store(STATISTICS + largest_at_M + num_tokens * num_heads, weight_M, mask=held_M)


@triton.jit
def join_parts(
    PARTIAL,
    STATISTICS,
    OUT,
    token,
    num_parts,
    num_tokens,
    out_stride,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    E: tl.constexpr,
):
    """A token's output, of what was left of its parts, from the first on."""
    h = tl.arange(0, HEADS)
    e = tl.arange(0, E)
    largest_H = tl.full([HEADS], SMALLEST, tl.float32)
    weight_H = tl.where(h < H, 0.0, 1.0)  # lanes that nobody reads divide by one
    sum_HE = tl.zeros([HEADS, E], tl.float32)
    for part in range(num_parts):
        statistic_H = STATISTICS + (part * 2 * num_tokens + token) * H + h
        part_largest_H = tl.load(statistic_H, mask=h < H, other=SMALLEST)
        part_weight_H = tl.load(statistic_H + num_tokens * H, mask=h < H, other=0.0)
        place_HE = ((part * num_tokens + token) * H + h)[:, None] * E + e[None, :]
        part_HE = tl.load(PARTIAL + place_HE, mask=(h < H)[:, None], other=0.0)
        largest_H, weight_H, sum_HE = joined(largest_H, weight_H, sum_HE, part_largest_H, part_weight_H, part_HE)
    tl.store(
        OUT + token * out_stride + h[:, None] * E + e[None, :],
        (sum_HE / weight_H[:, None]).to(OUT.dtype.element_ty),
        mask=(h < H)[:, None],
    )
