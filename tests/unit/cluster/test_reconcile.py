"""Pools that grow, shrink, flip, are replaced and fail, brought to what is desired."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lifecycle import (
    MAX_DELAY_SECONDS,
    STEADY_SECONDS,
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
)
from cluster.reconcile import START_SECONDS, headless, reconcile
from cluster.rollouts import Rollouts
from headrace.values import ParallelLayout, Role
from tests.unit.cluster.reconciled import ONE, TWO, World, settled

ROLLOUTS = [Rollouts(), Rollouts(0, 1), Rollouts(1, 2), Rollouts(3, 0)]


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


@given(world=worlds(notices=True), desired=desired_states, rollouts=st.sampled_from(ROLLOUTS))
def test_every_world_settles_at_what_is_desired(world: World, desired: Desired, rollouts: Rollouts) -> None:
    world.rollouts = rollouts
    world.settle(desired)
    for name, pool in desired.pools.items():
        workers = [worker for worker in world.workers.values() if worker.pool == name]
        assert len(workers) == pool.replicas
        assert all(worker.layout == pool.layout for worker in workers)
        roles = [pool.role.other] * pool.lent + [pool.role] * (pool.replicas - pool.lent)
        assert sorted(worker.role for worker in workers) == sorted(roles)
    assert all(worker.pool in desired.pools for worker in world.workers.values())
    assert all(worker.leaves_at is None for worker in world.workers.values())
    assert reconcile(desired, world.observed, world.now, None, rollouts) == []


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


def test_case_65_without_rays_head_roles_change_and_a_node_that_goes_is_left_but_nobody_is_missed() -> None:
    """Nobody could start in the place of who is taken away."""
    flip = SetRole("all-0", 1, Role.DECODE)
    drains = [Drain("all-1", 1, "one wanted in its pool"), Drain("all-2", 1, "its node is taken away")]
    others = [Remove("all-3", 1, "dead"), Start("all", 4, 1, Role.DECODE, ONE)]
    workers = [
        ObservedWorker("all", index, 1, Role.DECODE, ONE, Phase.READY, 0.0, leaves_at=60.0 if index == 2 else None)
        for index in range(4)
    ]
    assert headless([flip, *drains, *others], workers) == [flip, drains[1]]
