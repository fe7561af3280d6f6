"""Workers by their leases: all of them, and one that is no lease hides no other."""

import uuid

import pytest

from cluster.leased import AT_ONCE, leased_workers
from headrace.keys import Keys
from headrace.leases import lease_fields
from headrace.store import connect
from tests.null_worker import worker_info


@pytest.mark.redis
async def test_one_key_that_is_no_lease_hides_no_worker(redis_url: str) -> None:
    store, cluster = connect(redis_url, 5.0), f"leased-{uuid.uuid4().hex[:8]}"
    keys = Keys(cluster)
    names = [f"w-{number:04}" for number in range(AT_ONCE + 5)]

    async def write(redis):  # type: ignore[no-untyped-def]
        pipe = redis.pipeline(transaction=False)
        for name in names:
            pipe.hset(keys.lease(name), mapping=lease_fields(worker_info(name), draining=name == names[0]))
        pipe.set(keys.lease("text"), "none")
        pipe.hset(keys.lease("other"), "role", "decode")
        await pipe.execute()

    try:
        await store.call(write)
        found = await leased_workers(store, cluster)
        assert [worker.info.worker_id for worker in found] == names
        assert [worker.draining for worker in found[:2]] == [True, False]
    finally:
        await store.close()
