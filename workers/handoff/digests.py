"""Digests of blocks that are handed over, on both sides: to find faults of what moves them (handoff.digests)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from headrace.errors import TransferFailed
from headrace.values import Request
from workers.engine import Engine
from workers.scheduling.scheduler import ChunkDone


async def digested(engine: Engine, chunk: ChunkDone, request: Request) -> ChunkDone:
    """With a digest of each block, once the ranks have done what fills them."""
    if not chunk.blocks:
        return chunk
    blocks = [block for block, _ in chunk.blocks]
    return replace(chunk, digests=await _digests(engine, blocks, chunk.first_block, request))


async def check(
    engine: Engine, targets: Sequence[int], first_block: int, announced: Sequence[bytes], request: Request
) -> None:
    """TransferFailed, naming the block, where what was read into `targets` is not what was announced."""
    for number, (found, told) in enumerate(
        zip(await _digests(engine, targets, first_block, request), announced, strict=True), first_block
    ):
        if found != told:
            name = request.key.request_id
            raise TransferFailed(
                f"block {number} of {name} has digest {found.hex()} here, was announced with {told.hex()}", block=number
            )


async def _digests(engine: Engine, blocks: Sequence[int], first_block: int, request: Request) -> tuple[bytes, ...]:
    size, length = engine.scheduler.ledger.block_size, request.num_prompt_tokens
    filled = [min(size, length - number * size) for number in range(first_block, first_block + len(blocks))]
    asked = engine.executor.digests(list(zip(blocks, filled, strict=True)))
    return await asyncio.shield(asyncio.wrap_future(asked))
