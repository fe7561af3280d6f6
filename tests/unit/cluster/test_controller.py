"""The controller's loop before pools that a test plays, and a real Valkey."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.controller import LEAVE_SECONDS, Controller
from cluster.lifecycle import STEADY_SECONDS, Desired, DesiredPool, History, Phase
from cluster.pools import Addresses, Adopted
from cluster.state import ControlState, configured
from cluster.worker_client import WorkerClient, WorkerReport
from headrace.clock import Clock, ManualClock, SystemClock
from headrace.config import ClusterConfig, PoolConfig
from headrace.store import connect
from headrace.values import BlockCounts, Load, Role
from tests.unit.cluster.played_pools import Pools
from workers.spec import WorkerSpec

pytestmark = pytest.mark.redis
CONFIG = ClusterConfig(model="m", pools={"decode": PoolConfig(role="decode", replicas=2)})


@contextlib.asynccontextmanager
async def controlling(
    redis_url: str, pools: Any, clock: Clock | None = None
) -> AsyncIterator[tuple[Controller, ControlState, "asyncio.Task[None]"]]:
    store = connect(redis_url, 2.0)
    state = ControlState(store, CONFIG.name)
    await state.forget()
    await state.write_desired(configured(CONFIG, trusted=True))
    controller = Controller(CONFIG, redis_url, "127.0.0.1", pools, state, clock or SystemClock())
    running = asyncio.create_task(controller.run())
    try:
        yield controller, state, running
    finally:
        running.cancel()
        await asyncio.wait([running])
        await store.close()


async def test_a_cluster_that_goes_down_waits_for_workers_that_drain_already(redis_url: str) -> None:
    pools = Pools()
    async with controlling(redis_url, pools) as (controller, state, running):
        await pools.until("decode-0 starts", "decode-1 starts")
        await state.write_desired(Desired({"decode": DesiredPool(Role.DECODE, 1)}))
        await pools.until("decode-1 drains")
        controller.stop()
        await pools.until("decode-0 drains")
        pools.let_go["decode-0"].set()
        await pools.until("decode-0 is drained")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(what.endswith("is removed") for what in pools.happened)
        pools.let_go["decode-1"].set()
        await asyncio.wait_for(running, 10)
    for name in ("decode-0", "decode-1"):
        assert pools.happened.index(f"{name} is drained") < pools.happened.index(f"{name} is removed")


class Failing:
    """An autoscaler with a fault of its own."""

    def __init__(self) -> None:
        self.num_turns = 0

    async def turn(self, desired: Desired, seen: object, reserved_gpus: int) -> Desired:
        self.num_turns += 1
        raise ZeroDivisionError


async def test_an_autoscaler_that_fails_ends_no_controller(redis_url: str) -> None:
    pools, failing = Pools(), Failing()
    async with controlling(redis_url, pools) as (controller, _, running):
        controller._autoscaler = failing  # type: ignore[assignment]
        await pools.until("decode-0 starts", "decode-1 starts")
        controller.stop()
        for name in ("decode-0", "decode-1"):
            pools.let_go[name].set()
        await asyncio.wait_for(running, 10)
    assert failing.num_turns >= 1


async def test_workers_of_a_node_that_goes_are_drained_and_start_elsewhere_meanwhile(redis_url: str) -> None:
    pools = Pools()
    async with controlling(redis_url, pools) as (controller, state, running):
        await pools.until("decode-0 starts", "decode-1 starts")
        pools.leaving = {("decode-0", 1): 20.0, ("decode-1", 1): 20.0}
        await pools.until("decode-2 starts", "decode-3 starts", "decode-0 drains", "decode-1 drains")
        observed = await state.observed()
        assert observed is not None
        assert {worker.reason for worker in observed.workers if worker.phase == "draining"} <= {
            "its node is taken away in 20 s: Ray drains it"
        }
        for worker in range(4):
            pools.let_go[f"decode-{worker}"].set()
        await pools.until("decode-0 is removed", "decode-1 is removed")
        controller.stop()
        await asyncio.wait_for(running, 10)
    assert pools.happened.count("decode-0 starts") == 1, "two are desired, and two serve"


async def test_ray_that_says_something_else_of_nodes_ends_no_controller(redis_url: str) -> None:
    class Odd(Pools):
        async def notices(self) -> dict[tuple[str, int], float]:
            raise KeyError("bundles_to_node_id")

    pools = Odd()
    async with controlling(redis_url, pools) as (_, _, running):
        await pools.until("decode-0 starts", "decode-1 starts")
        assert not running.done()


async def test_a_node_that_goes_sooner_than_was_said_is_left_sooner(redis_url: str) -> None:
    pools, clock = Pools(), ManualClock()
    async with controlling(redis_url, pools, clock) as (controller, _, _):
        await pools.until("decode-0 starts", "decode-1 starts")
        for said, meant in ((600.0, 600.0), (599.0, 600.0), (60.0, 60.0), (600.0, 60.0)):
            pools.leaving = {("decode-0", 1): said}
            async with asyncio.TaskGroup() as tasks:
                await controller._hear_notices(tasks)
            leaves_at = controller._workers["decode-0"].seen.leaves_at
            assert leaves_at is not None
            assert leaves_at - clock.now() == meant


async def test_a_slot_that_served_steadily_starts_without_the_failures_of_before(redis_url: str) -> None:
    pools, clock = Pools(), ManualClock()
    async with controlling(redis_url, pools, clock) as (controller, state, _):
        await pools.until("decode-0 starts", "decode-1 starts")
        controller._history["decode-1"] = History(1, 3, 0.0, "no image")
        clock.advance(STEADY_SECONDS)
        await state.write_desired(Desired({"decode": DesiredPool(Role.DECODE, 1)}))
        await pools.until("decode-1 drains")
        assert controller._history["decode-1"].failures == 0, "so that it is counted on while it starts"


def asked(pools: Pools, finished: asyncio.Event) -> type[WorkerClient]:
    """Workers that note what they are given to drain, and have not done before `finished`."""

    class Asked(WorkerClient):
        async def drain(self, grace_seconds: float) -> int:
            pools.note(f"has {grace_seconds:g} s")
            await finished.wait()
            return 0

    return Asked


async def test_who_is_taken_away_may_finish_long_answers_unless_the_cluster_goes_down(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer that took half a minute more was cut wherever a pool shrank: 11 of 126 under a load that ended."""
    pools, finished = Pools(), asyncio.Event()

    monkeypatch.setattr("cluster.controller.WorkerClient", asked(pools, finished))
    async with controlling(redis_url, pools) as (controller, state, running):
        await pools.until("decode-0 starts", "decode-1 starts")
        await state.write_desired(Desired({"decode": DesiredPool(Role.DECODE, 1)}))
        await pools.until("has 600 s")
        assert "decode-1 drains" not in pools.happened, "it is told to end once it has finished"
        for name in ("decode-0", "decode-1"):
            pools.let_go[name].set()
        controller.stop()
        await asyncio.wait_for(running, 10)
    assert pools.happened.count("has 600 s") == 1
    assert {"decode-0 is drained", "decode-1 is drained"} <= set(pools.happened)


