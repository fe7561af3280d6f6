"""Pools whose workers are replaced where the cluster, or its budget, has no room for one beside them."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.controller import Controller
from cluster.lifecycle import FOUND_SECONDS, Desired, DesiredPool, Phase, Remove, Start
from cluster.pools import WAITING, Addresses, Progress
from cluster.reconcile import START_SECONDS, reconcile
from cluster.rollouts import Rollouts, held_up, waiting
from headrace.clock import ManualClock
from headrace.values import Role
from tests.unit.cluster.played_pools import Pools
from tests.unit.cluster.reconciled import World, settled
from tests.unit.cluster.test_controller import CONFIG, controlling
from workers.spec import WorkerSpec

PATIENCE_SECONDS = 120.0


def turn(world: World, desired: Desired, rollouts: Rollouts, room: int, budget: int | None = None) -> None:
    """One, in a cluster of so many GPUs: who starts has room once others gave it back."""
    world.act(reconcile(desired, world.observed, world.now, budget, rollouts))
    for worker in list(world.workers.values()):
        if worker.phase is Phase.DRAINING:
            world.set_phase(worker.worker_id, Phase.DRAINED)
    held = sum(its.layout.world_size for its in world.workers.values() if its.phase is not Phase.STARTING)
    for worker in list(world.workers.values()):
        if worker.phase is Phase.STARTING:
            fits = held + worker.layout.world_size <= room
            held += worker.layout.world_size if fits else 0
            world.workers[worker.worker_id] = replace(
                worker,
                pending=not fits,
                phase=Phase.READY if fits else Phase.STARTING,
                since=world.now if fits else worker.since,
                reason="" if fits else "waits for 1 GPU",
            )
    world.now += FOUND_SECONDS


def in_revision(desired: Desired, revision: str, replicas: int) -> Desired:
    return Desired({"decode": replace(desired.pools["decode"], revision=revision, replicas=replicas)})


def revisions(world: World) -> list[str]:
    return [worker.revision for worker in world.workers.values() if worker.phase is Phase.READY]


@given(
    number=st.integers(1, 5), fewer=st.integers(0, 4), max_unavailable=st.integers(0, 2), max_surge=st.integers(1, 3)
)
def test_a_full_cluster_holds_no_rollout_up_but_one_that_may_miss_nobody_and_no_shrink(
    number: int, fewer: int, max_unavailable: int, max_surge: int
) -> None:
    world, before = settled(decode=number)
    world.now += FOUND_SECONDS
    wanted, rollouts = max(number - fewer, 1), Rollouts(max_unavailable, max_surge)
    after = in_revision(before, "v2", wanted)
    for _ in range(100):
        turn(world, after, rollouts, room=number)
        assert sum(worker.phase is Phase.READY for worker in world.workers.values()) >= wanted - max_unavailable
    said = held_up(after, list(world.workers.values()), rollouts, world.now, PATIENCE_SECONDS)
    if max_unavailable or wanted < number:
        assert revisions(world) == ["v2"] * wanted
        assert not said
    else:
        assert revisions(world) == ["stable"] * number, "none may be missing"
        (first, *_) = sorted(worker.worker_id for worker in world.workers.values() if worker.pending)
        seconds = world.now - world.workers[first].since
        assert said == (
            f"decode: {number} to be replaced, {first} waits for 1 GPU beside them for {seconds:.0f} s, and "
            "rollouts.max_unavailable is 0"
        )
        turn(world, after, rollouts, room=number + 1)
        assert not world.workers[first].pending


def test_who_waits_for_room_beside_old_ones_has_not_failed_however_long_that_takes() -> None:
    """It was ended each ten minutes, and its slot counted as one that fails."""
    world, before = settled(decode=2)
    world.now += FOUND_SECONDS
    after, rollouts = in_revision(before, "v2", 2), Rollouts(0, 1)
    turn(world, after, rollouts, room=2)
    assert not held_up(after, list(world.workers.values()), rollouts, world.now, PATIENCE_SECONDS), "not yet"
    world.now += START_SECONDS + 1
    assert reconcile(after, world.observed, world.now, None, rollouts) == []
    (removal,) = reconcile(before, world.observed, world.now, None, rollouts)
    assert isinstance(removal, Remove)
    assert (removal.worker_id, removal.failed) == ("decode-2", False), "the old ones are wanted again"


def test_who_waits_beside_old_ones_takes_no_other_pools_part_of_the_budget() -> None:
    world, before = settled(decode=2, prefill=1)
    world.now += FOUND_SECONDS
    pools = {**before.pools, "decode": replace(before.pools["decode"], revision="v2")}
    rollouts = Rollouts(0, 1, 4)
    turn(world, Desired(pools), rollouts, room=3, budget=4)
    assert world.workers["decode-2"].pending
    grown = Desired({**pools, "prefill": DesiredPool(Role.PREFILL, 2)})
    assert reconcile(grown, world.observed, world.now, 4, rollouts) == [
        Remove("decode-2", 1, "the budget has its GPUs for others, and it has no room yet"),
        Start("prefill", 1, 1, Role.PREFILL, world.workers["prefill-0"].layout),
    ]


def test_a_budget_that_holds_none_beside_old_ones_is_said_where_none_may_be_missing() -> None:
    world, before = settled(decode=2)
    after, workers = in_revision(before, "v2", 2), list(world.workers.values())
    assert held_up(after, workers, Rollouts(0, 1, 2), world.now, PATIENCE_SECONDS) == (
        "decode: 2 to be replaced, the budget of 2 GPUs holds none of tp1·pp1 beside them, and "
        "rollouts.max_unavailable is 0"
    )
    for rollouts in (Rollouts(0, 1, 3), Rollouts(1, 1, 2)):
        assert not held_up(after, workers, rollouts, world.now, PATIENCE_SECONDS)
    assert not held_up(before, workers, Rollouts(0, 1, 2), world.now, PATIENCE_SECONDS)


def test_a_rollout_that_waits_for_those_that_are_missing_already_says_so() -> None:
    """With a node lost, one of four was missing for want of room: nobody could be replaced, and nothing said so."""
    world, before = settled(decode=3)
    after, rollouts = in_revision(before, "v2", 4), Rollouts(1, 0)

    def said() -> str:
        return held_up(after, list(world.workers.values()), rollouts, world.now, PATIENCE_SECONDS)

    turn(world, after, rollouts, room=3)
    assert not said(), "not yet"
    world.now += PATIENCE_SECONDS
    turn(world, after, rollouts, room=3)
    assert revisions(world) == ["stable"] * 3
    assert said() == (
        "decode: 3 to be replaced, decode-3 waits for 1 GPU beside them for 140 s, and rollouts.max_unavailable is 1"
    )
    for change in ({"failing": True}, {"phase": Phase.DRAINING}):
        others = list(world.workers.values())
        others[0] = replace(others[0], **change)  # type: ignore[arg-type]
        assert not held_up(after, others, rollouts, world.now, PATIENCE_SECONDS), "it goes on by itself"
    for _ in range(10):
        turn(world, after, rollouts, room=4)
        assert not said()
    assert revisions(world) == ["v2"] * 4


def test_one_that_waits_for_the_room_of_an_old_one_that_drains_waits_beside_it() -> None:
    """An answer of minutes kept it waiting, and the pool was made smaller for want of room."""
    world, before = settled(decode=3)
    world.now += FOUND_SECONDS
    after = in_revision(before, "v2", 3)
    world.act(reconcile(after, world.observed, world.now, None, Rollouts(1, 1)))
    (new,) = [worker for worker in world.workers.values() if worker.phase is Phase.STARTING]
    world.workers[new.worker_id] = replace(new, pending=True)
    assert [worker.worker_id for worker in waiting(after, list(world.workers.values()))] == [new.worker_id]
    assert [worker.phase for worker in world.workers.values()].count(Phase.DRAINING) == 1


class Full(Pools):
    """Without room for anybody but the first two, until there is."""

    async def start(self, spec: WorkerSpec, progress: Progress) -> Addresses:
        if spec.worker_id == "decode-2":
            progress(f"{WAITING}1 GPU")
            self.note("decode-2 waits")
            await self.let_go["room"].wait()
            progress("loads")
            self.note("decode-2 loads")
            await self.let_go["decode-2"].wait()
        return await super().start(spec, progress)


class Looking:
    """An autoscaler that notes whom it sees, and has another layout for them."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    async def turn(self, desired: Desired, seen: list[object], reserved_gpus: int) -> Desired:
        self.seen.append({one.worker.worker_id for one in seen})  # type: ignore[attr-defined]
        return desired


