"""Workers that start before several real routers: each is proven once, and one that names blocks otherwise is caught."""

import pathlib
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest

from headrace import metrics
from headrace.blocks import BlockHasher
from headrace.keys import Keys
from headrace.store import connect
from router.decisions.self_check import Outcome, Reason, Verdict, decode_result
from tests.chaos.stage import until
from tests.e2e.many_routers import BLOCK, a_pool, a_router, samples
from tests.e2e.routers import START_SECONDS, tiny_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(120)]


async def test_each_worker_is_proven_once_by_one_of_several_routers_and_a_false_one_is_caught_by_all(
    tmp_path: pathlib.Path, redis_url: str
) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    async with AsyncExitStack() as ends:
        workers = await ends.enter_async_context(a_pool(checkpoint, redis_url, "check", num_prefill=2, num_decode=1))
        # What it says in its hello is right; what it names its blocks by is another seed.
        other = BlockHasher(revision="another", kv_format="float32", block_size=BLOCK)
        workers["p1"].worker._scheduler._admission._make_hasher = lambda adapter, salt: other
        patient = {"self_check": {"retry_seconds": 3600, "max_retry_seconds": 3600}}
        routers = [
            await ends.enter_async_context(a_router(checkpoint, tmp_path, redis_url, "check", f"r{number}", **patient))
            for number in range(2)
        ]
        http = await ends.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
        found: list[dict[tuple[str, str], float]] = []

        async def proven() -> bool:
            found[:] = [await samples(http, router.http) for router in routers]
            passed = {"p0": 1.0, "p1": 0.0, "d0": 1.0}
            return all(one.get((metrics.SELF_CHECK_PASSED, w)) == v for one in found for w, v in passed.items())

        await until(proven, START_SECONDS)
        total: Counter[str] = Counter()
        for one in found:
            total.update({label: int(value) for (name, label), value in one.items() if name == metrics.SELF_CHECKS})
        assert total == {"passed": 2, "failed": 1}, "more than once"
        assert all(one.get((metrics.REQUESTS, "tiny,finished"), 0.0) == 0 for one in found)
        store = connect(redis_url, budget_seconds=2.0)
        ends.push_async_callback(store.close)
        result = decode_result(await store.call(lambda redis: redis.get(Keys("check").self_check("p1"))))
        assert result is not None
        assert result.verdict == Verdict(Outcome.FAILED, Reason.KEYS)
