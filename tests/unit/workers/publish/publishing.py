"""A publisher of a real ledger, and what of it stands in Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from headrace.blocks import BlockHasher, BlockId
from headrace.keys import Digest, Keys, Tier, decode_batch, low_halves, parse_snapshot
from headrace.store import Store
from headrace.values import Capacity, Compatibility, ParallelLayout, Role, WorkerInfo
from workers.publish import Publisher
from workers.scheduling.blocks import BlockLedger

BLOCKS = list(BlockHasher(revision="r", kv_format="f", block_size=1).chain(range(64)))
INFO = WorkerInfo(
    "w0",
    3,
    Role.PREFILL,
    "127.0.0.1:9",
    Compatibility("m", "r", "t", "c", "float32", "float32"),
    ParallelLayout(),
    Capacity(64, 64, 8, 128, 16, 100),
    "m",
)
KEYS = Keys("test-publish")


def digest_of(blocks: list[BlockId]) -> Digest:
    digest = Digest()
    digest.add(low_halves(b"".join(blocks)), Tier.DEVICE)
    return digest


class Ledger:
    """A real ledger of one-token blocks, filled through its own calls."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.ledger = BlockLedger(num_blocks, 1)
        self._number = 0

    def cache(self, *blocks: BlockId) -> None:
        holding = self.ledger.open("test")
        self.ledger.allocate(holding, len(blocks))
        for index, block in enumerate(blocks):
            self.ledger.publish(holding, index, block)
        self.ledger.close(holding)

    @property
    def held(self) -> set[BlockId]:
        return set(self.ledger.snapshot())


def a_publisher(store: Store, ledger: Ledger, info: WorkerInfo = INFO, lease_seconds: float = 5.0) -> Publisher:
    return Publisher(store, KEYS.cluster, lambda: info, ledger.ledger, lease_seconds=lease_seconds)


async def in_redis(redis: Any) -> tuple[set[BlockId], int, int]:
    """(blocks, generation, sequence) of the snapshot."""
    snapshot = parse_snapshot(await redis.hgetall(KEYS.blocks("w0")))
    assert snapshot is not None
    return {block for event in snapshot.stored for block in event.blocks}, snapshot.generation, snapshot.sequence


async def batches(redis: Any) -> list[Any]:
    return [decode_batch(fields[b"batch"]) for _, fields in await redis.xrange(KEYS.events("w0"))]


@asynccontextmanager
async def running(publisher: Publisher) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def becomes(redis: Any, blocks: set[BlockId]) -> None:
    """Waits for the events until the set in Redis is this one."""
    position: Any = "0"
    async with asyncio.timeout(20):
        while True:
            snapshot = parse_snapshot(await redis.hgetall(KEYS.blocks("w0")))
            if snapshot is not None and {block for event in snapshot.stored for block in event.blocks} == blocks:
                return
            for _, entries in await redis.xread({KEYS.events("w0"): position}, block=200) or ():
                position = entries[-1][0]
