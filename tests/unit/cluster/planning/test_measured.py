"""The planner's cost model in the simulator, against two real H200 (docs/benchmarks/disagg-h200.jsonl): the same requests.

That bench places by least load, so the simulation does here. Its runs are short: 117 to 205 requests each.
"""

import json
import pathlib
from dataclasses import replace
from typing import Any

import pytest

from cluster.planning.check import card
from cluster.planning.gpus import BASIS, find
from cluster.planning.memory import Budget, budget
from cluster.planning.options import worker_of
from cluster.planning.shapes import Precision
from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.results import Summary, Tally, summarise
from headrace import traces
from headrace.goodput import Slo, percentiles
from headrace.values import ParallelLayout

ROOT = pathlib.Path(__file__).parents[4]
RUNS = [json.loads(line) for line in (ROOT / "docs" / "benchmarks" / "disagg-h200.jsonl").read_text().splitlines()]
SECONDS, WARM_UP = 8.0, 1.6


def run_of(deployment: str, rate: float) -> dict[str, Any]:
    return next(run for run in RUNS if (run["deployment"], run["rate"]) == (deployment, rate))


def measured(run: dict[str, Any], slo: Slo) -> tuple[dict[str, float], dict[str, float], float]:
    answers = run["answers"]
    kept = sum(slo.met(ttft, tpot) for ttft, tpot, _ in answers) / len(answers)
    return (
        percentiles([ttft for ttft, _, _ in answers]),
        percentiles([tpot for _, tpot, _ in answers if tpot is not None]),
        kept,
    )


def simulated(run: dict[str, Any], slo: Slo) -> Summary:
    """The first seconds of the trace at the run's rate, as the bench plays them."""
    rows = traces.read(ROOT / "examples" / "azure_sample.csv")
    count = round(run["rate"] * SECONDS)
    scale = (count - 1) / run["rate"] / rows[count - 1].seconds
    found = budget(BASIS, find("h200", 1.0), ParallelLayout(), Precision(), context_tokens=8192)
    assert isinstance(found, Budget)
    worker = worker_of(
        BASIS, find("h200", 1.0), found, Precision(), num_links=1, max_num_seqs=256, max_step_tokens=run["chunk"]
    )
    roles = {"prefill": 1, "decode": 1} if run["deployment"] == "1P1D" else {"unified": 2}
    fleet = Fleet(card(worker, "h200"), max_step_tokens=run["chunk"], **roles)
    tally = Tally(fleet.roles)
    Simulation(fleet, "least-load", tally).run([replace(row, seconds=row.seconds * scale) for row in rows[:count]])
    tally.served = [one for one in tally.served if one.arrived_at >= WARM_UP]
    return summarise("least-load", tally, slo)


@pytest.mark.parametrize("rate", [16.0, 22.0, 28.0])
def test_separate_pools_are_simulated_as_they_were_measured(rate: float) -> None:
    run, slo = run_of("1P1D", rate), Slo(1.0, 0.009)
    ttft, tpot, kept = measured(run, slo)
    found = simulated(run, slo)
    for percentile in ("p50", "p90", "p99"):
        assert found.tpot_seconds[percentile] == pytest.approx(tpot[percentile], rel=0.05)
    for percentile in ("p90", "p99"):
        assert found.ttft_seconds[percentile] == pytest.approx(ttft[percentile], rel=0.16)
    assert found.attainment == pytest.approx(kept, abs=0.03)


@pytest.mark.parametrize("rate", [16.0, 28.0])
def test_one_pool_is_simulated_worse_than_it_was_measured_and_never_better(rate: float) -> None:
    """Steps of prompts and decode tokens overlap better than a sum of their terms: the median is within a tenth, the tail
    is up to a quarter too long."""
    run, slo = run_of("2U", rate), Slo(1.0, 0.012)
    ttft, tpot, kept = measured(run, slo)
    found = simulated(run, slo)
    assert found.tpot_seconds["p50"] == pytest.approx(tpot["p50"], rel=0.1)
    assert tpot["p90"] < found.tpot_seconds["p90"] < 1.25 * tpot["p90"]
    assert found.ttft_seconds["p90"] > ttft["p90"]
    assert kept - 0.1 < found.attainment <= kept
