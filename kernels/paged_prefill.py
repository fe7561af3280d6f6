"""Prefill attention: a chunk of each row's tokens over its paged context, causal with the chunk's offset.

A program holds as many tokens as fit M rows with the G query heads of one KV head side by side, so that K and V are
read once for the whole group. The programs with the longest context start first. Where tokens are too few to fill the
device, several programs share a long context, and a second launch joins what each found in its part.

With parts of a fixed size every token is the same to the bit, in whatever chunk and beside whatever rows it is computed:
contexts are cut at multiples of it, and the parts joined from the first on, by one program that takes them one after the
other, or by the second launch. A part that a token does not see changes nothing of it. What a decode step computed may be
computed again as part of a prompt, so this kernel then serves decodes too.

Shape suffixes as in kernels.ops; M rows of a query tile, C tokens of a KV tile.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import AttentionBatch
from kernels.paged_context import SMALLEST, join_parts, joined, leave_part, walk
from kernels.paged_decode import LOG2_E
from kernels.tuning import PrefillTile

NONE = 2**31 - 1


def paged_prefill(
    q_THE: Tensor,
    pool: Tensor,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    out_THE: Tensor,
    rows: range,
    max_query: int,
    tile: PrefillTile,
    *,
    splits: int = 1,
    part_tokens: int = 0,
    whole_from: int | None = None,
) -> None:
    """Writes the tokens of `rows`, none of which has more than `max_query`; left alone are rows of context 0, and rows of
    `whole_from` or more tokens that are their whole context. Up to `splits` programs share a context. `part_tokens`: of
    parts of a fixed size; then `splits` is 1 or as many as the longest context has."""
    num_tokens, num_heads, head_dim = q_THE.shape
    num_kv_heads = pool.shape[1]
    group = num_heads // num_kv_heads
    held = splits if splits > 1 else 0
    partial = torch.empty(held, num_tokens, num_heads, head_dim, dtype=torch.float32, device=q_THE.device)
    statistics = torch.empty(held, 2, num_tokens, num_heads, dtype=torch.float32, device=q_THE.device)
    numbers = rows.start, NONE if whole_from is None else whole_from, splits, num_tokens
    _attend[(triton.cdiv(max_query, tile.rows // group), num_kv_heads, len(rows) * splits)](
        q_THE,
        pool,
        batch.block_tables_RB,
        batch.starts_R1,
        batch.contexts_R,
        out_THE,
        partial,
        statistics,
        layer,
        *numbers,
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
        PART=part_tokens,
        SPLIT=splits > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _join[(max_query, len(rows))](
            batch.starts_R1,
            batch.contexts_R,
            out_THE,
            partial,
            statistics,
            *numbers,
            out_THE.stride(0),
            H=num_heads,
            HEADS=triton.next_power_of_2(num_heads),
            E=head_dim,
            C=tile.tokens,
            PART=part_tokens,
        )


@triton.jit(do_not_specialize=["layer", "first_row", "whole_from", "splits", "num_tokens", "table_stride"])
def _attend(
    Q,
    POOL,
    TABLES,
    STARTS,
    CONTEXTS,
    OUT,
    PARTIAL,
    STATISTICS,
    layer,
    first_row,
    whole_from,
    splits,
    num_tokens,
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
    PART: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row = first_row + (tl.program_id(2) // splits if SPLIT else tl.program_id(2))
    head = tl.program_id(1)
    begin, num_query, context = _row(STARTS, CONTEXTS, row, whole_from)
    tokens_held: tl.constexpr = M // G
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * tokens_held
    if (first_token >= num_query) | (context == 0):
        return
    seen_by_all = context - num_query + first_token + 1
    seen_by_any = tl.minimum(seen_by_all + tokens_held - 1, context)
    part = _part(context, splits, C, PART)
    number = 0
    if SPLIT:
        number = tl.program_id(2) % splits
        if number * part >= seen_by_any:
            return

    m = tl.arange(0, M)
    e = tl.arange(0, E)
    token_M = first_token + m // G
    held_M = (token_M < num_query) & (m < tokens_held * G)
    lane_M = head * G + m % G
    q_at_M = (begin + token_M).to(tl.int64) * q_stride + lane_M * E
    q_ME = tl.load(Q + q_at_M[:, None] + e[None, :], mask=held_M[:, None], other=0.0)
    position_M = context - num_query + token_M
    layer_base = POOL + layer.to(tl.int64) * layer_stride + head.to(tl.int64) * head_stride
    table = TABLES + row.to(tl.int64) * table_stride

    unmasked = seen_by_all // C * C
    if PART:
        largest_M = tl.full([M], SMALLEST, tl.float32)
        weight_M = tl.zeros([M], tl.float32)
        sum_ME = tl.zeros([M, E], tl.float32)
        for each in range(number, number + 1 if SPLIT else tl.cdiv(seen_by_any, PART)):
            first = each * PART
            last = tl.minimum(first + PART, seen_by_any)
            part_largest_M, part_weight_M, part_sum_ME = walk(
                q_ME,
                position_M,
                layer_base,
                table,
                first,
                tl.maximum(tl.minimum(unmasked, last), first),
                last,
                context,
                block_stride,
                log2_scale,
                M,
                E,
                S,
                C,
            )
            largest_M, weight_M, sum_ME = joined(
                largest_M, weight_M, sum_ME, part_largest_M, part_weight_M, part_sum_ME
            )
    else:
        first = 0
        last = seen_by_any
        if SPLIT:
            first = number * part
            last = tl.minimum(first + part, last)
            unmasked = tl.maximum(tl.minimum(unmasked, last), first)
        largest_M, weight_M, sum_ME = walk(
            q_ME, position_M, layer_base, table, first, unmasked, last, context, block_stride, log2_scale, M, E, S, C
        )

    if SPLIT and part < context:
        leave_part(
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
            tl.num_programs(1) * G,
            E,
        )
    else:
        out_at_M = (begin + token_M).to(tl.int64) * out_stride + lane_M * E
        tl.store(
            OUT + out_at_M[:, None] + e[None, :],
            (sum_ME / weight_M[:, None]).to(OUT.dtype.element_ty),
            mask=held_M[:, None],
        )


@triton.jit(do_not_specialize=["first_row", "whole_from", "splits", "num_tokens"])
def _join(
    STARTS,
    CONTEXTS,
    OUT,
    PARTIAL,
    STATISTICS,
    first_row,
    whole_from,
    splits,
    num_tokens,
    out_stride,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    PART: tl.constexpr,
):
    begin, num_query, context = _row(STARTS, CONTEXTS, first_row + tl.program_id(1), whole_from)
    part = _part(context, splits, C, PART)
    if (tl.program_id(0) >= num_query) | (part >= context):
        return
    token = (begin + tl.program_id(0)).to(tl.int64)
    seen = context - num_query + tl.program_id(0) + 1
    join_parts(PARTIAL, STATISTICS, OUT, token, tl.cdiv(seen, part), num_tokens, out_stride, H, HEADS, E)


@triton.jit
def _row(STARTS, CONTEXTS, row, whole_from):
    """(first token, tokens of this step, context) of a row; context 0 where the row is left alone."""
    begin = tl.load(STARTS + row)
    num_query = tl.load(STARTS + row + 1) - begin
    context = tl.load(CONTEXTS + row)
    return begin, num_query, tl.where((num_query == context) & (num_query >= whole_from), 0, context)


@triton.jit
def _part(context, splits, C: tl.constexpr, PART: tl.constexpr):
    """Tokens of each part of a context. Where no size is fixed: whole tiles, and two or more."""
    part = PART
    if PART == 0:
        part = tl.maximum(tl.cdiv(tl.cdiv(context, splits), C), 2) * C
    return part