async def until_seen(controller: Controller, looking: Looking, phase: str) -> set[str]:
    """What the autoscaler sees in the turn after the third worker was so."""
    async with asyncio.timeout(10):
        while phase not in controller._workers["decode-2"].seen.reason:  # noqa: ASYNC110
            await asyncio.sleep(0)
        number = len(looking.seen)
        while len(looking.seen) < number + 2:
            controller._changed.set()
            await asyncio.sleep(0)
    return looking.seen[-1]


@pytest.mark.parametrize("phase", [Phase.DRAINED, Phase.DEAD])
def test_who_waits_for_the_room_of_one_that_is_over_has_not_failed_before_that_is_removed(phase: Phase) -> None:
    world, before = settled(decode=1)
    after, rollouts = in_revision(before, "v2", 1), Rollouts(0, 1)
    turn(world, after, rollouts, room=1)
    world.now += START_SECONDS + 1
    world.set_phase("decode-0", phase)
    removed = [its for its in reconcile(after, world.observed, world.now, None, rollouts) if isinstance(its, Remove)]
    assert [(its.worker_id, its.failed) for its in removed] == [("decode-0", False)]


@pytest.mark.redis
async def test_who_waited_long_for_the_room_of_one_that_drains_has_its_time_once_that_is_gone(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ended as one that fails in the very turn in which its room came free."""
    pools, clock = Full(), ManualClock()
    rollouts = CONFIG.rollouts.model_copy(update={"max_unavailable": 1, "max_surge": 1})
    monkeypatch.setattr("tests.unit.cluster.test_controller.CONFIG", CONFIG.model_copy(update={"rollouts": rollouts}))
    async with controlling(redis_url, pools, clock) as (controller, state, _):
        await pools.until("decode-0 starts", "decode-1 starts")
        wide = replace(DesiredPool(Role.DECODE, 2), revision="v2")
        await state.write_desired(Desired({"decode": replace(wide, layout=replace(wide.layout, pp=2))}))
        await pools.until("decode-2 waits", "decode-1 drains")
        clock.advance(START_SECONDS + 1)
        pools.let_go["decode-1"].set()
        await pools.until("decode-1 is removed")
        for _ in range(200):
            controller._changed.set()
            await asyncio.sleep(0.001)
        assert "decode-2 is removed" not in pools.happened
        assert controller._workers["decode-2"].seen.since == clock.now()
        pools.let_go["decode-0"].set()
        pools.let_go["room"].set()


@pytest.mark.redis
async def test_the_autoscaler_waits_for_nobody_who_has_no_room_beside_old_ones_and_status_says_who(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool in which somebody waits for room is not made smaller: a rollout without room held its size for good."""
    pools, clock, looking = Full(), ManualClock(), Looking()
    monkeypatch.setattr(
        "tests.unit.cluster.test_controller.CONFIG",
        CONFIG.model_copy(
            update={"rollouts": CONFIG.rollouts.model_copy(update={"max_unavailable": 0, "max_surge": 1})}
        ),
    )
    async with controlling(redis_url, pools, clock) as (controller, state, _):
        controller._autoscaler = looking  # type: ignore[assignment]
        await pools.until("decode-0 starts", "decode-1 starts")
        wide = replace(DesiredPool(Role.DECODE, 2), revision="v2")
        await state.write_desired(Desired({"decode": replace(wide, layout=replace(wide.layout, pp=2))}))
        await pools.until("decode-2 waits")
        assert await until_seen(controller, looking, WAITING) == {"decode-0", "decode-1"}
        clock.advance(700.0)
        async with asyncio.timeout(10):
            while not (observed := await state.observed()) or not observed.trouble:
                controller._changed.set()
        assert "decode: 2 to be replaced, decode-2 waits for 1 GPU beside them for 700 s" in observed.trouble
        pools.let_go["room"].set()
        await pools.until("decode-2 loads")
        assert await until_seen(controller, looking, "loads") == {"decode-0", "decode-1", "decode-2"}
        pools.let_go["decode-2"].set()
        await pools.until("decode-2 starts")
        assert "decode-2 is removed" not in pools.happened, "it has its time to start from when it found room"
        for name in ("decode-0", "decode-1"):
            pools.let_go[name].set()
