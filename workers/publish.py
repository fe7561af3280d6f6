"""What a worker tells the cluster through Redis: its lease, and which blocks its cache holds (design 5.4).

    lease    a hash with a TTL on Redis' time, rewritten at a third of it
    events   a stream; every entry is one batch of changes, with a sequence number and the digest after it
    blocks   the set itself, with the sequence number at which it stands; changed in one transaction with `events`

Nothing here is on the path of a token: the ledger keeps the changes, bounded, until they are fetched. When the keys
are found gone or behind, the worker writes both anew from its ledger; a router that follows sees the gap in the
sequence and fetches the set.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from headrace.blocks import BlockId
from headrace.keys import (
    SNAPSHOT_META_FIELD,
    STREAM_MAX_ENTRIES,
    Digest,
    Event,
    EventBatch,
    EventKind,
    Keys,
    Tier,
    decode_meta,
    encode_batch,
    encode_meta,
    snapshot_fields,
)
from headrace.leases import lease_fields
from headrace.store import Store, StoreUnavailable
from headrace.values import WorkerInfo

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.02
BATCH_FIELD = b"batch"


class CachedSet(Protocol):
    """The ledger, as the publisher sees it."""

    def drain_events(self) -> list[Event]: ...

    def snapshot(self) -> tuple[BlockId, ...]: ...


class Log:
    """The worker's side of the index: numbers the batches and keeps the digest. Pure; owned by one Publisher.

    `sequence` and `digest` are those of the last batch made.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.sequence = 0
        self.digest = Digest()

    def batch(self, events: Sequence[Event]) -> EventBatch:
        """The next batch: these changes, in order."""
        for event in events:
            match event.kind:
                case EventKind.STORED:
                    for block in event.blocks:
                        self.digest.add(block, event.tier)
                case EventKind.REMOVED:
                    for block in event.blocks:
                        self.digest.remove(block, event.tier)
                case EventKind.CLEARED:
                    self.digest = Digest()
        return self._next(tuple(events))

    def restart(self, blocks: Iterable[BlockId]) -> EventBatch:
        """The set is written anew: an empty batch, one number further than would follow, so that followers notice."""
        self.digest = Digest()
        for block in blocks:
            self.digest.add(block, Tier.DEVICE)
        self.sequence += 1
        return self._next(())

    def _next(self, events: tuple[Event, ...]) -> EventBatch:
        self.sequence += 1
        return EventBatch(self.generation, self.sequence, self.digest.count, self.digest.xor, events)


class Publisher:
    """Owns the worker's three keys. `info` is asked anew at every renewal."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        info: Callable[[], WorkerInfo],
        cached: CachedSet,
        *,
        lease_seconds: float,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._keys = Keys(cluster)
        self._info = info
        self._cached = cached
        self._lease_seconds = lease_seconds
        self._draining = draining
        self._worker = info().worker_id
        self._log = Log(info().generation)
        self._dirty = asyncio.Event()
        self._renew_now = asyncio.Event()
        self._writing = asyncio.Lock()
        self._stale = True

    def changed(self) -> None:
        """The ledger may hold new changes."""
        self._dirty.set()

    def renew_soon(self) -> None:
        """The lease says something that is no longer so."""
        self._renew_now.set()

    async def run(self) -> None:
        """Until cancelled. ConfigError when Redis is not what it must be; Redis away is waited out."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_lease())
            tasks.create_task(self._keep_index())

    async def withdraw(self) -> None:
        """The worker ends in order: its keys go before their time."""
        worker, keys = self._worker, self._keys
        try:
            await self._store.call(
                lambda redis: redis.delete(keys.lease(worker), keys.events(worker), keys.blocks(worker))
            )
        except StoreUnavailable as error:
            log.warning("the lease of %s is left to expire: %s", worker, error)

    async def _keep_lease(self) -> None:
        while True:
            try:
                await self.renew()
            except StoreUnavailable as error:
                log.warning("lease of %s not renewed: %s", self._worker, error)
            try:
                async with asyncio.timeout(self._lease_seconds / 3):
                    await self._renew_now.wait()
            except TimeoutError:
                continue
            self._renew_now.clear()

    async def _keep_index(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self.flush()
            except StoreUnavailable as error:
                # What was drained may or may not have been written: the next renewal that succeeds asks for the whole set.
                log.warning("index of %s not written: %s", self._worker, error)
            # A burst of steps makes one batch.
            await asyncio.sleep(BATCH_SECONDS)

    async def renew(self) -> None:
        """Writes the lease, and looks whether the index in Redis is the one this worker wrote last."""
        lease, blocks = self._keys.lease(self._worker), self._keys.blocks(self._worker)
        fields = lease_fields(self._info(), draining=self._draining())
        milliseconds = int(self._lease_seconds * 1000)

        async def write(redis: Any) -> Any:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.delete(lease)
                pipe.hset(lease, mapping=fields)
                pipe.pexpire(lease, milliseconds)
                pipe.hget(blocks, SNAPSHOT_META_FIELD)
                return await pipe.execute()

        async with self._writing:
            meta = (await self._store.call(write))[-1]
            if not self._stands_at(meta, self._log.sequence):
                self._stale = True
        if self._stale:
            self._dirty.set()

    async def flush(self) -> None:
        """Writes what changed; or, when Redis does not hold what this worker wrote last, the whole set."""
        async with self._writing:
            events = self._cached.drain_events()
            if not self._stale and events:
                before = self._log.sequence
                batch = self._log.batch(events)
                self._stale = True
                meta = await self._store.call(lambda redis: self._append(redis, batch))
                self._stale = not self._stands_at(meta, before)
            if self._stale:
                await self._rewrite()
                self._stale = False

    def _stands_at(self, meta: bytes | None, sequence: int) -> bool:
        return meta is not None and decode_meta(meta) == (self._log.generation, sequence)

    async def _append(self, redis: Any, batch: EventBatch) -> Any:
        """Returns the meta field as it was before: whether the batch fell on the set that it belongs to."""
        key = self._keys.blocks(self._worker)
        async with redis.pipeline(transaction=True) as pipe:
            pipe.hget(key, SNAPSHOT_META_FIELD)
            for event in batch.events:
                match event.kind:
                    case EventKind.STORED:
                        pipe.hset(key, mapping={bytes(block): bytes((event.tier,)) for block in event.blocks})
                    case EventKind.REMOVED:
                        pipe.hdel(key, *event.blocks)
                    case EventKind.CLEARED:
                        pipe.delete(key)
            pipe.hset(key, mapping={SNAPSHOT_META_FIELD: encode_meta(batch.generation, batch.sequence)})
            self._note(pipe, batch)
            return (await pipe.execute())[0]

    async def _rewrite(self) -> None:
        """The whole set, under a number that followers cannot take for the next one."""
        blocks = self._cached.snapshot()
        self._cached.drain_events()
        batch = self._log.restart(blocks)
        key = self._keys.blocks(self._worker)
        fields = snapshot_fields(batch.generation, batch.sequence, ((block, Tier.DEVICE) for block in blocks))

        async def write(redis: Any) -> None:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.delete(key)
                pipe.hset(key, mapping=fields)
                self._note(pipe, batch)
                await pipe.execute()

        await self._store.call(write)

    def _note(self, pipe: Any, batch: EventBatch) -> None:
        fields = {BATCH_FIELD: encode_batch(batch)}
        pipe.xadd(self._keys.events(self._worker), fields, maxlen=STREAM_MAX_ENTRIES, approximate=True)
