"""A worker's side of the index in Redis, as design 5.4 says it, for tests of those who follow it."""

from collections.abc import Iterable
from typing import Any

from headrace.blocks import BlockId
from headrace.keys import (
    SNAPSHOT_META_FIELD,
    Digest,
    Event,
    EventBatch,
    EventKind,
    Keys,
    Tier,
    encode_batch,
    encode_meta,
    low_halves,
    snapshot_fields,
)


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "big"))


class Publisher:
    """Owns the truth of one worker: its set, its sequence number, its digest."""

    def __init__(self, redis: Any, keys: Keys, worker: str, generation: int = 1, address: str = "127.0.0.1:1") -> None:
        self._redis = redis
        self._keys = keys
        self.worker = worker
        self.generation = generation
        self.address = address
        self.held: set[BlockId] = set()
        self.sequence = 0
        self.entry_id = "*"

    async def lease(self) -> None:
        fields = {"address": self.address, "generation": str(self.generation), "worker_id": self.worker}
        await self._redis.hset(self._keys.lease(self.worker), mapping=fields)

    async def end_lease(self) -> None:
        await self._redis.delete(self._keys.lease(self.worker))

    async def store(self, numbers: Iterable[int]) -> EventBatch:
        return await self.store_blocks(map(block, numbers))

    async def store_blocks(self, blocks: Iterable[BlockId]) -> EventBatch:
        added = tuple(blocks)
        self.held |= set(added)
        return await self._publish(Event.of(EventKind.STORED, added))

    async def remove(self, numbers: Iterable[int]) -> EventBatch:
        removed = tuple(block(number) for number in numbers)
        self.held -= set(removed)
        return await self._publish(Event.of(EventKind.REMOVED, removed))

    async def clear(self) -> EventBatch:
        self.held.clear()
        return await self._publish(Event(EventKind.CLEARED))

    async def rewrite(self) -> None:
        """After a flush: the set as it stands, from the ledger."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._keys.blocks(self.worker))
            pairs = ((held, Tier.DEVICE) for held in self.held)
            fields = snapshot_fields(self.generation, self.sequence, pairs)
            pipe.hset(self._keys.blocks(self.worker), mapping=fields)
            await pipe.execute()

    async def trim(self) -> None:
        await self._redis.xtrim(self._keys.events(self.worker), maxlen=0)

    async def _publish(self, event: Event) -> EventBatch:
        self.sequence += 1
        digest = Digest()
        digest.add(low_halves(b"".join(self.held)), Tier.DEVICE)
        batch = EventBatch(self.generation, self.sequence, digest.count, digest.xor, (event,))
        blocks: Any = self._keys.blocks(self.worker)
        async with self._redis.pipeline(transaction=True) as pipe:
            if event.kind is EventKind.STORED:
                pipe.hset(blocks, mapping={bytes(b): bytes((event.tier,)) for b in event.blocks})
            elif event.kind is EventKind.REMOVED:
                pipe.hdel(blocks, *map(bytes, event.blocks))
            else:
                pipe.delete(blocks)
            meta = encode_meta(self.generation, self.sequence)
            pipe.hset(blocks, SNAPSHOT_META_FIELD, meta)
            pipe.xadd(self._keys.events(self.worker), {b"batch": encode_batch(batch)}, id=self.entry_id)
            await pipe.execute()
        return batch
