"""A worker's lease, its set and its events, as they stand in Redis."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.blocks import BlockHasher
from headrace.keys import STREAM_MIN_BLOCKS, Event, EventKind
from headrace.leases import parse_lease
from headrace.store import Store
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
)
from tests.unit.workers.rig import a_request, a_worker
from workers.publish import REWRITE_BLOCKS

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


async def test_case_38_the_stream_is_cut_to_what_it_is_to_keep(redis: Any, store: Store) -> None:
    ledger = Ledger(1000)
    publisher = a_publisher(store, ledger)
    blocks = list(BlockHasher(revision="r", kv_format="f", block_size=1).chain(range(16_000)))
    for first in range(0, len(blocks), 1000):
        ledger.cache(*blocks[first : first + 1000])
        await publisher.flush()
    assert sum(batch.num_blocks for batch in await batches(redis)) <= STREAM_MIN_BLOCKS
    assert (await in_redis(redis))[0] == ledger.held


async def test_nothing_new_writes_nothing(redis: Any, store: Store) -> None:
    publisher = a_publisher(store, Ledger())
    await publisher.flush()
    before = await batches(redis)
    await publisher.flush()
    assert await batches(redis) == before


async def test_an_orderly_end_takes_the_keys_along(redis: Any, store: Store) -> None:
    publisher = a_publisher(store, Ledger())
    await publisher.renew()
    await publisher.flush()
    await publisher.withdraw()
    assert await redis.keys(f"hr:{KEYS.cluster}:*") == []


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