async def test_who_drains_already_has_the_time_of_a_node_that_goes_and_is_waited_for_no_more_once_it_is_gone(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed in the middle of its ten minutes; and a cluster that went down waited for the rest of them."""
    pools, clock = Pools(), ManualClock()
    monkeypatch.setattr("cluster.controller.WorkerClient", asked(pools, asyncio.Event()))
    async with controlling(redis_url, pools, clock) as (controller, state, running):
        await pools.until("decode-0 starts", "decode-1 starts")
        await state.write_desired(Desired({"decode": DesiredPool(Role.DECODE, 1)}))
        await pools.until("has 600 s")
        pools.leaving = {("decode-1", 1): 60.0}
        controller._changed.set()
        await pools.until(f"has {60 - LEAVE_SECONDS:g} s")
        pools.gone["decode-1"].set()
        await pools.until("decode-1 is removed")
        pools.let_go["decode-0"].set()
        controller.stop()
        await asyncio.wait_for(running, 10)
    assert "decode-1 drains" not in pools.happened


async def test_case_65_without_rays_head_nothing_is_started_and_status_says_why(redis_url: str) -> None:
    """A call to the head would hold the controller up until it is back: its lease, roles and the canary with it."""
    pools = Pools(head_silent_seconds=9.0, trouble="Ray's head has not answered for 9 s")
    async with controlling(redis_url, pools) as (controller, state, _):
        async with asyncio.timeout(10):
            while (observed := await state.observed()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert observed.trouble == pools.trouble
        assert not pools.happened
        pools.head_silent_seconds = 0.0
        controller._changed.set()
        await pools.until("decode-0 starts", "decode-1 starts")


async def test_case_65_a_worker_that_loads_when_another_controller_comes_loads_on(redis_url: str) -> None:
    """Its weights may take ten minutes; a second look finds what did not answer at the first."""
    spec = WorkerSpec("decode-0", 3, Role.DECODE, "m")
    pools = Pools(found=[None, [Adopted(spec, Addresses())]])
    async with controlling(redis_url, pools) as (controller, _, _):
        await pools.until("decode-0 loads on", "decode-1 starts")
        assert "decode-0 starts" not in pools.happened
        assert controller._workers["decode-0"].seen.phase == Phase.STARTING
        pools.let_go["decode-0"].set()
        async with asyncio.timeout(10):
            while controller._workers["decode-0"].seen.phase != Phase.READY:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert controller._workers["decode-0"].seen.generation == 3


async def test_who_drained_under_an_earlier_controller_drains_on_and_is_counted_on_no_more(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as one that serves, for good: it took no request, and nobody ended it or started another."""

    class Left(Pools):
        async def adopt(self) -> list[Adopted]:
            specs = (WorkerSpec(f"decode-{slot}", 1, Role.DECODE, "m") for slot in range(2))
            return [Adopted(spec, Addresses(spec.worker_id, "")) for spec in specs]

    async def said(address: str) -> WorkerReport:
        drains = address == "decode-0"
        return WorkerReport(address, 1, "decode", "m", BlockCounts(), Load(), drains, 0, 0, 0, 0)

    pools = Left()
    monkeypatch.setattr("cluster.controller.described", said)
    monkeypatch.setattr("cluster.controller.WorkerClient", asked(pools, asyncio.Event()))
    async with controlling(redis_url, pools):
        await pools.until("has 600 s", "decode-2 starts")
        assert pools.happened.count("has 600 s") == 1
