"""Workers whose nodes are about to go."""

from dataclasses import replace

from cluster.lifecycle import FOUND_SECONDS, Desired, DesiredPool, Drain, Phase, Remove, Start
from cluster.reconcile import LAST_SECONDS, reconcile
from headrace.values import Role
from tests.unit.cluster.reconciled import ONE, World, settled


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
