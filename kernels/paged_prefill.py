"""Prefill attention: a chunk of each row's tokens over its paged context, causal with the chunk's offset.

A program holds as many tokens as fit M rows with the G query heads of one KV head side by side, so that K and V are
read once for the whole group. The programs with the longest context start first.

Shape suffixes as in kernels.ops; M rows of a query tile, C tokens of a KV tile.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import AttentionBatch
from kernels.paged_decode import LOG2_E
from kernels.tuning import PrefillTile


def paged_prefill(
    q_THE: Tensor,
    pool: Tensor,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    out_THE: Tensor,
    first_row: int,
    tile: PrefillTile,
    whole_from: int | None = None,
) -> None:
    """Writes the tokens of rows `first_row` and after; left alone are rows of context 0, and rows of `whole_from` or
    more tokens that are their whole context."""
    _, num_heads, head_dim = q_THE.shape
    num_kv_heads = pool.shape[1]
    group = num_heads // num_kv_heads
    num_rows = batch.contexts_R.shape[0] - first_row
    _prefill[(triton.cdiv(batch.max_query, tile.rows // group), num_kv_heads, num_rows)](
        q_THE,
        pool,
        batch.block_tables_RB,
        batch.starts_R1,
        batch.contexts_R,
        out_THE,
        layer,
        first_row,
        2**31 - 1 if whole_from is None else whole_from,
        batch.block_tables_RB.stride(0),
        q_THE.stride(0),
        out_THE.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        scale * LOG2_E,
        G=group,
        E=head_dim,
        S=pool.shape[4],
        M=tile.rows,
        C=tile.tokens,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["layer", "first_row", "whole_from", "table_stride"])
def _prefill(
    Q,
    POOL,
    TABLES,
    STARTS,
    CONTEXTS,
    OUT,
    layer,
    first_row,
    whole_from,
    table_stride,
    q_stride,
    out_stride,
    block_stride,
    head_stride,
    layer_stride,
    log2_scale,
    G: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
):
    row = first_row + tl.program_id(2)
    head = tl.program_id(1)
    begin = tl.load(STARTS + row)
    num_query = tl.load(STARTS + row + 1) - begin
    context = tl.load(CONTEXTS + row)
    tokens_held: tl.constexpr = M // G
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * tokens_held
    whole = (num_query == context) & (num_query >= whole_from)
    if (first_token >= num_query) | (context == 0) | whole:
        return

    m = tl.arange(0, M)
    e = tl.arange(0, E)
    token_M = first_token + m // G
    held_M = (token_M < num_query) & (m < tokens_held * G)
    lane_M = (head * G + m % G) * E
    q_ME = tl.load(
        Q + ((begin + token_M).to(tl.int64) * q_stride + lane_M)[:, None] + e[None, :], mask=held_M[:, None], other=0.0
    )
    position_M = context - num_query + token_M
    layer_base = POOL + layer.to(tl.int64) * layer_stride + head.to(tl.int64) * head_stride
    table = TABLES + row.to(tl.int64) * table_stride

    seen_by_all = context - num_query + first_token + 1
    seen_by_any = tl.minimum(seen_by_all + tokens_held - 1, context)
    unmasked = seen_by_all // C * C
    largest_M = tl.full([M], float("-inf"), tl.float32)
    weight_M = tl.zeros([M], tl.float32)
    sum_ME = tl.zeros([M, E], tl.float32)
    for start in range(0, unmasked, C):
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
            False,
        )
    for start in range(unmasked, seen_by_any, C):
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
            True,
        )
    tl.store(
        OUT + ((begin + token_M).to(tl.int64) * out_stride + lane_M)[:, None] + e[None, :],
        (sum_ME / weight_M[:, None]).to(OUT.dtype.element_ty),
        mask=held_M[:, None],
    )


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
