"""Which worker goes, or is lent, where a pool has one too many: whoever has the least to finish and to lose."""

import asyncio
from dataclasses import replace

import pytest

from cluster.lifecycle import FOUND_SECONDS, Action, Desired, DesiredPool, Drain, Held, Phase, SetRole
from cluster.reconcile import reconcile
from cluster.rollouts import Rollouts
from cluster.worker_client import WorkerClient, WorkerReport
from headrace.clock import SystemClock
from headrace.errors import InternalError, WorkerLost
from headrace.values import BlockCounts, Load, Role
from tests.unit.cluster.played_pools import Pools
from tests.unit.cluster.reconciled import World, settled
from tests.unit.cluster.test_controller import controlling

IDLE = Held(0, 256, 0)


def holding(*held: Held | None) -> World:
    """A pool of decode workers that say so of themselves."""
    world, _ = settled(decode=len(held))
    for index, its in enumerate(held):
        change(world, index, held=its)
    return world


def change(world: World, index: int, **what: object) -> None:
    slot = f"decode-{index}"
    world.workers[slot] = replace(world.workers[slot], **what)  # type: ignore[arg-type]


def drained(world: World, replicas: int, **target: object) -> list[str]:
    desired = Desired({"decode": DesiredPool(Role.DECODE, replicas, **target)})  # type: ignore[arg-type]
    return drained_of(reconcile(desired, world.observed, world.now))


def drained_of(actions: list[Action]) -> list[str]:
    return [action.worker_id for action in actions if isinstance(action, Drain)]


@pytest.mark.parametrize(
    ("held", "order"),
    [
        ((Held(9, 256, 400), IDLE, Held(90, 256, 2000)), [1, 0, 2]),
        ((Held(1, 256, 50), Held(0, 256, 9000), Held(2, 256, 20)), [1, 2, 0]),
        ((Held(40, 256, 9000), Held(45, 256, 800), Held(51, 256, 8000)), [1, 2, 0]),
        ((Held(0, 256, 700), Held(0, 256, 0), Held(0, 256, 700)), [1, 2, 0]),
        ((IDLE, IDLE, IDLE), [2, 1, 0]),
        ((Held(3, 256, 0), None, Held(2, 0, 0)), [0, 2, 1]),
    ],
    ids=["idle", "an idle one has a cache", "caches of as busy ones", "prefill", "equal", "who has not said anything"],
)
def test_a_smaller_pool_drains_who_has_the_least_to_leave(held: tuple[Held | None, ...], order: list[int]) -> None:
    """It drained the highest index, whatever ran there."""
    world = holding(*held)
    for replicas in (2, 1, 0):
        assert drained(world, replicas) == [f"decode-{index}" for index in order[: 3 - replicas]]


def test_who_fails_goes_before_all_that_serve_and_after_who_starts() -> None:
    world = holding(IDLE, Held(200, 256, 9000), IDLE, IDLE)
    change(world, 1, failing=True)
    change(world, 2, phase=Phase.STARTING)
    change(world, 3, revision="old")
    gone = []
    for replicas in (3, 2, 1):
        desired = Desired({"decode": DesiredPool(Role.DECODE, replicas)})
        actions = reconcile(desired, world.observed, world.now, None, Rollouts(max_unavailable=0))
        gone.append(sorted(action.worker_id for action in actions if not isinstance(action, SetRole)))
    assert gone[0] == ["decode-2"]
    assert gone[1] == ["decode-1", "decode-2"]
    assert gone[2] == ["decode-1", "decode-2", "decode-3"]


def test_of_those_that_start_who_has_no_room_goes_first_and_then_the_youngest() -> None:
    world = holding(None, None, None)
    change(world, 0, phase=Phase.STARTING, since=1.0, pending=True)
    change(world, 1, phase=Phase.STARTING, since=3.0)
    change(world, 2, phase=Phase.STARTING, since=2.0)
    removed = []
    for replicas in (2, 1):
        desired = Desired({"decode": DesiredPool(Role.DECODE, replicas)})
        removed.append({action.worker_id for action in reconcile(desired, world.observed, world.now)})
    assert removed == [{"decode-0"}, {"decode-0", "decode-1"}]


def test_why_it_drains_says_what_it_has() -> None:
    world = holding(Held(3, 256, 40), Held(200, 256, 9000))
    (drain,) = reconcile(Desired({"decode": DesiredPool(Role.DECODE, 1)}), world.observed, world.now)
    assert isinstance(drain, Drain)
    assert drain.why == "1 wanted in its pool; it has 3 requests and 40 blocks of KV"


def test_of_old_ones_that_are_replaced_those_go_first_that_have_the_least() -> None:
    world = holding(Held(9, 256, 400), IDLE, Held(90, 256, 2000))
    assert drained(world, 3, revision="v2") == ["decode-1"]


