"""Routers that tell each other what they place, over a real Valkey."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from headrace.keys import Keys
from headrace.store import Store
from router.decisions.told import Brought, Told
from router.placements import HEARD_AT_ONCE, MAX_KEYS, MAX_SECONDS, Placements

pytestmark = pytest.mark.redis
CLUSTERS = itertools.count()


@asynccontextmanager
async def routers(store: Store, keys: Keys) -> AsyncIterator[tuple[Placements, "asyncio.Queue[Told]", Placements]]:
    """One that tells, what the other hears of it, and that other."""
    heard: asyncio.Queue[Told] = asyncio.Queue()
    echo: list[Told] = []
    one = Placements(store, keys, "one", echo.append)
    other = Placements(store, keys, "other", heard.put_nowait)
    running = [asyncio.create_task(each.run()) for each in (one, other)]
    try:
        yield one, heard, other
        assert not [told for told in echo if told.worker_id != "of other"], "a router hears nothing of itself"
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def listening(store: Store, one: Placements, heard: "asyncio.Queue[Told]") -> None:
    """The other one has begun to read: what was told before it did is not for it."""
    async with asyncio.timeout(20):
        while heard.empty():
            one.tell(Told("r0", "begin", (0,), 1.0))
            await store.call(lambda redis: redis.ping())
    await store.call(lambda redis: redis.ping())
    one.tell(Told("r0", "end", (0,), 1.0))
    while (await asyncio.wait_for(heard.get(), 10)).worker_id != "end":
        pass


async def test_what_one_router_places_the_other_expects(store: Store) -> None:
    keys = Keys(f"placements-{next(CLUSTERS)}")
    async with routers(store, keys) as (one, heard, other):
        await listening(store, one, heard)
        one.tell(Told("r1", "p0", (1, 2**60 - 1), 2.5, Brought("d0", 8192, 4096, 2)))
        one.tell(Told("r2", "p1", (), 2.5))  # brings nothing new
        other.tell(Told("r3", "of other", (7,), 1.0))
        one.tell(Told("r5", "p2", (), 2.5, Brought("d0", 8192, 1, 1)))  # but load
        one.tell(Told("r4", "p1", tuple(range(2 * MAX_KEYS)), 1.0))
        first = await asyncio.wait_for(heard.get(), 10)
        assert (first.worker_id, first.keys, first.seconds) == ("p0", (1, 2**60 - 1), 2.5)
        assert first.load == Brought("d0", 8192, 4096, 2)
        second = await asyncio.wait_for(heard.get(), 10)
        assert (second.worker_id, second.keys, second.load) == ("p2", (), Brought("d0", 8192, 1, 1))
        last = await asyncio.wait_for(heard.get(), 10)
        assert (last.worker_id, last.keys, last.load) == ("p1", tuple(range(MAX_KEYS)), None)
        assert last.name != first.name
        assert heard.empty()


async def test_what_no_router_wrote_is_passed_over_and_a_stream_of_another_type_is_waited_out(store: Store) -> None:
    keys = Keys(f"placements-{next(CLUSTERS)}")
    await store.call(lambda redis: redis.set(keys.placements, "of another type"))
    async with routers(store, keys) as (one, heard, _):
        one.tell(Told("r1", "p0", (1,), 1.0))
        await asyncio.sleep(0)
        await store.call(lambda redis: redis.delete(keys.placements))
        for odd in ({"ms": "soon"}, {"ms": "9" * 400}, {"keys": b"7 bytes"}, {"by": b"\xff"}):
            fields = {"by": "x", "to": "odd", "ms": 1, "keys": b"", **odd}
            await store.call(partial(lambda redis, its: redis.xadd(keys.placements, its), its=fields))
        await listening(store, one, heard)


async def test_a_load_that_is_missing_or_malformed_leaves_the_blocks_expected(store: Store) -> None:
    """By routers of another version, before and after this one."""
    keys = Keys(f"placements-{next(CLUSTERS)}")
    blocks = {"by": "x", "to": "of other", "ms": 1000, "keys": bytes([7, *bytes(7)])}
    odd = (
        {},
        {"load": "1 2 3"},
        {"at": "d", "load": "many"},
        {"at": "d", "load": "1 2"},
        {"at": b"\xff", "load": "1 2 3"},
    )
    async with routers(store, keys) as (one, heard, _):
        await listening(store, one, heard)
        for load in (*odd, {"at": "d", "load": "9" * 5000}, {"at": "d", "load": "-1 2 3"}):
            await store.call(partial(lambda redis, its: redis.xadd(keys.placements, its), its={**blocks, **load}))
        told = [await asyncio.wait_for(heard.get(), 10) for _ in range(len(odd) + 2)]
        assert {one.keys for one in told} == {(7,)}
        assert [one.load for one in told] == [None] * (len(odd) + 1) + [Brought("d", -1, 2, 3)]


async def test_what_another_told_is_believed_for_no_longer_and_in_no_more_blocks_than_is_told_here(
    store: Store,
) -> None:
    keys = Keys(f"placements-{next(CLUSTERS)}")
    fields = {"by": "x", "to": "of other", "ms": 10**18, "keys": bytes(8 * 9 * MAX_KEYS)}
    async with routers(store, keys) as (one, heard, _):
        await listening(store, one, heard)
        await store.call(lambda redis: redis.xadd(keys.placements, fields))
        told = await asyncio.wait_for(heard.get(), 10)
        assert (told.seconds, len(told.keys)) == (MAX_SECONDS, MAX_KEYS)


async def test_streams_have_their_turn_among_many_that_are_heard_at_once(store: Store) -> None:
    keys, num_turns = Keys(f"placements-{next(CLUSTERS)}"), 0
    heard_in: list[int] = []

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def tell_all(redis: Any) -> None:
        async with redis.pipeline(transaction=True) as pipe:
            for _ in range(5 * HEARD_AT_ONCE):
                pipe.xadd(keys.placements, {"by": "x", "to": "of other", "ms": 1, "keys": bytes(8)})
            await pipe.execute()

    async with routers(store, keys) as (one, heard, _):
        await listening(store, one, heard)
        turns = asyncio.create_task(take_turns())
        listener = Placements(store, keys, "third", lambda told: heard_in.append(num_turns))
        running = asyncio.create_task(listener.run())
        while not heard_in:
            one.tell(Told("r0", "of other", (0,), 1.0))
            await store.call(lambda redis: redis.ping())
        await store.call(tell_all)
        async with asyncio.timeout(10):
            while len(heard_in) < 5 * HEARD_AT_ONCE:
                await store.call(lambda redis: redis.ping())
        for task in (turns, running):
            task.cancel()
        await asyncio.wait([turns, running])
    # what one read ended with and the next began with may share a turn
    assert max(heard_in.count(turn) for turn in set(heard_in)) < 2 * HEARD_AT_ONCE
