"""A slow canary before real routers, real workers without a model, a real controller and a real Redis: it gets its share,
is found out and rolled back, and nobody's request fails."""

import asyncio
import pathlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx
import pytest

from cluster.canary.control import Canary
from cluster.canary.report import figures
from cluster.canary.store import CanaryState
from cluster.canary.values import Phase
from cluster.commands.canary import verify
from cluster.controller import Controller
from cluster.pools import Addresses, Progress
from cluster.state import ControlState, configured
from cluster.worker_client import WorkerClient
from headrace import metrics
from headrace.clock import SystemClock
from headrace.config import CanaryConfig, ClusterConfig, PoolConfig
from headrace.store import Store, connect
from headrace.values import Role
from tests.chaos.stage import until
from tests.e2e.many_routers import BLOCK, ENGINE, Paced, a_router, samples, until_ready
from tests.e2e.routers import CONTEXT, START_SECONDS, tiny_checkpoint, tokenizer_digest
from tests.unit.cluster.played_pools import Pools
from tests.unit.workers.rig import COMPATIBILITY, HANDOFF, IDENTITY, a_worker
from workers.identity import Identity
from workers.spec import WorkerSpec

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]

SLOWER = 8
CANARY = CanaryConfig(
    revision="v2", model="other", pools={"canary": PoolConfig(role="unified")}, percent=50.0, min_requests=50
)
CONFIG = ClusterConfig(
    name="canary-e2e", model="m", pools={"all": PoolConfig(role="unified", replicas=2)}, canary=CANARY
)


@dataclass
class Rigs(Pools):
    """Workers in this process, with what the controller says that they are; the canary's steps take SLOWER times as
    long."""

    identity: Identity = IDENTITY
    ends: AsyncExitStack = field(default_factory=AsyncExitStack)
    addresses: dict[str, str] = field(default_factory=dict)

    async def start(self, spec: WorkerSpec, progress: Progress) -> Addresses:
        seconds = 2e-3 * (SLOWER if spec.model_path == "other" else 1)
        rig = await self.ends.enter_async_context(
            a_worker(
                spec.worker_id,
                role=Role.UNIFIED,
                engine=ENGINE,
                handoff=HANDOFF,
                identity=self.identity,
                executor=Paced(400, seconds, 1e-5),
                redis_url=spec.redis_url,
                redis_budget_seconds=2.0,
                cluster=spec.cluster,
                generation=spec.generation,
                revision=spec.revision,
            )
        )
        self.addresses[spec.worker_id] = rig.info.address
        return await super().start(spec, progress) and Addresses(rig.info.address)

    async def drain(self, worker_id: str, generation: int) -> None:
        async with WorkerClient(self.addresses[worker_id]) as client:
            self.note(f"{worker_id} drains, {await client.drain(10.0)} cut")


@asynccontextmanager
async def controlled(redis_url: str, store: Store, identity: Identity) -> AsyncIterator[Rigs]:
    state = ControlState(store, CONFIG.name)
    await state.forget()
    await state.write_desired(configured(CONFIG, trusted=True))
    pools = Rigs(identity=identity)
    async with pools.ends:
        canary = Canary(CONFIG, store)
        controller = Controller(CONFIG, redis_url, "", pools, state, SystemClock(), None, canary)  # type: ignore[arg-type]
        running = asyncio.create_task(controller.run())
        try:
            yield pools
        finally:
            running.cancel()
            await asyncio.wait([running])


@dataclass
class Clients:
    """Ask one router after the other, for as long as they are to. What came of it, by (status, revision)."""

    http: httpx.AsyncClient
    urls: list[str]
    came: Counter[tuple[int, str]] = field(default_factory=Counter)
    stopped: bool = False

    async def ask(self, url: str, random: Random) -> httpx.Response:
        prompt = [random.randrange(3, 200) for _ in range(3 * BLOCK)]
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        reply = await self.http.post(f"{url}/v1/completions", json=body)
        self.came[reply.status_code, reply.headers.get("x-headrace-revision", "")] += 1
        return reply

    async def run(self, seed: int) -> None:
        random = Random(seed)
        while not self.stopped:
            await self.ask(self.urls[seed % len(self.urls)], random)


async def test_a_slow_canary_is_rolled_back_on_every_router_and_no_request_fails(
    tmp_path: pathlib.Path, redis_url: str
) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    same = replace(COMPATIBILITY, tokenizer=tokenizer_digest(checkpoint), block_size=BLOCK)
    identity = replace(IDENTITY, compatibility=same, vocab_size=500, max_context_tokens=CONTEXT)
    async with AsyncExitStack() as ends:
        store = connect(redis_url, 2.0)
        ends.push_async_callback(store.close)
        http = await ends.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
        pools = await ends.enter_async_context(controlled(redis_url, store, identity))
        opening = [a_router(checkpoint, tmp_path, redis_url, CONFIG.name, f"r{number}") for number in range(2)]
        routers = await asyncio.gather(*map(ends.enter_async_context, opening))
        urls = [router.http for router in routers]
        await asyncio.gather(*(until_ready(http, url) for url in urls))

        async def shares(*wanted: float) -> bool:
            found = [await samples(http, url) for url in urls]
            return all(one[metrics.CANARY_PERCENT, ""] in wanted for one in found)

        await until(lambda: shares(50.0), START_SECONDS)
        clients, redis = Clients(http, urls), CanaryState(store, CONFIG.name)
        asking = [asyncio.create_task(clients.run(seed)) for seed in range(8)]

        async def over() -> bool:
            state = (await redis.read()).state
            return state is not None and not state.phase.under_way

        await until(over, 200)  # so many requests, at whatever rate
        await until(lambda: shares(0.0), START_SECONDS)
        running = clients.came.total()

        async def more() -> bool:
            return clients.came.total() >= running + 40

        await until(more, START_SECONDS)
        clients.stopped = True
        await asyncio.gather(*asking)

        standing = await redis.standing()
        assert standing is not None
        assert standing.state.phase is Phase.ROLLED_BACK
        assert standing.state.reason.startswith("worse than stable: T"), standing.state.reason
        verify(standing.events)
        assert {status for status, _ in clients.came} == {200}, clients.came
        assert min(clients.came[200, "stable"], clients.came[200, "v2"]) >= CANARY.min_requests
        await pools.until("canary-0 drains, 0 cut", "canary-0 is removed")
        shown = figures(standing)
        base, canary = shown["sides"]
        assert canary["tpot"]["p50"] > base["tpot"]["p50"]
        assert (base["failed"], canary["failed"]) == (0, 0)
