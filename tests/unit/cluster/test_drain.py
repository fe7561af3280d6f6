import uuid
from dataclasses import replace

from cluster.commands.drain import addresses_on, drain_host
from headrace.keys import Keys
from headrace.leases import lease_fields
from headrace.store import connect
from tests.null_worker import worker_info


async def test_the_workers_of_one_host_are_found_by_their_leases(redis_url: str) -> None:
    cluster, store = f"c{uuid.uuid4().hex[:8]}", connect(redis_url, 2.0)
    try:
        for worker_id, address in (
            ("a-0", "10.0.0.1:7"),
            ("a-1", "10.0.0.2:7"),
            ("b-0", "10.0.0.1:8"),
            ("c-0", "[::1]:7"),
        ):
            info = replace(worker_info(), worker_id=worker_id, address=address)
            key, fields = Keys(cluster).lease(worker_id), lease_fields(info)
            await store.call(lambda redis, key=key, fields=fields: redis.hset(key, mapping=fields))  # type: ignore[misc]
        await store.call(lambda redis: redis.set(Keys(cluster).lease("z-0"), "of another type"))
    finally:
        await store.close()
    assert await addresses_on(cluster, redis_url, "10.0.0.1") == {"a-0": "10.0.0.1:7", "b-0": "10.0.0.1:8"}
    assert await addresses_on(cluster, redis_url, "::1") == {"c-0": "[::1]:7"}
    assert await addresses_on(cluster, redis_url, "10.0.0.3") == {}


async def test_a_worker_that_does_not_answer_is_named_and_holds_up_no_other(redis_url: str) -> None:
    cluster, store = f"c{uuid.uuid4().hex[:8]}", connect(redis_url, 2.0)
    fields = lease_fields(replace(worker_info(), worker_id="a-0", address="127.0.0.1:1"))
    try:
        await store.call(lambda redis: redis.hset(Keys(cluster).lease("a-0"), mapping=fields))
    finally:
        await store.close()
    outcome = await drain_host(cluster, redis_url, "127.0.0.1", 0.0)
    assert "127.0.0.1:1 did not answer" in str(outcome["a-0"])
