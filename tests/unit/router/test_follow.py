"""The mirror against a real Valkey: bootstrap, follow, and each way of falling out of step and back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from headrace import store as stores
from router import follow
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.following import KEYS, scene
from tests.unit.router.publisher import Publisher, block
from tests.unit.router.stage import stage

pytestmark = pytest.mark.redis
T = TypeVar("T")


async def test_a_late_router_begins_with_the_snapshot_and_follows_from_there(redis_url: str) -> None:
    async with scene(redis_url) as on:
        worker = on.publisher("a")
        await worker.lease()
        await worker.store(range(5))
        await worker.remove([4])
        await on.follow.scan()
        assert on.held("a") == {0, 1, 2, 3}
        await worker.store([7, 8])
        await on.follow.read(1)
        assert on.held("a") == {0, 1, 2, 3, 7, 8}
        assert on.index.position("a") == (1, 3)


@pytest.mark.parametrize("key", [KEYS.lease, KEYS.blocks])
async def test_keys_of_one_worker_that_are_of_another_type_hide_no_other(
    redis_url: str, key: Callable[[str], str]
) -> None:
    async with scene(redis_url) as on:
        worker, other = on.publisher("a"), on.publisher("b")
        for one in (worker, other):
            await one.lease()
            await one.store(range(3))
        await on.redis.delete(key("a"))
        await on.redis.set(key("a"), "what is this")
        await on.follow.scan()
        assert on.held("b") == {0, 1, 2}


async def test_events_of_another_type_hide_no_other_workers(redis_url: str) -> None:
    """All streams are read in one command, which one key of another type makes fail."""
    async with scene(redis_url) as on:
        worker, other = on.publisher("a"), on.publisher("b")
        for one in (worker, other):
            await one.lease()
            await one.store(range(3))
        await on.follow.scan()
        await on.redis.delete(KEYS.events("a"))
        await on.redis.set(KEYS.events("a"), "what is this")
        await other.store([7])
        for _ in range(2):
            await on.follow.read(0.1)
        assert on.held("b") == {0, 1, 2, 7}
        await other.store([8])
        await on.follow.scan()
        await on.follow.read(0.1)
        assert on.held("b") == {0, 1, 2, 7, 8}
        assert on.held("a") == {0, 1, 2}
        await on.redis.delete(KEYS.events("a"))
        await worker.store([11])
        await on.follow.scan()
        assert on.held("a") == {0, 1, 2, 11}


async def test_case_30_a_cleared_cache_leaves_the_index(redis_url: str) -> None:
    async with scene(redis_url) as on:
        worker = await on.followed(num_blocks=5)
        await worker.clear()
        await on.follow.read(1)
        assert on.held("a") == set()
        await worker.store([1])
        await on.follow.read(1)
        assert on.held("a") == {1}


async def test_a_trimmed_stream_reads_that_worker_alone_again(redis_url: str) -> None:
    async with scene(redis_url) as on:
        worker, other = on.publisher("a"), on.publisher("b")
        for one in (worker, other):
            await one.lease()
            await one.store(range(3))
        await on.follow.scan()
        await worker.store([10])
        await worker.trim()
        await worker.store([11])
        await other.store([12])
        await on.follow.read(1)
        assert on.held("a") == {0, 1, 2, 10, 11}
        assert on.held("b") == {0, 1, 2, 12}
        await worker.store([13])
        await on.follow.read(1)
        assert on.held("a") == {0, 1, 2, 10, 11, 13}


async def test_events_that_were_trimmed_without_a_successor_are_found_by_the_snapshot_that_is_ahead(
    redis_url: str,
) -> None:
    async with scene(redis_url) as on:
        worker = await on.followed()
        await worker.store([10])
        await worker.trim()
        await on.follow.scan()
        assert on.held("a") == {0, 1, 2}  # it may yet arrive
        await on.follow.scan()
        assert on.held("a") == {0, 1, 2, 10}


async def test_a_flush_is_survived_and_the_rewritten_index_is_taken_up(redis_url: str) -> None:
    async with scene(redis_url) as on:
        worker = await on.followed()
        await on.redis.flushall()
        await worker.store([5])  # the worker has not noticed yet
        await on.follow.read(1)
        assert on.held("a") == {0, 1, 2, 5}
        await on.redis.flushall()
        worker.held.add(block(6))
        worker.sequence += 1
        await worker.lease()
        await worker.rewrite()
        await on.follow.scan()
        await on.follow.scan()
        assert on.held("a") == {0, 1, 2, 5, 6}
        await worker.store([7])
        await on.follow.read(1)
        assert on.held("a") == {0, 1, 2, 5, 6, 7}


async def test_a_new_generation_replaces_the_old_ones_blocks(redis_url: str) -> None:
    async with scene(redis_url) as on:
        old = on.publisher("a")
        await old.lease()
        await old.store(range(3))
        await on.follow.scan()
        new = on.publisher("a", generation=2)
        await new.lease()
        await new.rewrite()
        await new.store([9])
        await on.follow.read(1)
        assert on.held("a") == {9}
        assert on.index.position("a") == (2, 1)


async def test_a_worker_without_lease_and_session_is_forgotten(redis_url: str) -> None:
    async with scene(redis_url) as on:
        worker = await on.followed()
        await on.follow.read(0.01)
        assert on.gone == []
        await worker.end_lease()
        await on.follow.scan()
        assert on.index.workers == ()
        assert on.gone == ["a"]


async def test_a_worker_whose_session_answers_is_alive_whatever_redis_says(redis_url: str) -> None:
    async with (
        NullWorker(worker_info("a")) as null,
        stage(null) as router,
        scene(redis_url, router.sessions) as on,
    ):
        worker = Publisher(on.redis, KEYS, "a", address=null.address)
        await worker.lease()
        await worker.store(range(3))
        await on.follow.scan()
        await worker.end_lease()
        await on.follow.scan()
        assert on.held("a") == {0, 1, 2}
        assert router.sessions.find("a") is not None


async def test_a_lease_brings_a_session_and_its_end_is_not_the_sessions(redis_url: str) -> None:
    async with (
        NullWorker(worker_info("a")) as null,
        stage() as router,
        scene(redis_url, router.sessions) as on,
    ):
        worker = Publisher(on.redis, KEYS, "a", address=null.address)
        await worker.lease()
        await on.follow.scan()
        await router.until_live(null)
        await worker.end_lease()
        await on.follow.scan()
        assert router.sessions.find("a") is not None


class Interrupted:
    """A store whose callers are interrupted: before the `at`th slice of a set is read, `meanwhile` happens."""

    def __init__(self, store: stores.Store, at: int, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._at = at
        self._meanwhile = meanwhile
        self.num_slices = 0

    async def call(self, operation: Callable[[Any], Awaitable[T]], *, wait_seconds: float = 0.0) -> T:
        if getattr(operation, "func", None) is follow._scan_blocks:
            self.num_slices += 1
            if self.num_slices == self._at:
                await self._meanwhile()
        return await self._store.call(operation, wait_seconds=wait_seconds)


@pytest.mark.parametrize("meanwhile", ["it changes", "it is cleared", "it is written anew", "its events are trimmed"])
async def test_a_large_set_is_read_in_slices_while_it_changes(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    async with scene(redis_url, budget_seconds=20.0) as on:
        worker = on.publisher("a")
        await worker.lease()
        await worker.store(range(20_000))

        async def change() -> None:
            match meanwhile:
                case "it changes":
                    await worker.remove(range(0, 20_000, 2))
                    await worker.store(range(30_000, 31_000))
                case "it is cleared":
                    await worker.clear()
                    await worker.store([1])
                case "it is written anew":
                    await on.redis.delete(KEYS.events("a"))
                    worker.held = {block(1), block(2)}
                    worker.sequence += 1
                    await worker.rewrite()
                    await worker.store([3])
                case "its events are trimmed":
                    await worker.store([20_001])
                    await worker.trim()
                    await worker.store([20_002])

        interrupted = Interrupted(on.follow._store, 3, change)
        monkeypatch.setattr(on.follow, "_store", interrupted)
        await on.follow.scan()
        assert interrupted.num_slices >= 3
        await on.follow.scan()
        assert on.index.position("a") == (1, worker.sequence)
        assert on.index.num_blocks("a") == len(worker.held)
        assert on.held("a", 40) == {n for n in range(40) if block(n) in worker.held}
        await worker.store([7])
        await on.follow.read(1)
        assert on.held("a", 40) == {n for n in range(40) if block(n) in worker.held}


async def test_many_events_at_once_leave_the_streams_their_turn(redis_url: str) -> None:
    async with scene(redis_url, budget_seconds=20.0) as on:
        worker = on.publisher("a")
        await worker.lease()
        await worker.store([0])
        await on.follow.scan()
        for number in range(1, 200):
            await worker.store([number])
        turns = 0
        on.index.applied.clear()

        async def others() -> None:
            nonlocal turns
            await on.index.applied.wait()
            while True:
                turns += 1
                await asyncio.sleep(0)

        streams = asyncio.create_task(others())
        await on.follow.read(1)
        streams.cancel()
        assert on.index.num_blocks("a") == 200
        assert turns >= 10
