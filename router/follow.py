"""From Redis to the index and the sessions: finds workers by their leases, follows their events (design 5.4).

One loop: leases every second, and between them one blocking read of all workers' event streams. While Redis is slow,
frozen, flushed or away, the mirror stays as it is and serving goes on from it; what was missed meanwhile shows as a gap
or as a snapshot that is ahead, and that worker alone is read again.

A set is read in slices, so that neither Redis nor this loop is held up by a large one, while the worker changes it: what
a slice missed or found too early is put right by the events that came since the first.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError, ResponseError

from headrace import metrics
from headrace.clock import Clock
from headrace.errors import ConfigError, Unavailable
from headrace.keys import SNAPSHOT_META_FIELD, EventBatch, Keys, decode_batch, decode_meta, parse_stored
from router.decisions.index import Followed, Index, Loading, Outdated, Overfull, Resync
from router.sessions import Sessions

log = logging.getLogger(__name__)
T = TypeVar("T")

SCAN_SECONDS = 1.0
READ_COUNT = 256
SLICE_BLOCKS = 4096
READINGS_AT_ONCE = 8
BATCHES_AT_ONCE = 16  # then the streams have their turn: after a pause of Redis there are many
TIER_ROOM = 16  # how many times the device's blocks a worker may hold, over all tiers
FROM_THE_START = b"0-0"

_RESYNCS = Counter(metrics.INDEX_RESYNCS, "Times a worker's part of the index was read again.", ["reason"])
_IGNORED = Counter(metrics.INDEX_IGNORED, "Event batches that were read and not mirrored.", ["reason"])
_AWAY = Gauge(metrics.REDIS_BREAKER, "1 while Redis is not waited for.")
_BLOCKS = Gauge(metrics.INDEX_BLOCKS, "Blocks in the mirror of the index.", ["worker"])


class Store(Protocol):
    """The budgeted way to Redis: raises Unavailable when it does not answer in time."""

    async def call(self, operation: Callable[[Any], Awaitable[T]], *, wait_seconds: float = 0.0) -> T: ...


class Follow:
    """Owns the reading positions; alone feeds the index, and tells the sessions which addresses to seek.

    `fixed`: addresses of workers that are sought whether or not they hold a lease. `gone` hears of workers that have
    neither lease nor session any more. `num_scans` counts those that were done to their end.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        index: Index,
        sessions: Sessions,
        clock: Clock,
        *,
        fixed: Iterable[str] = (),
        gone: Callable[[str], object] = lambda worker_id: None,
        scan_seconds: float = SCAN_SECONDS,
    ) -> None:
        self._store = store
        self._keys = keys
        self._index = index
        self._sessions = sessions
        self._clock = clock
        self._fixed = frozenset(fixed)
        self._gone = gone
        self._scan_seconds = scan_seconds
        self.num_scans = 0
        self._listeners: list[Callable[[], None]] = []
        self._leased: dict[str, tuple[str, int]] = {}
        self._met: dict[str, int] = {}  # generations, as their sessions said
        self._positions: dict[str, bytes] = {}
        self._behind: dict[str, tuple[int, int]] = {}
        self._read_again: set[str] = set()  # since the last scan
        self._found = False
        self._failing = False
        sessions.seek(self._fixed)
        sessions.listen(self._heard_of)

    def listen(self, listener: Callable[[], None]) -> None:
        """Called after each scan, and when events were followed."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    async def run(self) -> None:
        """Until cancelled. ConfigError when Redis is not what it must be, from the start; all else is waited out."""
        while True:
            scanned_at = self._clock.now()
            try:
                await self.scan()
                _AWAY.set(0)
                if self._failing:
                    log.warning("the index is followed again")
                    self._failing = False
                await self._sweep()
                while (left := scanned_at + self._scan_seconds - self._clock.now()) > 0:
                    await self.read(left)
            except (Unavailable, RedisError, ConfigError) as error:
                if isinstance(error, ConfigError) and not self._found:
                    raise  # from the start it is not what it must be
                _AWAY.set(1)
                if not self._failing:  # the first of a row
                    log.warning("the index is not followed just now: %s", error)
                self._failing = True
                await self._sweep()  # what was read in vain
                await asyncio.sleep(self._scan_seconds / 2)

    async def _sweep(self) -> None:
        for _ in self._index.sweep():
            await asyncio.sleep(0)

    async def scan(self) -> None:
        """Who holds a lease, and how far each snapshot is; reads again whoever the mirror is behind of."""
        self._read_again.clear()
        names = await self._store.call(self._lease_names)
        self._found = True
        workers = {self._keys.worker_of_lease(name): name for name in names}
        replies = await self._store.call(lambda redis: self._ask_all(redis, workers))
        leased = {worker: _lease(worker, fields) for worker, (fields, _) in replies.items()}
        self._leased = {worker: lease for worker, lease in leased.items() if lease is not None}
        self._sessions.seek({*(address for address, _ in self._leased.values()), *self._fixed})
        self._forget_the_gone()
        for worker, (_, generation) in self._leased.items():
            self._index.expect(worker, generation)
        await self._resync_all(
            [worker for worker in self._leased if self._is_behind(worker, _position(worker, replies[worker][1]))]
        )
        for worker in self._index.workers:
            _BLOCKS.labels(worker).set(self._index.num_blocks(worker))
        self.num_scans += 1
        self._tell()

    async def read(self, seconds: float) -> None:
        """Waits up to `seconds` for events of any followed worker, and follows those that came."""
        if not self._positions:
            await asyncio.sleep(seconds)
            return
        streams = {self._keys.events(worker): position for worker, position in self._positions.items()}
        block = max(int(seconds * 1000), 1)
        try:
            entries = await self._store.call(
                lambda redis: redis.xread(streams, count=READ_COUNT, block=block), wait_seconds=seconds
            )
        except ResponseError:
            if not await self._leave_foreign():
                raise
            return
        workers = {self._keys.events(worker).encode(): worker for worker in self._positions}
        for stream, batches in entries or ():
            await self._follow(workers[stream], batches)
            self._tell()
            await asyncio.sleep(0)

    async def _leave_foreign(self) -> bool:
        """No more follows workers whose events are of another type, which hides those of all the others; whether there was
        one. What the mirror has of it stays until its stream is one again."""
        workers = tuple(self._positions)
        types = await self._store.call(lambda redis: self._event_types(redis, workers))
        foreign = [worker for worker, kind in zip(workers, types, strict=True) if kind not in (b"stream", b"none")]
        for worker in foreign:
            log.error("the events of %s are no stream: it is not followed", worker)
            del self._positions[worker]
        return bool(foreign)

    async def _follow(self, worker: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        for number, (position, fields) in enumerate(entries, 1):
            if not number % BATCHES_AT_ONCE:
                await asyncio.sleep(0)
            self._positions[worker] = position
            try:
                (raw,) = fields.values()
                outcome = self._index.apply(worker, decode_batch(raw))
            except ValueError as error:
                log.error("events of %s cannot be read: %s", worker, error)
                outcome = Resync(worker, "unknown")
            match outcome:
                case Followed() | Outdated():
                    pass
                case Overfull():
                    _IGNORED.labels("overfull").inc()
                case Resync(reason=reason) if worker not in self._read_again:
                    self._read_again.add(worker)
                    await self._resync(worker, reason)
                    return
                case Resync():
                    pass  # one whose events never agree with its set is read once a scan, not once a batch

    async def _resync_all(self, workers: list[str]) -> None:
        """Several at once: of a Redis that is slow, most of the time goes by in waiting."""
        turns = asyncio.Semaphore(READINGS_AT_ONCE)

        async def resync(worker: str) -> None:
            async with turns:
                await self._resync(worker, "behind")

        done = await asyncio.gather(*map(resync, workers), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def _resync(self, worker: str, reason: str) -> None:
        """Reads the worker's set, and where its stream stood when that began; follows from there. Keys of another type are
        tried again at the next scan."""
        _RESYNCS.labels(reason).inc()
        self._positions.pop(worker, None)
        try:
            await self._read_anew(worker, reason)
        except ResponseError as error:
            log.error("the keys of %s are not what a worker writes: %s", worker, error)

    async def _read_anew(self, worker: str, reason: str) -> None:
        meta, num_fields, since = await self._store.call(lambda redis: self._begin(redis, worker))
        there = _position(worker, meta)
        if there is None:
            return
        try:
            with self._index.loading(worker, *there, num_blocks=num_fields - 1) as loading:
                await self._read_slices(worker, loading)
                batches, since, meta = await self._store.call(lambda redis: self._end(redis, worker, since))
                settled = loading.settle(batches, _position(worker, meta))
        except ValueError as error:
            log.error("the set of %s cannot be read: %s", worker, error)
            return
        if settled:
            self._positions[worker] = since
            self._behind.pop(worker, None)
        num_blocks = self._index.num_blocks(worker)
        log.info("index of %s read again (%s)%s: %d blocks", worker, reason, "" if settled else ", in vain", num_blocks)

    async def _read_slices(self, worker: str, loading: Loading) -> None:
        key, cursor, at_end = self._keys.blocks(worker), 0, False
        while loading.wanted and not at_end:
            cursor, fields = await self._store.call(partial(_scan_blocks, key=key, cursor=cursor))
            for found in parse_stored(fields):
                loading.add(found)
            at_end = not cursor

    def _is_behind(self, worker: str, there: tuple[int, int] | None) -> bool:
        """Whether the mirror missed something for good: events in flight are given a scan's time to arrive."""
        if there is None or there[0] != self._index.generation(worker):
            return False  # what another generation left is no part of this one's cache
        here = self._index.position(worker)
        if here is None or worker not in self._positions:
            return True
        if here >= there:
            self._behind.pop(worker, None)
            return False
        since = self._behind.get(worker)
        if since is None:
            self._behind[worker] = there
            return False
        return here < since

    def _forget_the_gone(self) -> None:
        """A worker without a lease and without a session is gone; with either of them it is not."""
        live = {session.info.worker_id for session in self._sessions.live()}
        for worker in self._index.workers:
            if worker not in live and worker not in self._leased:
                self._index.drop(worker)
                self._positions.pop(worker, None)
                self._behind.pop(worker, None)
                self._met.pop(worker, None)
                _BLOCKS.remove(worker)
                self._gone(worker)

    def _heard_of(self, worker_id: str) -> None:
        """The session knows a new generation before Redis does."""
        session = self._sessions.find(worker_id)
        if session is not None and self._met.get(worker_id) != session.info.generation:
            self._met[worker_id] = session.info.generation
            self._index.meet(worker_id, session.info.generation, TIER_ROOM * session.info.capacity.num_blocks)

    async def _lease_names(self, redis: Any) -> list[str]:
        return [name.decode() async for name in redis.scan_iter(match=self._keys.lease_pattern, count=1000)]

    async def _ask_all(self, redis: Any, workers: dict[str, str]) -> dict[str, tuple[Any, bytes | None]]:
        """Lease and snapshot position of every worker, in one round trip. What Redis refuses of one worker's keys (they
        are of another type, say) counts as absent, and costs the others nothing."""
        if not workers:
            return {}
        async with redis.pipeline(transaction=False) as pipe:
            for worker, lease in workers.items():
                pipe.hgetall(lease)
                pipe.hget(self._keys.blocks(worker), SNAPSHOT_META_FIELD)
            answers = await pipe.execute(raise_on_error=False)
        replies = [None if isinstance(answer, ResponseError) else answer for answer in answers]
        return dict(zip(workers, zip(replies[::2], replies[1::2], strict=True), strict=True))

    async def _begin(self, redis: Any, worker: str) -> tuple[bytes | None, int, bytes]:
        """Where the worker's set stands and how large it is, and its stream's position then."""
        async with redis.pipeline(transaction=True) as pipe:
            pipe.hget(self._keys.blocks(worker), SNAPSHOT_META_FIELD)
            pipe.hlen(self._keys.blocks(worker))
            pipe.xrevrange(self._keys.events(worker), count=1)
            meta, num_fields, last = await pipe.execute()
        return meta, num_fields, last[0][0] if last else FROM_THE_START

    async def _end(self, redis: Any, worker: str, since: bytes) -> tuple[list[EventBatch], bytes, bytes | None]:
        """The batches after that position, the last one's position, and where the set stands with them."""
        async with redis.pipeline(transaction=True) as pipe:
            pipe.xrange(self._keys.events(worker), min=b"(" + since)
            pipe.hget(self._keys.blocks(worker), SNAPSHOT_META_FIELD)
            entries, meta = await pipe.execute()
        batches = [decode_batch(raw) for _, fields in entries for raw in fields.values()]
        return batches, entries[-1][0] if entries else since, meta

    async def _event_types(self, redis: Any, workers: Iterable[str]) -> list[bytes]:
        async with redis.pipeline(transaction=False) as pipe:
            for worker in workers:
                pipe.type(self._keys.events(worker))
            types: list[bytes] = await pipe.execute()
        return types


async def _scan_blocks(redis: Any, *, key: str, cursor: int) -> tuple[int, dict[bytes, bytes]]:
    cursor, fields = await redis.hscan(key, cursor, count=SLICE_BLOCKS)
    return cursor, fields


def _lease(worker: str, fields: dict[bytes, bytes] | None) -> tuple[str, int] | None:
    """(address, generation): all of a lease that a router needs; the rest it hears from the session's hello."""
    if not fields:
        return None
    try:
        return fields[b"address"].decode(), int(fields[b"generation"])
    except (KeyError, ValueError) as error:
        log.error("the lease of %s cannot be read: %r", worker, error)
        return None


def _position(worker: str, meta: bytes | None) -> tuple[int, int] | None:
    """(generation, sequence) of the worker's snapshot, if there is one."""
    try:
        return decode_meta(meta) if meta is not None else None
    except ValueError as error:
        log.error("the snapshot of %s cannot be read: %s", worker, error)
        return None
