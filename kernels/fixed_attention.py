"""Paged attention whose every token is the same to the bit, in whatever chunk and beside whatever rows it is computed.

A token's context is cut at fixed positions, and the parts are joined from the first on. One kernel serves prompts and
decodes, since what a decode step computed may be computed again as part of a prompt. Where programs are few each part has
one of its own, and a second launch joins them; else a program takes the parts one after the other: the same joins in the
same order. A part that a token does not see changes nothing of it.

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

PART_TOKENS = 512


def fixed_attention(
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
    apart: bool,
    part_tokens: int = PART_TOKENS,
) -> None:
    """Writes the tokens of `rows`, none of which has more than `max_query`; rows of context 0 are left alone. `apart`: a
    program for each part."""
    num_tokens, num_heads, head_dim = q_THE.shape
    num_kv_heads = pool.shape[1]
    group = num_heads // num_kv_heads
    parts = triton.cdiv(batch.max_context, part_tokens) if apart else 1
    held = parts if parts > 1 else 0
    partial = torch.empty(held, num_tokens, num_heads, head_dim, dtype=torch.float32, device=q_THE.device)
    statistics = torch.empty(held, 2, num_tokens, num_heads, dtype=torch.float32, device=q_THE.device)
    _attend[(triton.cdiv(max_query, tile.rows // group), num_kv_heads, len(rows) * parts)](
        q_THE,
        pool,
        batch.block_tables_RB,
        batch.starts_R1,
        batch.contexts_R,
        out_THE,
        partial,
        statistics,
        layer,
        rows.start,
        parts,
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
        PART=part_tokens,
        APART=parts > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if parts > 1:
        _join_parts[(max_query, len(rows))](
            batch.starts_R1,
            batch.contexts_R,
            out_THE,
            partial,
            statistics,
            rows.start,
            num_tokens,
            out_THE.stride(0),
            H=num_heads,
            HEADS=triton.next_power_of_2(num_heads),
            E=head_dim,
            PART=part_tokens,
        )


@triton.jit(do_not_specialize=["layer", "first_row", "parts", "num_tokens", "table_stride"])
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
    parts,
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
    APART: tl.constexpr,
):
    row = first_row + tl.program_id(2) // parts
    head = tl.program_id(1)
    begin = tl.load(STARTS + row)
    num_query = tl.load(STARTS + row + 1) - begin
    context = tl.load(CONTEXTS + row)
    tokens_held: tl.constexpr = M // G
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * tokens_held
    if (first_token >= num_query) | (context == 0):
        return
    seen_by_all = context - num_query + first_token + 1
    seen_by_any = tl.minimum(seen_by_all + tokens_held - 1, context)
    number = tl.program_id(2) % parts
    last_number = tl.cdiv(seen_by_any, PART)
    if APART:
        if number >= last_number:
            return
        last_number = number + 1

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

    all_largest_M = tl.full([M], SMALLEST, tl.float32)
    all_weight_M = tl.zeros([M], tl.float32)
    all_sum_ME = tl.zeros([M, E], tl.float32)
    for part in range(number, last_number):
        last = tl.minimum((part + 1) * PART, seen_by_any)
        unmasked = tl.maximum(tl.minimum(seen_by_all // C * C, last), part * PART)
        largest_M, weight_M, sum_ME = walk(
            q_ME,
            position_M,
            layer_base,
            table,
            part * PART,
            unmasked,
            last,
            context,
            block_stride,
            log2_scale,
            M,
            E,
            S,
            C,
        )
        all_largest_M, all_weight_M, all_sum_ME = joined(
            all_largest_M, all_weight_M, all_sum_ME, largest_M, weight_M, sum_ME
        )

    if APART and context > PART:
        leave_part(
            PARTIAL,
            STATISTICS,
            number,
            begin,
            token_M,
            lane_M,
            held_M,
            all_largest_M,
            all_weight_M,
            all_sum_ME,
            num_tokens,
            tl.num_programs(1) * G,
            E,
        )
    else:
        out_at_M = (begin + token_M).to(tl.int64) * out_stride + lane_M * E
        tl.store(
            OUT + out_at_M[:, None] + e[None, :],
            (all_sum_ME / all_weight_M[:, None]).to(OUT.dtype.element_ty),
            mask=held_M[:, None],
        )


@triton.jit(do_not_specialize=["first_row", "num_tokens"])
def _join_parts(
    STARTS,
    CONTEXTS,
    OUT,
    PARTIAL,
    STATISTICS,
    first_row,
    num_tokens,
    out_stride,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    PART: tl.constexpr,
):
    row = first_row + tl.program_id(1)
    begin = tl.load(STARTS + row)
    num_query = tl.load(STARTS + row + 1) - begin
    context = tl.load(CONTEXTS + row)
    if (tl.program_id(0) >= num_query) | (context <= PART):
        return
    token = (begin + tl.program_id(0)).to(tl.int64)
    seen = context - num_query + tl.program_id(0) + 1
    join_parts(PARTIAL, STATISTICS, OUT, token, tl.cdiv(seen, PART), num_tokens, out_stride, H, HEADS, E)
