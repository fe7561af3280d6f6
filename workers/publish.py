"""What a worker tells the cluster through Redis: its lease, and which blocks its cache holds (design 5.4).

    lease    a hash with a TTL on Redis' time, rewritten at a third of it
    events   a stream; every entry is one batch of changes, with a sequence number and the digest after it
    blocks   the set itself, with the sequence number at which it stands; changed in one transaction with `events`

Nothing here is on the path of a token: the ledger keeps the changes, bounded, until they are fetched. When the keys
are found gone, behind or of another type, the worker writes them anew from its ledger; a router that follows sees the
gap in the sequence and fetches the set. Whatever Redis answers, the worker goes on and tries again.

Every write is a transaction that looks first whose the keys are: an older generation that still runs yields to the
newer one, and writes again only when that has held no lease for YIELD_RENEWALS renewals (a clock set back makes a restart
look older than what its predecessor left).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from redis.exceptions import RedisError, ResponseError

from headrace.blocks import BlockId
from headrace.errors import ConfigError
from headrace.keys import (
    SNAPSHOT_META_FIELD,
    STREAM_MAX_ENTRIES,
    STREAM_MIN_BLOCKS,
    Digest,
    Event,
    EventBatch,
    EventKind,
    Keys,
    Tier,
    decode_meta,
    encode_batch,
    encode_meta,
    low_halves,
    snapshot_fields,
)
from headrace.leases import lease_fields
from headrace.store import Store, StoreUnavailable
from headrace.values import WorkerInfo

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.02
REWRITE_BLOCKS = 4096  # one write holds up neither Redis nor this loop, and fits any budget
YIELD_RENEWALS = 6
BATCH_FIELD = b"batch"


class Superseded(Exception):
    """A newer generation of this worker holds the keys."""


class CachedSet(Protocol):
    """The ledger, as the publisher sees it."""

    def drain_events(self) -> list[Event]: ...

    def snapshot(self) -> tuple[BlockId, ...]: ...


class Log:
    """The worker's side of the index: numbers the batches and keeps the digest. Pure; owned by one Publisher.

    `sequence` and `digest` are those of the last batch made. `num_kept`: how many of the last batches the stream keeps.
    They hold a quarter of the set together at most, so that the stream's size follows the set's: who lags further reads
    the set.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.sequence = 0
        self.digest = Digest()
        self._kept: deque[int] = deque(maxlen=STREAM_MAX_ENTRIES)
        self._num_kept_blocks = 0

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def batch(self, events: Sequence[Event]) -> EventBatch:
        """The next batch: these changes, in order."""
        for event in events:
            match event.kind:
                case EventKind.STORED:
                    self.digest.add(low_halves(event.ids), event.tier)
                case EventKind.REMOVED:
                    self.digest.remove(low_halves(event.ids), event.tier)
                case EventKind.CLEARED:
                    self.digest = Digest()
        return self._next(tuple(events))

    def restart(self, blocks: Iterable[BlockId]) -> EventBatch:
        """The set is written anew: an empty batch, one number further than would follow, so that followers notice."""
        self.digest = Digest()
        self.digest.add(low_halves(b"".join(blocks)), Tier.DEVICE)
        self.sequence += 1
        return self._next(())

    def _next(self, events: tuple[Event, ...]) -> EventBatch:
        self.sequence += 1
        batch = EventBatch(self.generation, self.sequence, self.digest.count, self.digest.xor, events)
        self._keep(batch.num_blocks)
        return batch

    def _keep(self, num_blocks: int) -> None:
        if len(self._kept) == STREAM_MAX_ENTRIES:
            self._num_kept_blocks -= self._kept.popleft()
        self._kept.append(num_blocks)
        self._num_kept_blocks += num_blocks
        limit = max(STREAM_MIN_BLOCKS, self.digest.count // 4)
        while self._num_kept_blocks > limit and len(self._kept) > 1:
            self._num_kept_blocks -= self._kept.popleft()


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
        self._info = info
        self._cached = cached
        self._lease_seconds = lease_seconds
        self._draining = draining
        self._worker = info().worker_id
        keys = Keys(cluster)
        self._lease, self._blocks, self._events = (of(self._worker) for of in (keys.lease, keys.blocks, keys.events))
        self._unread = f"{self._blocks}:{info().generation}"
        self._log = Log(info().generation)
        self._dirty = asyncio.Event()
        self._renew_now = asyncio.Event()
        self._writing = asyncio.Lock()
        self._stale = True
        self._written = False
        self._troubles: set[str] = set()
        self._num_yielded = 0

    def changed(self) -> None:
        """The ledger may hold new changes."""
        self._dirty.set()

    def renew_soon(self) -> None:
        """The lease says something that is no longer so."""
        self._renew_now.set()

    async def run(self) -> None:
        """Until cancelled. ConfigError when Redis is not what it must be, from the start; all else is waited out."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_lease())
            tasks.create_task(self._keep_index())

    async def withdraw(self) -> None:
        """The worker ends in order: its keys go before their time."""
        try:
            await self._write(lambda pipe: pipe.delete(self._lease, self._events, self._blocks))
        except (StoreUnavailable, RedisError, ConfigError, Superseded) as error:
            log.warning("the lease of %s is left to expire: %s", self._worker, error)

    async def _keep_lease(self) -> None:
        while True:
            await self._tried("lease", self.renew)
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
            if await self._tried("index", self.flush):
                # A burst of steps makes one batch.
                await asyncio.sleep(BATCH_SECONDS)
            else:
                # What was drained may or may not have been written: the whole set is, next time, which the lease's next
                # renewal asks for.
                await asyncio.sleep(self._lease_seconds / 3)

    async def _tried(self, what: str, write: Callable[[], Awaitable[None]]) -> bool:
        """Whether it succeeded. Trouble is logged when it begins and when it ends, not at every try."""
        try:
            await write()
        except (StoreUnavailable, RedisError, Superseded) as error:
            self._note_trouble(what, error)
            return False
        except ConfigError as error:
            if not self._written:
                raise
            self._note_trouble(what, error)
            return False
        if what in self._troubles:
            self._troubles.discard(what)
            log.warning("%s of %s is written again", what, self._worker)
        return True

    def _note_trouble(self, what: str, error: Exception) -> None:
        if what not in self._troubles:
            self._troubles.add(what)
            log.warning("%s of %s not written: %s", what, self._worker, str(error) or type(error).__name__)

    async def renew(self) -> None:
        """Writes the lease, and looks whether the index in Redis is the one this worker wrote last."""
        fields = lease_fields(self._info(), draining=self._draining())

        def fill(pipe: Any) -> None:
            pipe.delete(self._lease)
            pipe.hset(self._lease, mapping=fields)
            pipe.pexpire(self._lease, int(self._lease_seconds * 1000))

        async with self._writing:
            try:
                position = await self._write(fill)
            except Superseded:
                self._num_yielded += 1
                raise
            self._written = True
            if position != self._position:
                self._stale = True
        if self._stale:
            self._dirty.set()

    async def flush(self) -> None:
        """Writes what changed; or, when Redis does not hold what this worker wrote last, the whole set."""
        async with self._writing:
            events = self._cached.drain_events()
            if not self._stale and events:
                before = self._position
                batch = self._log.batch(events)
                self._stale = True
                self._stale = await self._write(lambda pipe: self._append(pipe, batch)) != before
            if self._stale:
                await self._rewrite()
                self._stale = False
                self._num_yielded = 0

    @property
    def _position(self) -> tuple[int, int]:
        return self._log.generation, self._log.sequence

    async def _write(self, fill: Callable[[Any], None]) -> tuple[int, int] | None:
        """One transaction of what `fill` puts into it; returns where the set in Redis stood before. Superseded, and
        nothing is written, when the keys are a newer generation's."""

        async def write(redis: Any) -> tuple[int, int] | None:
            async with redis.pipeline(transaction=True) as pipe:
                await pipe.watch(self._lease, self._blocks)
                leased = _generation(await _field(pipe, self._lease, "generation"))
                position = _position(await _field(pipe, self._blocks, SNAPSHOT_META_FIELD))
                self._yield_to(leased, position)
                pipe.multi()
                fill(pipe)
                await pipe.execute()
                return position

        return await self._store.call(write)

    def _yield_to(self, leased: int | None, position: tuple[int, int] | None) -> None:
        ours = self._log.generation
        if leased is not None and leased > ours:
            self._num_yielded = 0
            raise Superseded(f"generation {leased} holds the lease, this is {ours}")
        if position is not None and position[0] > ours and self._num_yielded < YIELD_RENEWALS:
            raise Superseded(f"the index is that of generation {position[0]}, this is {ours}")

    def _append(self, pipe: Any, batch: EventBatch) -> None:
        for event in batch.events:
            match event.kind:
                case EventKind.STORED:
                    pipe.hset(self._blocks, mapping=dict.fromkeys(event.blocks, bytes((event.tier,))))
                case EventKind.REMOVED:
                    pipe.hdel(self._blocks, *event.blocks)
                case EventKind.CLEARED:
                    pipe.delete(self._blocks)
        pipe.hset(self._blocks, mapping={SNAPSHOT_META_FIELD: encode_meta(batch.generation, batch.sequence)})
        self._note(pipe, batch)

    async def _rewrite(self) -> None:
        """The whole set, under a number that followers cannot take for the next one; whatever the keys held is gone. A
        large one is put down in slices under a name that nobody reads, and takes its place at once."""
        blocks = self._cached.snapshot()
        self._cached.drain_events()
        batch = self._log.restart(blocks)
        slices = [blocks[first : first + REWRITE_BLOCKS] for first in range(0, len(blocks), REWRITE_BLOCKS)]
        for number, part in enumerate(slices[1:]):
            await self._store.call(partial(self._put_down, part, anew=not number))
        first = snapshot_fields(
            batch.generation, batch.sequence, ((block, Tier.DEVICE) for part in slices[:1] for block in part)
        )

        def fill(pipe: Any) -> None:
            pipe.delete(self._blocks, self._events)
            if slices[1:]:
                pipe.rename(self._unread, self._blocks)
                pipe.persist(self._blocks)
            pipe.hset(self._blocks, mapping=first)
            self._note(pipe, batch)

        await self._write(fill)

    async def _put_down(self, blocks: Sequence[BlockId], redis: Any, *, anew: bool) -> None:
        async with redis.pipeline(transaction=True) as pipe:
            if anew:
                pipe.delete(self._unread)
            pipe.hset(self._unread, mapping=dict.fromkeys(blocks, bytes((Tier.DEVICE,))))
            pipe.pexpire(self._unread, int(self._lease_seconds * 1000))
            await pipe.execute()

    def _note(self, pipe: Any, batch: EventBatch) -> None:
        pipe.xadd(self._events, {BATCH_FIELD: encode_batch(batch)}, maxlen=self._log.num_kept, approximate=True)


async def _field(redis: Any, key: str, field: str | bytes) -> bytes | None:
    """None too when the key is no hash: then it is nobody's, and will be written anew."""
    try:
        value: bytes | None = await redis.hget(key, field)
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        return None
    return value


def _generation(raw: bytes | None) -> int | None:
    return int(raw) if raw is not None and raw.isdigit() else None


def _position(meta: bytes | None) -> tuple[int, int] | None:
    """(generation, sequence); None when there is none, or it cannot be read."""
    try:
        return decode_meta(meta) if meta is not None else None
    except ValueError:
        return None
