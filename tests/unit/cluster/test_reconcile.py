"""reconcile() in a small world that carries actions out, lets workers become ready, finish draining and die at will."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.reconcile import (
    FOUND_SECONDS,
    LAST_SECONDS,
    MAX_DELAY_SECONDS,
    START_SECONDS,
    STEADY_SECONDS,
    Action,
    Desired,
    DesiredPool,
    Drain,
    History,
    Observed,
    ObservedWorker,
    Phase,
    Remove,
    SetRole,
    Start,
    reconcile,
)
from headrace.values import ParallelLayout, Role

ONE = ParallelLayout()
TWO = ParallelLayout(tp=2)


@dataclass
class World:
    """Workers by id, as a controller would keep them; time moves only when told."""

    now: float = 0.0
    workers: dict[str, ObservedWorker] = field(default_factory=dict)
    history: dict[str, History] = field(default_factory=dict)

    @property
    def observed(self) -> Observed:
        return Observed(list(self.workers.values()), dict(self.history))

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start():
                    assert action.worker_id not in self.workers, "two workers in one slot"
                    past = self.history.get(action.worker_id, History())
                    assert action.generation > past.generation, "a generation came back"
                    assert self.now >= past.not_before, "started within its delay"
                    self.history[action.worker_id] = past.started(action.generation)
                    self.workers[action.worker_id] = ObservedWorker(
                        action.pool,
                        action.index,
                        action.generation,
                        action.role,
                        action.layout,
                        Phase.STARTING,
                        self.now,
                        revision=action.revision,
                    )
                case SetRole():
                    self.workers[action.worker_id] = replace(self.workers[action.worker_id], role=action.role)
                case Drain():
                    assert self.workers[action.worker_id].phase is Phase.READY
                    self.set_phase(action.worker_id, Phase.DRAINING)
                case Remove():
                    worker = self.workers.pop(action.worker_id)
                    assert worker.generation == action.generation
                    assert worker.phase not in (Phase.READY, Phase.DRAINING), "removed a worker that serves"
                case _:
                    assert_never(action)

    def set_phase(self, worker_id: str, phase: Phase) -> None:
        worker = self.workers[worker_id]
        if phase is Phase.DEAD:
            served = self.now - worker.since if worker.phase is Phase.READY else 0.0
            self.history[worker_id] = self.history[worker_id].failed(self.now, served, "died")
        self.workers[worker_id] = replace(worker, phase=phase, since=self.now)

    def progress(self) -> None:
        """What starts becomes ready, what drains is drained."""
        for worker in list(self.workers.values()):
            if worker.phase is Phase.STARTING:
                self.set_phase(worker.worker_id, Phase.READY)
            elif worker.phase is Phase.DRAINING:
                self.set_phase(worker.worker_id, Phase.DRAINED)

    def settle(self, desired: Desired) -> int:
        """Ticks until nothing is left to do, at most 64."""
        for tick in range(64):
            actions = reconcile(desired, self.observed, self.now)
            staying = all(its.phase is Phase.READY and its.leaves_at is None for its in self.workers.values())
            if not actions and staying:
                waiting = [past.not_before for past in self.history.values() if past.not_before > self.now]
                if not waiting:
                    return tick
            self.act(actions)
            self.progress()
            self.now += 1.0
        raise AssertionError(f"never settled: {self.workers}")


def pools(draw: st.DrawFn) -> dict[str, DesiredPool]:
    names = draw(st.sets(st.sampled_from(["prefill", "decode", "spare"])))
    layouts = st.sampled_from([ONE, TWO, ParallelLayout(2, 2)])
    found = {}
    for name in sorted(names):
        replicas = draw(st.integers(0, 4))
        lent = draw(st.integers(0, replicas))
        found[name] = DesiredPool(draw(st.sampled_from(Role)), replicas, draw(layouts), lent)
    return found


desired_states = st.composite(lambda draw: Desired(pools(draw)))()


@st.composite
def worlds(draw: st.DrawFn, *, notices: bool = False) -> World:
    """A world that was brought to some desired state, after which some workers died, drained or restarted, and with
    `notices` the nodes of some are about to go."""
    world = World()
    world.settle(draw(desired_states))
    for worker_id in sorted(world.workers):
        phase = draw(st.sampled_from([Phase.READY, Phase.READY, Phase.DEAD, Phase.DRAINING, Phase.STARTING]))
        if phase is not Phase.READY:
            world.set_phase(worker_id, phase)
        if notices and draw(st.integers(0, 3)) == 0:
            world.workers[worker_id] = replace(
                world.workers[worker_id], leaves_at=world.now + draw(st.integers(0, 60)), reason="its node goes"
            )
    return world


@given(world=worlds(notices=True), desired=desired_states)
def test_every_world_settles_at_what_is_desired(world: World, desired: Desired) -> None:
    world.settle(desired)
    for name, pool in desired.pools.items():
        workers = [worker for worker in world.workers.values() if worker.pool == name]
        assert len(workers) == pool.replicas
        assert all(worker.layout == pool.layout for worker in workers)
        roles = [pool.role.other] * pool.lent + [pool.role] * (pool.replicas - pool.lent)
        assert sorted(worker.role for worker in workers) == sorted(roles)
    assert all(worker.pool in desired.pools for worker in world.workers.values())
    assert all(worker.leaves_at is None for worker in world.workers.values())
    assert reconcile(desired, world.observed, world.now) == []


@given(world=worlds(), desired=desired_states)
def test_nothing_is_taken_away_on_missing_data(world: World, desired: Desired) -> None:
    before = {worker.worker_id for worker in world.workers.values() if worker.phase in (Phase.READY, Phase.STARTING)}
    world.settle(Desired(desired.pools, trusted=False))
    assert before <= world.workers.keys()


@given(world=worlds(), desired=desired_states)
def test_a_pool_that_shrinks_or_keeps_its_size_never_serves_with_fewer_than_it_should(
    world: World, desired: Desired
) -> None:
    for name, pool in desired.pools.items():
        ready = [worker for worker in world.workers.values() if worker.pool == name and worker.phase is Phase.READY]
        drained = [
            action
            for action in reconcile(desired, world.observed, world.now)
            if isinstance(action, Drain) and world.workers[action.worker_id].pool == name
        ]
        reshaping = any(worker.layout != pool.layout for worker in ready)
        assert len(ready) - len(drained) >= min(len(ready), pool.replicas) - (1 if reshaping else 0)


def settled(**replicas: int) -> tuple[World, Desired]:
    desired = Desired({name: DesiredPool(Role(name), count) for name, count in replicas.items()})
    world = World()
    world.settle(desired)
    return world, desired


def test_a_dead_worker_is_removed_and_its_slot_starts_with_the_next_generation() -> None:
    world, desired = settled(prefill=1, decode=1)
    world.set_phase("decode-0", Phase.DEAD)
    assert reconcile(desired, world.observed, world.now) == [Remove("decode-0", 1, "dead")]
    world.act(reconcile(desired, world.observed, world.now))
    assert reconcile(desired, world.observed, world.now) == []
    world.now += 0.5
    assert reconcile(desired, world.observed, world.now) == [Start("decode", 0, 2, Role.DECODE, ONE)]


def test_the_delay_doubles_up_to_its_limit_and_is_forgotten_after_steady_service() -> None:
    history = History(generation=1)
    delays = []
    for _ in range(8):
        history = history.failed(100.0, 1.0, "died")
        delays.append(history.not_before - 100.0)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_DELAY_SECONDS, MAX_DELAY_SECONDS]
    assert history.failed(200.0, STEADY_SECONDS, "died").failures == 1


def test_failures_are_forgotten_with_a_worker_that_served_steadily_and_was_drained() -> None:
    past = History(4, 3, 100.0, "no image")
    assert past.served(STEADY_SECONDS - 1) == past
    assert past.served(STEADY_SECONDS).failures == 0


def test_a_smaller_pool_drains_its_highest_worker_and_removes_it_once_drained() -> None:
    world, _ = settled(decode=3)
    desired = Desired({"decode": DesiredPool(Role.DECODE, 2)})
    assert reconcile(desired, world.observed, world.now) == [Drain("decode-2", 1, "2 wanted in its pool")]
    world.settle(desired)
    assert sorted(world.workers) == ["decode-0", "decode-1"]


def test_a_worker_that_was_never_ready_goes_before_one_that_serves() -> None:
    world, _ = settled(decode=2)
    world.set_phase("decode-0", Phase.STARTING)
    desired = Desired({"decode": DesiredPool(Role.DECODE, 1)})
    assert reconcile(desired, world.observed, world.now) == [Remove("decode-0", 1, "1 wanted in its pool")]


def test_a_role_flips_in_place() -> None:
    world, _ = settled(decode=1)
    flipped = Desired({"decode": DesiredPool(Role.PREFILL, 1)})
    assert reconcile(flipped, world.observed, world.now) == [SetRole("decode-0", 1, Role.PREFILL)]


def test_the_highest_workers_are_lent_and_the_lowest_of_them_come_back() -> None:
    world, _ = settled(decode=4)
    lent = Desired({"decode": DesiredPool(Role.DECODE, 4, lent=2)})
    flips = [SetRole(f"decode-{index}", 1, Role.PREFILL) for index in (2, 3)]
    assert reconcile(lent, world.observed, world.now) == flips
    world.settle(lent)
    back = Desired({"decode": DesiredPool(Role.DECODE, 4, lent=1)})
    assert reconcile(back, world.observed, world.now) == [SetRole("decode-2", 1, Role.DECODE)]


@pytest.mark.parametrize("dead", ["decode-0", "decode-1"])
def test_the_last_worker_of_a_role_is_not_lent_while_another_starts_again(dead: str) -> None:
    """The lent one died: the other was lent in its place, and nobody decoded for as long as a start takes."""
    world = World()
    desired = Desired({"decode": DesiredPool(Role.DECODE, 2, lent=1), "prefill": DesiredPool(Role.PREFILL, 1)})
    world.settle(desired)
    assert world.workers["decode-1"].role is Role.PREFILL
    world.set_phase(dead, Phase.DEAD)
    world.act(reconcile(desired, world.observed, world.now))
    left = world.workers["decode-0" if dead == "decode-1" else "decode-1"]
    assert left.role is Role.DECODE
    world.settle(desired)
    assert sorted(worker.role for worker in world.workers.values()) == ["decode", "prefill", "prefill"]


def test_a_pool_that_shrinks_beside_lending_flips_nobody_that_it_need_not() -> None:
    world, _ = settled(decode=5)
    world.settle(Desired({"decode": DesiredPool(Role.DECODE, 5, lent=2)}))
    smaller = Desired({"decode": DesiredPool(Role.DECODE, 2, lent=1)})
    actions = reconcile(smaller, world.observed, world.now)
    assert sorted(action.worker_id for action in actions) == ["decode-1", "decode-2", "decode-4"]
    assert all(isinstance(action, Drain) for action in actions), "decode-0 decodes and decode-3 prefills already"


def test_a_pool_that_is_to_grow_again_waits_for_nobody_who_drains_unless_the_budget_is_held() -> None:
    """A drain takes as long as the longest request: the slot that it holds kept a worker away for ten minutes."""
    world, before = settled(decode=2)
    world.act(reconcile(Desired({"decode": DesiredPool(Role.DECODE, 1)}), world.observed, world.now))
    assert world.workers["decode-1"].phase is Phase.DRAINING
    assert reconcile(before, world.observed, world.now, budget_gpus=2) == []
    for budget in (3, None):
        (start,) = reconcile(before, world.observed, world.now, budget)
        assert isinstance(start, Start)
        assert start.worker_id == "decode-2"


def test_another_layout_replaces_one_worker_at_a_time() -> None:
    world, _ = settled(decode=2)
    desired = Desired({"decode": DesiredPool(Role.DECODE, 2, TWO)})
    world.act(reconcile(desired, world.observed, world.now))
    assert [worker.phase for worker in world.workers.values()] == [Phase.READY, Phase.DRAINING]
    assert reconcile(desired, world.observed, world.now) == []
    world.settle(desired)
    assert {(worker.generation, worker.layout) for worker in world.workers.values()} == {(2, TWO)}


def test_other_settings_replace_one_worker_at_a_time_too_and_go_back_the_same_way() -> None:
    world, before = settled(decode=2)
    promoted = Desired({"decode": DesiredPool(Role.DECODE, 2, revision="v2")})
    world.act(reconcile(promoted, world.observed, world.now))
    assert [worker.phase for worker in world.workers.values()] == [Phase.READY, Phase.DRAINING]
    world.settle(promoted)
    assert {(worker.generation, worker.revision) for worker in world.workers.values()} == {(2, "v2")}
    world.settle(before)
    assert {(worker.generation, worker.revision) for worker in world.workers.values()} == {(3, "stable")}


def test_a_worker_that_does_not_become_ready_is_given_up_with_its_reason() -> None:
    world, desired = settled(decode=1)
    world.workers["decode-0"] = replace(
        world.workers["decode-0"], phase=Phase.STARTING, since=world.now, reason="waits for 1 × GPU"
    )
    world.now += START_SECONDS + 1
    (removal,) = reconcile(desired, world.observed, world.now)
    assert removal == Remove("decode-0", 1, "not ready 600 s after its start: waits for 1 × GPU", failed=True)


def test_the_widest_worker_starts_first_so_that_narrow_ones_do_not_break_up_its_node() -> None:
    pools = {"decode": DesiredPool(Role.DECODE, 1), "prefill": DesiredPool(Role.PREFILL, 1, TWO)}
    starts = reconcile(Desired(pools), Observed([]), 0.0)
    assert [start.worker_id for start in starts if isinstance(start, Start)] == ["prefill-0", "decode-0"]


def leaving(world: World, worker_id: str, seconds: float) -> None:
    worker = world.workers[worker_id]
    world.workers[worker_id] = replace(worker, leaves_at=world.now + seconds, reason="its node goes")


def test_a_worker_whose_node_goes_serves_its_role_until_another_does() -> None:
    world, desired = settled(decode=1)
    leaving(world, "decode-0", 120.0)
    assert reconcile(desired, world.observed, world.now) == [Start("decode", 1, 1, Role.DECODE, ONE)]
    world.act(reconcile(desired, world.observed, world.now))
    assert reconcile(desired, world.observed, world.now) == [], "the other one starts"
    world.set_phase("decode-1", Phase.READY)
    assert reconcile(desired, world.observed, world.now) == [], "no router has found it yet"
    world.now += FOUND_SECONDS
    assert reconcile(desired, world.observed, world.now) == [Drain("decode-0", 1, "its node goes")]


def test_a_canary_is_nobody_in_the_place_of_a_worker_whose_node_goes() -> None:
    world = World()
    desired = Desired(
        {"decode": DesiredPool(Role.DECODE, 1), "next": DesiredPool(Role.DECODE, 1, revision="v2")},
    )
    world.settle(desired)
    world.now += FOUND_SECONDS
    leaving(world, "decode-0", 120.0)
    assert reconcile(desired, world.observed, world.now) == [Start("decode", 1, 1, Role.DECODE, ONE)]
    leaving(world, "next-0", 120.0)
    assert reconcile(Desired({"decode": desired.pools["decode"]}), world.observed, world.now)[0] == Drain(
        "next-0", 1, "its node goes"
    ), "which is not wanted any more"


def test_a_worker_whose_node_goes_is_drained_in_time_though_nobody_serves_in_its_place() -> None:
    world, desired = settled(decode=1)
    leaving(world, "decode-0", 120.0)
    world.act(reconcile(desired, world.observed, world.now))
    world.now += 120.0 - LAST_SECONDS
    assert reconcile(desired, world.observed, world.now) == [Drain("decode-0", 1, "its node goes")]


def test_what_starts_in_the_place_of_one_whose_node_goes_waits_for_its_gpus_at_the_budget() -> None:
    world, desired = settled(decode=2)
    world.now += FOUND_SECONDS
    leaving(world, "decode-1", 120.0)
    drain = Drain("decode-1", 1, "its node goes")
    assert reconcile(desired, world.observed, world.now, budget_gpus=2) == [drain]
    assert reconcile(desired, world.observed, world.now, budget_gpus=3) == [
        drain,
        Start("decode", 2, 1, Role.DECODE, ONE),
    ]


def test_case_a_node_that_takes_a_pool_which_is_all_of_the_budget_gives_one_back_at_once() -> None:
    """Nothing could start beside them, so nobody ever served in their places: all were drained in the last half minute, and
    nobody served for as long as a worker starts."""
    world, desired = settled(decode=3)
    world.now += FOUND_SECONDS
    for worker in list(world.workers):
        leaving(world, worker, 600.0)
    drain = Drain("decode-0", 1, "its node goes")
    assert reconcile(desired, world.observed, world.now, budget_gpus=3) == [drain]
    assert drain not in reconcile(desired, world.observed, world.now, budget_gpus=4), "one starts beside them"
    smaller = Desired({"decode": DesiredPool(Role.DECODE, 1)})
    assert reconcile(smaller, world.observed, world.now, budget_gpus=3) == [drain], "one serves on in any case"
    world.act([drain])
    assert reconcile(desired, world.observed, world.now, budget_gpus=3) == [], "two serve, and its GPU is not free yet"
    del world.workers["decode-0"]
    (start,) = reconcile(desired, world.observed, world.now, budget_gpus=3)
    assert isinstance(start, Start)
    del world.workers["decode-1"]
    assert Drain("decode-2", 1, "its node goes") not in reconcile(desired, world.observed, world.now, budget_gpus=1), (
        "the last one of them serves its role alone"
    )


def test_a_worker_that_starts_on_a_node_that_goes_starts_elsewhere_and_has_not_failed() -> None:
    world, desired = settled(decode=1)
    world.set_phase("decode-0", Phase.STARTING)
    leaving(world, "decode-0", 120.0)
    removal, start = reconcile(replace(desired, trusted=False), world.observed, world.now)
    assert removal == Remove("decode-0", 1, "its node goes")
    assert start == Start("decode", 1, 1, Role.DECODE, ONE)


def test_case_a_node_that_takes_most_of_a_pool_gives_its_workers_back_one_at_a_time() -> None:
    """All of them drained at once as soon as one elsewhere served their role, minutes before others could have started."""
    world, desired = settled(decode=4)
    world.now += FOUND_SECONDS
    for index in (1, 2, 3):
        leaving(world, f"decode-{index}", 600.0)
    world.act(reconcile(desired, world.observed, world.now))
    serving = [worker for worker in world.workers.values() if worker.phase is Phase.READY]
    assert len(serving) == 3, "as if one had died"
    world.set_phase("decode-4", Phase.READY)
    world.now += FOUND_SECONDS
    drains = reconcile(desired, world.observed, world.now)
    assert [drain.worker_id for drain in drains if isinstance(drain, Drain)] == ["decode-2"]
    world.now += 600.0
    drains = reconcile(desired, world.observed, world.now)
    assert [drain.worker_id for drain in drains if isinstance(drain, Drain)] == ["decode-2", "decode-3"], "time is over"
