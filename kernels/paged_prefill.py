"""Prefill attention: a chunk of each row's tokens over its paged context, causal with the chunk's offset.

A program holds as many tokens as fit M rows with the G query heads of one KV head side by side, so that K and V are
read once for the whole group. The programs with the longest context start first. Where tokens are too few to fill the
device, several programs share a long context, and a second launch merges what each found in its part.

Shape suffixes as in kernels.ops; M rows of a query tile, C tokens of a KV tile.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import AttentionBatch
from kernels.paged_context import join_parts, leave_part, walk
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
    first_row: int,
    tile: PrefillTile,
    whole_from: int | None = None,
    splits: int = 1,
) -> None:
    """Writes the tokens of rows `first_row` and after; left alone are rows of context 0, and rows of `whole_from` or
    more tokens that are their whole context. Contexts are split into at most `splits` parts."""
    num_tokens, num_heads, head_dim = q_THE.shape
    num_kv_heads = pool.shape[1]
    group = num_heads // num_kv_heads
    num_rows = batch.contexts_R.shape[0] - first_row
    whole_from = NONE if whole_from is None else whole_from
    held = splits if splits > 1 else 0
    partial = torch.empty(held, num_tokens, num_heads, head_dim, dtype=torch.float32, device=q_THE.device)
    statistics = torch.empty(held, 2, num_tokens, num_heads, dtype=torch.float32, device=q_THE.device)
    _prefill[(triton.cdiv(batch.max_query, tile.rows // group), num_kv_heads, num_rows * splits)](
        q_THE,
        pool,
        batch.block_tables_RB,
        batch.starts_R1,
        batch.contexts_R,
        out_THE,
        partial,
        statistics,
        layer,
        first_row,
        whole_from,
        splits,
        num_tokens,
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
        SPLIT=splits > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _merge[(batch.max_query, num_rows)](
            batch.starts_R1,
            batch.contexts_R,
            out_THE,
            partial,
            statistics,
            first_row,
            whole_from,
            splits,
            num_tokens,
            out_THE.stride(0),
            H=num_heads,
            HEADS=triton.next_power_of_2(num_heads),
            E=head_dim,
            C=tile.tokens,
        )


@triton.jit(do_not_specialize=["layer", "first_row", "whole_from", "splits", "num_tokens", "table_stride"])
def _prefill(
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
    SPLIT: tl.constexpr,
):
    row = first_row + (tl.program_id(2) // splits if SPLIT else tl.program_id(2))
    head = tl.program_id(1)
    begin = tl.load(STARTS + row)
    num_query = tl.load(STARTS + row + 1) - begin
    context = tl.load(CONTEXTS + row)
    tokens_held: tl.constexpr = M // G
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * tokens_held
    whole = (num_query == context) & (num_query >= whole_from)
    if (first_token >= num_query) | (context == 0) | whole:
        return
    first = 0
    if SPLIT:
        part = _part(context, splits, C)
        split = tl.program_id(2) % splits
        first = split * part
        if first >= context:
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
    last = seen_by_any
    unmasked = seen_by_all // C * C
    if SPLIT:
        last = tl.minimum(first + part, last)
        unmasked = tl.maximum(tl.minimum(unmasked, last), first)
    largest_M, weight_M, sum_ME = walk(
        q_ME, position_M, layer_base, table, first, unmasked, last, context, block_stride, log2_scale, M, E, S, C
    )
    if SPLIT and part < context:
        lane_M = head * G + m % G
        leave_part(
            PARTIAL,
            STATISTICS,
            split,
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
        tl.store(
            OUT + ((begin + token_M).to(tl.int64) * out_stride + lane_M)[:, None] + e[None, :],
            (sum_ME / weight_M[:, None]).to(OUT.dtype.element_ty),
            mask=held_M[:, None],
        )


@triton.jit
def _part(context, splits, C: tl.constexpr):
    """Tokens of context that a program takes: whole tiles, and two or more."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, splits), C), 2) * C


@triton.jit(do_not_specialize=["first_row", "whole_from", "splits", "num_tokens"])
def _merge(
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
):
    row = first_row + tl.program_id(1)
    begin = tl.load(STARTS + row)
    num_query = tl.load(STARTS + row + 1) - begin
    context = tl.load(CONTEXTS + row)
    part = _part(context, splits, C)
    whole = (num_query == context) & (num_query >= whole_from)
    if (tl.program_id(0) >= num_query) | (part >= context) | whole:
        return
    token = (begin + tl.program_id(0)).to(tl.int64)
    join_parts(PARTIAL, STATISTICS, OUT, token, tl.cdiv(context, part), num_tokens, out_stride, H, HEADS, E)
