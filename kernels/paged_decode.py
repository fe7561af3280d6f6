"""Decode attention: one query token a row over its paged context.

The tiles of all (row, KV head) units form one line, of which each program of a fixed grid takes an equal share, whatever
the contexts are: the split of the KV is found on the device, so a captured graph serves every mix of rows. A unit that
one program holds whole goes straight to the output. Of a unit that several hold, each leaves a partial result, and the
one that arrives last merges them in their order on the line.

A launch may begin under the end of the kernel before it (kernels.early): which tiles a program has, and where they lie, was
written long before. Only q, K and V themselves are awaited.

Shape suffixes as in kernels.ops; M rows of a query tile (G query heads of one KV head, padded to what the matrix unit
takes), C tokens of a KV tile, I partial results merged at a time.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.early import begins_early
from kernels.ops import AttentionBatch
from kernels.tuning import DecodeTile

LOG2_E = 1.4426950408889634
MATRIX_ROWS = 16
MOST_ON_THEIR_WAY = 160 * 2**10  # bytes of K and V in shared memory
ROWS_HELD = (16, 64, 256, 1024)  # each is a kernel to compile


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """What programs leave for each other. Serves one launch at a time; `arrived` is zero between launches."""

    partial: Tensor  # [2 · programs, M, E] float32: sums not yet divided by their weights
    statistics: Tensor  # [2 · programs, 2, M] float32: largest score, sum of weights
    arrived: Tensor  # [rows · K] int32: programs that are done with a unit

    @classmethod
    def of(
        cls, num_programs: int, num_rows: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> "DecodeScratch":
        return cls(
            torch.empty(2 * num_programs, MATRIX_ROWS, head_dim, dtype=torch.float32, device=device),
            torch.empty(2 * num_programs, 2, MATRIX_ROWS, dtype=torch.float32, device=device),
            torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=device),
        )


def paged_decode(
    q_RHE: Tensor,
    pool: Tensor,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    out_RHE: Tensor,
    scratch: DecodeScratch,
    tile: DecodeTile,
) -> None:
    """Writes out_RHE for the batch's first q_RHE.shape[0] rows; rows of context 0 are left alone. The kernel just before
    may write q and the pool, but no contexts and tables: they are read while it may still run."""
    num_rows, num_heads, head_dim = q_RHE.shape
    num_kv_heads, size = pool.shape[1], pool.shape[4]
    early = tile.early and begins_early()
    _decode[(_num_programs(scratch.partial.shape[0] // 2, num_rows * num_kv_heads, tile.merged),)](
        q_RHE,
        pool,
        batch.block_tables_RB,
        batch.contexts_R,
        out_RHE,
        scratch.partial,
        scratch.statistics,
        scratch.arrived,
        layer,
        num_rows,
        tile.least_tiles,
        batch.block_tables_RB.stride(0),
        q_RHE.stride(0),
        out_RHE.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        scale * LOG2_E,
        K=num_kv_heads,
        G=num_heads // num_kv_heads,
        GROUP=triton.next_power_of_2(num_heads // num_kv_heads),
        M=MATRIX_ROWS,
        E=head_dim,
        S=size,
        C=tile.tokens,
        I=tile.merged,
        ROWS=next((held for held in ROWS_HELD if held >= num_rows), triton.next_power_of_2(num_rows)),
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=min(tile.num_stages, 1 + MOST_ON_THEIR_WAY // (2 * tile.tokens * head_dim * pool.element_size())),
        launch_pdl=early,
    )


def _num_programs(most: int, num_units: int, merged: int) -> int:
    """A few less, where equal units would have a few parts more than whole merges take: a pass over them for nothing."""
    parts = most // num_units
    over = parts % merged
    return num_units * (parts - over) if merged < parts and 16 * over <= parts else most


@triton.jit(do_not_specialize=["layer", "num_rows", "least_tiles", "table_stride"])
def _decode(
    Q,
    POOL,
    TABLES,
    CONTEXTS,
    OUT,
    PARTIAL,
    STATISTICS,
    ARRIVED,
    layer,
    num_rows,
    least_tiles,
    table_stride,
    q_stride,
    out_stride,
    block_stride,
    head_stride,
    layer_stride,
    log2_scale,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    tiles_R = tl.cdiv(tl.load(CONTEXTS + rows, mask=rows < num_rows, other=0), C)
    share = tl.maximum(tl.cdiv(tl.sum(tiles_R, 0) * K, tl.num_programs(0)), least_tiles)
    # A program that meets two units pays for it as for a few tiles more. Where shares larger by less than that let every
    # unit begin with a program of its own, units take whole shares of the line.
    aligned = share + tl.where(num_rows * K <= tl.num_programs(0), 0, least_tiles + 1)
    while tl.sum(tl.cdiv(tiles_R, aligned), 0) * K > tl.num_programs(0) and aligned <= share + least_tiles:
        aligned += tl.maximum(aligned // 16, 1)
    grain = 1
    if aligned <= share + least_tiles:
        share = aligned
        grain = aligned
    lengths_R = tl.cdiv(tiles_R, grain) * grain
    ends_R = tl.cumsum(lengths_R, 0) * K
    tile = program * share
    stop = tl.minimum(tile + share, tl.sum(lengths_R, 0) * K)
    row = tl.sum((ends_R <= tile).to(tl.int32), 0)
    row_start = tl.max(tl.where(ends_R <= tile, ends_R, 0), 0)

    m = tl.arange(0, M)
    e = tl.arange(0, E)
    c = tl.arange(0, C)
    while tile < stop:
        context = tl.load(CONTEXTS + row)
        while context == 0:
            row += 1
            context = tl.load(CONTEXTS + row)
        unit_tiles = tl.cdiv(context, C)
        unit_length = tl.cdiv(unit_tiles, grain) * grain
        head = (tile - row_start) // unit_length
        unit_start = row_start + head * unit_length
        first = tile - unit_start
        last = tl.minimum(stop - unit_start, unit_tiles)

        layer_base = POOL + layer.to(tl.int64) * layer_stride + head.to(tl.int64) * head_stride
        table = TABLES + row.to(tl.int64) * table_stride
        # Block numbers are read a tile ahead: a load that waits for another one of its own turn would take half of the
        # pipeline's stages, and so of what is on its way.
        if C == S:  # a tile is a block: one number, and offsets that stay the same
            block = tl.load(table + first)
        else:
            block_C = tl.load(table + (first * C + c) // S, mask=first * C + c < context, other=0)
        if EARLY:
            gdc_wait()
        q_ME = tl.load(
            Q + row.to(tl.int64) * q_stride + (head * G + m[:, None]) * E + e[None, :], mask=(m < G)[:, None], other=0.0
        )
        largest_M = tl.full([M], float("-inf"), tl.float32)
        weight_M = tl.zeros([M], tl.float32)
        sum_ME = tl.zeros([M, E], tl.float32)
        for start in range(first * C, last * C, C):
            inside = start + c < context
            if C == S:
                where_CE = layer_base + block.to(tl.int64) * block_stride + (c[:, None] * E + e[None, :])
                block = tl.load(table + start // S + 1, mask=start + C < context, other=0)
            else:
                where_CE = (
                    layer_base + (block_C.to(tl.int64) * block_stride + (start + c) % S * E)[:, None] + e[None, :]
                )
                block_C = tl.load(table + (start + C + c) // S, mask=start + C + c < context, other=0)
            keys_CE = tl.load(where_CE, mask=inside[:, None], other=0.0)
            values_CE = tl.load(where_CE + S * E, mask=inside[:, None], other=0.0)
            scores_MC = tl.dot(q_ME, tl.trans(keys_CE), input_precision="ieee") * log2_scale
            scores_MC = tl.where(inside[None, :], scores_MC, float("-inf"))
            larger_M = tl.maximum(largest_M, tl.max(scores_MC, 1))
            weights_MC = tl.exp2(scores_MC - larger_M[:, None])
            shrink_M = tl.exp2(largest_M - larger_M)
            weight_M = weight_M * shrink_M + tl.sum(weights_MC, 1)
            sum_ME = sum_ME * shrink_M[:, None]
            sum_ME = tl.dot(weights_MC.to(values_CE.dtype), values_CE, sum_ME, input_precision="ieee")
            largest_M = larger_M

        if last - first == unit_tiles:
            tl.store(
                OUT + row.to(tl.int64) * out_stride + (head * G + m[:, None]) * E + e[None, :],
                (sum_ME / weight_M[:, None]).to(OUT.dtype.element_ty),
                mask=(m < G)[:, None],
            )
        else:
            # A program starts inside at most one unit and stops inside at most one: two places are enough.
            place = 2 * program + (first == 0).to(tl.int32)
            tl.store(PARTIAL + (place * M + m[:, None]) * E + e[None, :], sum_ME, mask=(m < G)[:, None])
            tl.store(STATISTICS + place * 2 * M + m, largest_M)
            tl.store(STATISTICS + place * 2 * M + M + m, weight_M)
            tl.debug_barrier()  # every thread's stores come before the one thread's arrival
            first_program = unit_start // share
            holders = (unit_start + unit_tiles - 1) // share - first_program + 1
            if tl.atomic_add(ARRIVED + row * K + head, 1, sem="acq_rel") == holders - 1:
                out = OUT + row.to(tl.int64) * out_stride + head * G * E
                if holders <= I // 2:
                    _merge(PARTIAL, STATISTICS, out, first_program, holders, G, GROUP, M, E, I // 2)
                else:
                    _merge(PARTIAL, STATISTICS, out, first_program, holders, G, GROUP, M, E, I)
                tl.store(ARRIVED + row * K + head, 0)

        tile = unit_start + tl.where(last == unit_tiles, unit_length, last)
        if (last == unit_tiles) & (head == K - 1):
            row += 1
            row_start = tile
    if EARLY:
        gdc_wait()  # of those too that had nothing to do


@triton.jit
def _merge(
    PARTIAL,
    STATISTICS,
    OUT,
    first_program,
    holders,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
):
    g = tl.arange(0, GROUP)
    e = tl.arange(0, E)
    i = tl.arange(0, I)
    largest_G = tl.full([GROUP], -1e30, tl.float32)
    weight_G = tl.where(g < G, 0.0, 1.0)  # lanes that nobody reads divide by one
    sum_GE = tl.zeros([GROUP, E], tl.float32)
    for start in range(0, holders, I):
        holder = start + i
        place_I = 2 * (first_program + holder) + (holder == 0).to(tl.int32)
        held_IG = (holder < holders)[:, None] & (g < G)[None, :]
        statistic_IG = STATISTICS + place_I[:, None] * 2 * M + g[None, :]
        # Written by other multiprocessors a moment ago: past the first-level cache.
        part_IGE = tl.load(
            PARTIAL + (place_I[:, None] * M + g[None, :])[:, :, None] * E + e[None, None, :],
            mask=held_IG[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        largest_IG = tl.load(statistic_IG, mask=held_IG, other=-1e30, cache_modifier=".cg")
        weight_IG = tl.load(statistic_IG + M, mask=held_IG, other=0.0, cache_modifier=".cg")
        larger_G = tl.maximum(largest_G, tl.max(largest_IG, 0))
        shrink_G = tl.exp2(largest_G - larger_G)
        shrink_IG = tl.exp2(largest_IG - larger_G[None, :])
        weight_G = weight_G * shrink_G + tl.sum(weight_IG * shrink_IG, 0)
        sum_GE = sum_GE * shrink_G[:, None] + tl.sum(part_IGE * shrink_IG[:, :, None], 0)
        largest_G = larger_G
    tl.store(
        OUT + g[:, None] * E + e[None, :],
        (sum_GE / weight_G[:, None]).to(OUT.dtype.element_ty),
        mask=(g < G)[:, None],
    )
