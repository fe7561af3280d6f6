"""Several copies of the router: together they find what one would find, and none is missed."""

import asyncio
import pathlib
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import httpx
import pytest

from headrace import config_file, metrics, store
from router.core import Core, running_core
from router.decisions.view import WorkerView
from tests.e2e.many_routers import (
    Balancer,
    a_pool,
    a_router,
    samples,
    shared_prefix_prompts,
    until_in_step,
    until_ready,
)
from tests.e2e.routers import tiny_checkpoint
from tests.unit.router.stage import collect, job, open_text

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(300)]
AT_ONCE = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=64)) as client:
        yield client


async def hit_rate(balancer: Balancer, prompts: Sequence[Sequence[int]]) -> float:
    """Of all prompt tokens those that were cached, AT_ONCE requests at a time."""
    found: list[dict[str, int]] = []
    waiting = iter(prompts)

    async def client() -> None:
        found.extend([await balancer.ask(prompt) for prompt in waiting])

    async with asyncio.timeout(120), asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(client())
    assert len(found) == len(prompts)
    return sum(one["cached"] for one in found) / sum(one["asked"] for one in found)


async def test_three_routers_behind_a_balancer_have_the_hit_rate_of_one(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, redis_url: str, http: httpx.AsyncClient
) -> None:
    """With evictions, and two of three of a prefix come to another router than the last. Only the first burst is left out:
    it is placed before any router can have heard of another, and prefixes are computed more often than by one (ADR 12).
    """
    prompts = shared_prefix_prompts(1, AT_ONCE + 1500)
    rates = {}
    for num_routers in (1, 3):
        cluster = f"copies{num_routers}"
        async with AsyncExitStack() as ends:
            workers = await ends.enter_async_context(a_pool(checkpoint, redis_url, cluster))
            names = [f"{cluster}-{number}" for number in range(num_routers)]
            routers = [a_router(checkpoint, tmp_path, redis_url, cluster, name) for name in names]
            urls = [router.http for router in await asyncio.gather(*map(ends.enter_async_context, routers))]
            await asyncio.gather(*(until_in_step(http, url, workers) for url in urls))
            balancer = Balancer(http, urls)
            await asyncio.gather(*map(balancer.ask, prompts[:AT_ONCE]))
            rates[num_routers] = await hit_rate(balancer, prompts[AT_ONCE:])
            assert any(rig.counts.cached > 0.9 * rig.counts.total for rig in workers.values()), "nothing was evicted"
    assert rates[1] > 0.7
    assert rates[3] >= rates[1] - 0.02


YAML = """
model: m
pools: {d: {role: decode}}
handoff: {local_prefill_max_tokens: 0}
router: {coalesce_seconds: 0.0, heartbeat_seconds: 0.2}
"""


async def test_a_router_killed_with_requests_in_flight_leaves_no_load_in_anothers_view(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, redis_url: str, http: httpx.AsyncClient
) -> None:
    async with AsyncExitStack() as ends:
        cluster = "phantom"
        workers = await ends.enter_async_context(a_pool(checkpoint, redis_url, cluster, base_seconds=0.02))
        victim = await ends.enter_async_context(a_router(checkpoint, tmp_path, redis_url, cluster, "victim"))
        await until_in_step(http, victim.http, workers)
        following = store.connect(redis_url, budget_seconds=2.0)
        ends.push_async_callback(following.close)
        core = await ends.enter_async_context(
            running_core(
                config_file.parse(f"name: {cluster}{YAML}"), router_id="t", open_text=open_text, store=following
            )
        )
        await until(core, lambda: len(core.requests.view().workers) == len(workers))

        prompts = shared_prefix_prompts(2, 16)
        asking = [asyncio.create_task(Balancer(http, [victim.http]).ask(prompt, 2000)) for prompt in prompts]
        await until(core, lambda: sum(worker.load.num_running for worker in core.requests.view().workers) == 16)
        own = asyncio.create_task(collect(core.requests.stream(job("own", prompt=40, max_tokens=2000))))
        await until(core, lambda: core.requests.num_in_flight == 1)
        victim.process.send_signal(signal.SIGKILL)
        assert await victim.process.wait() == -signal.SIGKILL
        await asyncio.gather(*asking, return_exceptions=True)
        await until(core, lambda: own.done() or sum(map(num_sequences, core.requests.view().workers)) <= 2)
        assert not own.done(), "the others' load was seen only when nothing was left"
        own.cancel()
        await asyncio.wait([own])
        await until(core, lambda: not any(map(loaded, core.requests.view().workers)))
        for rig in workers.values():
            await asyncio.wait_for(rig.idle(), 20)


def num_sequences(worker: WorkerView) -> int:
    return worker.load.num_running + worker.load.num_waiting


def loaded(worker: WorkerView) -> bool:
    load = worker.load
    return bool(num_sequences(worker) or load.waiting_prefill_tokens or load.context_tokens or load.claimed_tokens)


async def until(core: Core, condition: object) -> None:
    """Workers report at least every half second, so this looks again at least as often."""
    changed = asyncio.Event()
    core.sessions.listen(lambda worker_id: changed.set())
    async with asyncio.timeout(30):
        while not condition():  # type: ignore[operator]
            changed.clear()
            await changed.wait()


async def test_case_39_a_router_killed_and_started_again_under_load_knows_the_caches(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, redis_url: str, http: httpx.AsyncClient
) -> None:
    """Nobody's request fails meanwhile; what the new copy places finds as much as before."""
    prompts = shared_prefix_prompts(3, 900)
    async with AsyncExitStack() as ends:
        cluster = "again"
        workers = await ends.enter_async_context(a_pool(checkpoint, redis_url, cluster, num_blocks=2000))
        routers = [
            await ends.enter_async_context(a_router(checkpoint, tmp_path, redis_url, cluster, f"again{number}"))
            for number in range(2)
        ]
        for router in routers:
            await until_in_step(http, router.http, workers)
        balancer = Balancer(http, [router.http for router in routers])
        await hit_rate(balancer, prompts[:300])
        under_load = asyncio.create_task(hit_rate(balancer, prompts[300:600]))
        routers[0].process.send_signal(signal.SIGKILL)
        again = await ends.enter_async_context(a_router(checkpoint, tmp_path, redis_url, cluster, "again2"))
        await until_ready(http, again.http)
        balancer.routers[0] = again.http
        assert await under_load > 0.8
        await until_in_step(http, again.http, workers)
        assert await hit_rate(Balancer(http, [again.http]), prompts[600:]) > 0.8
        assert not (await samples(http, again.http)).get((metrics.INDEX_FALLBACKS, "distrusted"))
