"""What a router is told of revisions, by a real Valkey, and what it makes of one that says nothing."""

from dataclasses import replace

import pytest
from redis.exceptions import ResponseError

from headrace.clock import ManualClock
from headrace.keys import Keys
from headrace.revisions import Split, encode_split
from headrace.store import connect
from router.decisions.revisions import SILENT_SECONDS, Revisions
from router.told_revisions import ToldRevisions

SPLIT = Split(3, "stable", "v2", 20.0, 1)


@pytest.mark.redis
async def test_it_reads_what_is_told_and_what_is_lost_or_foreign_takes_nothing_back(
    redis_url: str, clock: ManualClock
) -> None:
    store, keys, revisions = connect(redis_url, 2.0), Keys("told"), Revisions()
    told = ToldRevisions(store, keys, revisions, clock)
    await told.read()
    assert not revisions.known
    await store.call(lambda redis: redis.set(keys.revisions, encode_split(SPLIT)))
    await told.read()
    assert (revisions.split, revisions.percent(clock.now())) == (SPLIT, 20.0)
    for write in (lambda r: r.set(keys.revisions, b"nonsense"), lambda r: r.delete(keys.revisions)):
        await store.call(write)
        await told.read()
        assert revisions.split == SPLIT
    clock.advance(SILENT_SECONDS + 1)
    await told.read()
    assert revisions.percent(clock.now()) == 0.0, "nobody judges it"
    await store.call(lambda redis: redis.set(keys.revisions, encode_split(replace(SPLIT, beat=2))))
    await told.read()
    assert revisions.percent(clock.now()) == 20.0
    await store.call(lambda redis: redis.delete(keys.revisions))
    await store.close()


class Refusing:
    """A Redis that answers every command with an error."""

    async def call(self, operation: object, **_: object) -> object:
        raise ResponseError("OOM command not allowed")


async def test_a_redis_that_refuses_ends_no_router(clock: ManualClock) -> None:
    revisions = Revisions()
    revisions.told(SPLIT, clock.now())
    await ToldRevisions(Refusing(), Keys("c"), revisions, clock).read()  # type: ignore[arg-type]
    assert revisions.split == SPLIT
