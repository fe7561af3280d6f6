"""Pools whose workers are replaced: how many at a time, in how many rounds, with how many GPUs more."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lifecycle import FOUND_SECONDS, Desired, DesiredPool, Drain, Phase, Start
from cluster.reconcile import reconcile
from cluster.rollouts import Rollouts
from headrace.config_file import parse
from headrace.errors import ConfigError
from headrace.values import Role
from tests.unit.cluster.reconciled import TWO, World, settled


def rolled(world: World, desired: Desired, rollouts: Rollouts, *, budget: int | None = None) -> tuple[int, int, int]:
    """(rounds of a start or a drain, the fewest that served, the most that held GPUs)."""
    its = desired.pools["decode"]
    fewest = most = len(world.workers)
    for rounds in range(400):
        world.act(reconcile(desired, world.observed, world.now, budget, rollouts))
        phases = [worker.phase for worker in world.workers.values()]
        fewest, most = min(fewest, phases.count(Phase.READY)), max(most, len(phases))
        done = all((worker.layout, worker.revision) == (its.layout, its.revision) for worker in world.workers.values())
        if done and phases == [Phase.READY] * its.replicas:
            return rounds, fewest, most
        world.progress()
        world.now += FOUND_SECONDS
    raise AssertionError(f"never done: {world.workers}")


@given(
    number=st.integers(1, 6),
    max_unavailable=st.integers(0, 3),
    max_surge=st.integers(0, 3),
    desired=st.sampled_from([{"layout": TWO}, {"revision": "v2"}]),
)
def test_no_fewer_serve_and_no_more_hold_gpus_than_a_rollout_may(
    number: int, max_unavailable: int, max_surge: int, desired: dict[str, object]
) -> None:
    if not max_unavailable + max_surge:
        max_surge = 1
    world, before = settled(decode=number)
    world.now += FOUND_SECONDS
    after = Desired({"decode": replace(before.pools["decode"], **desired)})  # type: ignore[arg-type]
    rounds, fewest, most = rolled(world, after, Rollouts(max_unavailable, max_surge))
    assert fewest >= number - max_unavailable
    assert most <= number + max_surge
    assert rounds <= 4 * -(-number // (max_unavailable + max_surge)), "each of a drain, a removal and a start"


def test_a_rollout_of_eight_takes_a_part_of_the_time_with_two_beside() -> None:
    """One by one each waited for the drain of the one before, of up to ten minutes, and for its start."""
    found = {}
    for rollouts in (Rollouts(), Rollouts(0, 2), Rollouts(1, 2), Rollouts(0, 8)):
        world, before = settled(decode=8)
        world.now += FOUND_SECONDS
        promoted = Desired({"decode": replace(before.pools["decode"], revision="v2")})
        found[rollouts.max_unavailable, rollouts.max_surge] = rolled(world, promoted, rollouts)
    assert list(found.values()) == [(24, 7, 8), (11, 8, 10), (8, 7, 10), (2, 8, 16)], "rounds, served, GPUs"


def test_who_surges_fits_the_budget_beside_what_all_pools_are_to_hold() -> None:
    world, before = settled(decode=2, prefill=1)
    world.set_phase("prefill-0", Phase.DEAD)
    promoted = Desired({**before.pools, "decode": replace(before.pools["decode"], revision="v2")})
    for budget, number in ((3, 0), (4, 1), (None, 2)):
        actions = reconcile(promoted, world.observed, world.now, None, Rollouts(0, 2, budget))
        starts = [action.worker_id for action in actions if isinstance(action, Start)]
        assert starts == [f"decode-{index + 2}" for index in range(number)], "prefill's is still to come"
        assert not any(isinstance(action, Drain) for action in actions)


def test_a_new_kind_that_fails_to_start_costs_no_worker_where_none_may_be_missing() -> None:
    world, before = settled(decode=2)
    world.now += FOUND_SECONDS
    promoted = Desired({"decode": replace(before.pools["decode"], revision="bad")})
    starts = 0
    for _ in range(30):
        actions = reconcile(promoted, world.observed, world.now, None, Rollouts(0, 1))
        starts += sum(isinstance(action, Start) for action in actions)
        world.act(actions)
        for worker in list(world.workers.values()):
            if worker.phase is Phase.STARTING:
                world.set_phase(worker.worker_id, Phase.DEAD)
        world.now += 1.0
        assert [world.workers[f"decode-{index}"].phase for index in range(2)] == [Phase.READY] * 2
    assert 1 < starts < 10, "with the delays of a slot that fails"


def test_a_pool_that_shrinks_while_it_is_replaced_gives_up_old_workers_first() -> None:
    world, _ = settled(decode=4)
    world.workers["decode-3"] = replace(world.workers["decode-3"], revision="v2")
    smaller = Desired({"decode": DesiredPool(Role.DECODE, 3, revision="v2")})
    drained = [its.worker_id for its in reconcile(smaller, world.observed, world.now) if isinstance(its, Drain)]
    assert drained[0] == "decode-2"
    assert "decode-3" not in drained


def test_nobody_could_be_replaced() -> None:
    text = "{model: m, pools: {all: {role: unified}}, rollouts: {max_unavailable: 0}}"
    allowed = r"at least 1, or rollouts\.max_surge at least 1: nobody could be replaced, got 0"
    with pytest.raises(ConfigError, match=r"rollouts\.max_unavailable: must be " + allowed):
        parse(text)