@pytest.mark.parametrize("rollouts", [Rollouts(1, 0), Rollouts(0, 1)])
def test_no_old_one_goes_for_a_new_one_that_fails_but_one_that_fails_itself_may(rollouts: Rollouts) -> None:
    """The last that served was drained though what had come for the others did not answer."""
    world = holding(IDLE, IDLE) if rollouts.max_unavailable else holding(IDLE, IDLE, IDLE)
    world.now += FOUND_SECONDS
    for index in range(1, len(world.workers)):
        change(world, index, revision="v2")
    change(world, 1, failing=True)
    desired = Desired({"decode": DesiredPool(Role.DECODE, 2, revision="v2")})
    assert reconcile(desired, world.observed, world.now, None, rollouts) == []
    change(world, 1, failing=False)
    change(world, 0, failing=True)
    assert drained_of(reconcile(desired, world.observed, world.now, None, rollouts)) == ["decode-0"]


def test_a_worker_whose_node_goes_is_not_drained_for_one_that_fails() -> None:
    world = holding(IDLE, IDLE)
    change(world, 0, leaves_at=world.now + 500.0)
    change(world, 1, failing=True)
    assert drained(world, 1) == []
    change(world, 1, failing=False)
    assert drained(world, 1) == ["decode-0"]


def test_the_last_one_that_works_is_not_lent_beside_one_that_fails() -> None:
    world = holding(IDLE, IDLE)
    change(world, 0, failing=True)
    assert reconcile(Desired({"decode": DesiredPool(Role.DECODE, 2, lent=1)}), world.observed, world.now) == []


def test_who_is_lent_has_the_least_to_finish_beside_prompts_and_does_not_fail() -> None:
    world = holding(Held(9, 256, 400), Held(1, 256, 20), IDLE, Held(90, 256, 2000))
    change(world, 2, failing=True)
    for lent, flipped in ((1, ["decode-1"]), (2, ["decode-0", "decode-1"])):
        desired = Desired({"decode": DesiredPool(Role.DECODE, 4, lent=lent)})
        flips = reconcile(desired, world.observed, world.now)
        assert [flip.worker_id for flip in flips if isinstance(flip, SetRole)] == flipped
    world.act(reconcile(Desired({"decode": DesiredPool(Role.DECODE, 4, lent=1)}), world.observed, world.now))
    change(world, 1, held=Held(200, 256, 9000))
    assert reconcile(Desired({"decode": DesiredPool(Role.DECODE, 4, lent=1)}), world.observed, world.now) == []


def test_kv_that_goes_with_a_worker_is_what_is_used_pinned_or_cached() -> None:
    blocks = BlockCounts(free=100, cached=30, active=20, pinned=4, quarantined=1)
    report = WorkerReport("a", 1, "decode", "m", blocks, Load(), False, 0, 0, 0, 0, max_num_seqs=64, num_requests=7)
    assert report.held == Held(7, 64, 54)


@pytest.mark.redis
@pytest.mark.parametrize("trouble", ["", "silent", "by its own words"])
async def test_a_controller_drains_the_worker_that_says_it_has_nothing_or_does_not_answer(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    pools = Pools(named=True)
    asked: set[str] = set()

    class Said(WorkerClient):
        async def describe(self) -> WorkerReport:
            number = {"decode-0": 0, "decode-1": 5}[self._address]
            asked.add(self._address)
            if self._address == "decode-1" and trouble == "silent":
                raise WorkerLost("it did not answer")
            unhealthy = trouble if self._address == "decode-1" else ""
            return WorkerReport(
                *(self._address, 1, "decode", "m", BlockCounts(), Load(), False, 0, 0, 0, 0, unhealthy, 64),
                num_requests=number,
            )

        async def drain(self, grace_seconds: float) -> int:
            raise InternalError("it is over")

    monkeypatch.setattr("cluster.controller.WorkerClient", Said)
    monkeypatch.setattr("cluster.controller.HEALTH_SECONDS", 0.0)
    async with controlling(redis_url, pools, SystemClock()) as (controller, state, _):
        await pools.until("decode-0 starts", "decode-1 starts")
        async with asyncio.timeout(10):
            while len(asked) < 2 or not all(its.report or its.silence for its in controller._workers.values()):  # noqa: ASYNC110
                await asyncio.sleep(0)
        await state.write_desired(Desired({"decode": DesiredPool(Role.DECODE, 1)}))
        leaves = "decode-1" if trouble else "decode-0"
        await pools.until(f"{leaves} drains")
        assert ("decode-0 drains" in pools.happened) + ("decode-1 drains" in pools.happened) == 1
        for name in ("decode-0", "decode-1"):
            pools.let_go[name].set()
