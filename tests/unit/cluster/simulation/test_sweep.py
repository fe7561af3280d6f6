"""Capacity is where it says, and the verdict compares what it says."""

import json

from cluster.simulation import compare, sweep
from headrace import generators
from headrace.goodput import Slo
from headrace.traces import TraceRow
from tests.unit.cluster.simulation.small_fleet import fleet

SLO = Slo(ttft_seconds=6.0, tpot_seconds=1.0)


def stretch(tokens: int) -> list[TraceRow]:
    return [TraceRow(n, float(n), tokens + n * 37 % 128, 1 + n * 7 % 20) for n in range(40)]


def met(rows: list[TraceRow], per_second: float) -> float:
    traffic = generators.scaled(rows, per_second / generators.rate(rows))
    return compare.run(fleet(), "least-load", traffic, slo=SLO)[0].attainment


def test_capacity_is_least_loads_over_all_stretches_and_not_the_first_ones() -> None:
    light, heavy = stretch(100), stretch(700)
    found = sweep.capacity(fleet(), [light, light, heavy], SLO, 1.0)
    assert (2 * met(light, found) + met(heavy, found)) / 3 >= 0.9
    beyond = found * (1 + sweep.CAPACITY_STEP)
    assert (2 * met(light, beyond) + met(heavy, beyond)) / 3 < 0.9
    assert sweep.capacity(fleet(), [heavy], SLO, 1.0) < found < sweep.capacity(fleet(), [light], SLO, 1.0)


def test_a_sweep_says_what_it_found_as_it_goes_and_its_verdict_is_json() -> None:
    heard: list[tuple[str, int]] = []
    policies = ("ours", "least-load", "random")
    rows = sweep.sweep(
        fleet(),
        policies,
        (0.5, 1.0),
        (1, 2),
        lambda seed: stretch(100 * seed),
        SLO,
        1.0,
        lambda line, found: heard.append((line, len(found))),
    )
    assert [number for _, number in heard] == list(range(1, 13))
    verdict = sweep.verdict(rows)
    best = min(verdict["per_rate"][0.5][policy]["ttft_p90_seconds"] for policy in policies[1:])
    assert verdict["ttft_p90_vs_best_other"][0.5] == verdict["per_rate"][0.5]["ours"]["ttft_p90_seconds"] / best
    assert json.loads(json.dumps(verdict))["max_goodput_ratio"] == verdict["max_goodput_ratio"]


def test_a_sweep_that_was_ended_goes_on_where_it_was_and_compares_whole_stretches_alone() -> None:
    policies: tuple[str, ...] = ("ours", "least-load")
    heard: list[str] = []

    def swept(before: tuple[dict[str, object], ...] = ()) -> list[dict[str, object]]:
        return sweep.sweep(
            fleet(),
            policies,
            (0.5, 1.0),
            (1, 2),
            lambda seed: stretch(100 * seed),
            SLO,
            1.0,
            lambda line, found: heard.append(line),
            before,
        )

    once = swept()
    assert [(row["seed"], row["fraction"]) for row in once[::2]] == [(1, 0.5), (1, 1.0), (2, 0.5), (2, 1.0)]
    heard.clear()
    assert swept(tuple(once[:5])) == once
    assert len(heard) == 3
    assert sweep.whole(once[:5], policies) == once[:4]
