"""Two generations of one worker: who yields to whom, and what the older one left."""

from typing import Any

import pytest

from headrace.store import Store
from headrace.values import WorkerInfo
from tests.unit.workers.publish.publishing import BLOCKS, INFO, KEYS, Ledger, a_publisher, batches, in_redis
from workers.publish import YIELD_RENEWALS, Superseded

pytestmark = pytest.mark.redis


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
