"""What is sized for is what comes and what waits, wherever it waits, and not what is served; nor what no size can meet."""

from dataclasses import replace

from cluster.scaling.traffic import Meter
from headrace.reports import ClassCounts, RouterReport
from tests.unit.cluster.scaling.world import World, rules, traffic


def test_case_55_the_rate_is_of_what_comes_though_most_of_it_waits() -> None:
    meter = Meter(60.0)
    for at in range(3):
        report = RouterReport(
            "a", "", 10.0 * at, arrivals=100 * at, ended=10 * at, classes={"": ClassCounts(met=10 * at)}
        )
        meter.look({"a": report}, 10.0 * at)
    assert meter.traffic(20.0).per_second == 10.0


def test_case_55_prompts_that_wait_on_workers_count_as_those_that_wait_in_routers() -> None:
    world = World(rules())
    quiet = world.turn(traffic(5.0))
    world.seen["prefill"] = {"waiting_tokens": 6_000_000}
    piled = world.turn(traffic(5.0))
    assert piled.pools["prefill"].replicas > quiet.pools["prefill"].replicas
    assert "worker-seconds of prompts wait" in piled.needs.reason


def test_case_55_requests_that_wait_for_rows_ask_for_decode_workers_once_the_oldest_waits_too_long() -> None:
    world = World(rules())
    quiet = world.turn(traffic(5.0)).needs.workers["decode"]
    assert world.turn(traffic(5.0, queued=60_000, oldest_queued_seconds=1.0)).needs.workers["decode"] == quiet
    late = world.turn(traffic(5.0, queued=60_000, oldest_queued_seconds=3.0)).needs
    assert late.workers["decode"] > quiet
    assert "60000 wait, the oldest too long already" in late.reason


def test_case_55_targets_that_no_size_can_meet_ask_for_no_more_than_that_nothing_piles_up() -> None:
    its = rules()
    hopeless = World(replace(its, target=replace(its.target, ttft_seconds=1e-3)))
    patient = World(replace(its, target=replace(its.target, ttft_seconds=1e5, tpot_seconds=1e5, attainment=0.5)))
    asked, enough = hopeless.turn(traffic(100.0)).needs, patient.turn(traffic(100.0)).needs
    assert asked.unreachable
    assert not enough.unreachable
    assert asked.workers == enough.workers
