"""Random paged batches for tests: rows scattered over a poisoned pool, so that whatever should not be read shows."""

from collections.abc import Sequence

import torch

from kernels.ops import AttentionBatch


def paged_batch(
    rows: Sequence[tuple[int, int]],
    block_size: int,
    num_blocks: int,
    generator: torch.Generator,
    spare_columns: int = 2,
) -> AttentionBatch:
    """`rows` are (tokens of this step, context after it); context 0 is a padding row: slots −1, stale table.

    One-token rows at the front count as decodes. Table columns beyond a row's context hold absurd numbers.
    """
    needed = [-(-context // block_size) for _, context in rows]
    if sum(needed) > num_blocks:
        raise ValueError(f"num_blocks must be at least {sum(needed)}, got {num_blocks}")
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.full((len(rows), max(needed) + spare_columns), 2**30, dtype=torch.int32)
    slots: list[int] = []
    positions: list[int] = []
    taken = 0
    for row, (tokens, context) in enumerate(rows):
        tables[row, : needed[row]] = order[taken : taken + needed[row]]
        taken += needed[row]
        for position in range(context - tokens, context) if context else range(tokens):
            positions.append(position)
            block = int(tables[row, position // block_size]) if context else 0
            slots.append(block * block_size + position % block_size if context else -1)
    lengths = [tokens for tokens, _ in rows]
    decodes = next((i for i, tokens in enumerate(lengths) if tokens != 1), len(rows))
    return AttentionBatch(
        starts_R1=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        contexts_R=torch.tensor([context for _, context in rows], dtype=torch.int32),
        block_tables_RB=tables,
        slots_T=torch.tensor(slots, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        num_decodes=decodes,
        max_query=max(lengths),
        max_context=max(context for _, context in rows),
    )


def filled_pool(
    shape: tuple[int, int, int, int, int, int], layer: int, batch: AttentionBatch, generator: torch.Generator
) -> torch.Tensor:
    """NaN everywhere but at the positions of `layer` that the batch's rows hold."""
    pool = torch.full(shape, torch.nan)
    size = shape[4]
    for row, context in enumerate(batch.contexts_R.tolist()):
        for position in range(context):
            block = int(batch.block_tables_RB[row, position // size])
            pool[block, :, layer, :, position % size] = torch.randn(shape[1], 2, shape[5], generator=generator)
    return pool
