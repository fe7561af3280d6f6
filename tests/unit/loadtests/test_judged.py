"""From kept runs to what pools are worth at an SLO."""

import json
from dataclasses import asdict

import pytest

from headrace.goodput import Slo
from loadtests.judged import Point, by_tpot, crossover_ms, verdicts


def point(deployment: str, tpots_ms: list[float], *, chunk: int = 512, rate: float = 4.0, failed: int = 0) -> Point:
    answers = tuple((0.2, tpot / 1e3, tpot / 500) for tpot in tpots_ms)
    return Point("azure", deployment, chunk, 2, rate, 2.0, 1, answers + (None,) * failed)


def test_what_failed_or_missed_a_target_is_no_goodput() -> None:
    run = point("2U", [8.0, 9.0, 30.0, 9.0], failed=3)
    assert run.goodput_per_gpu(Slo(1.0, 0.010)) == pytest.approx(3 / 2.0 / 2)
    assert run.goodput_per_gpu(Slo(0.1, 0.010)) == 0.0
    assert run.goodput_per_gpu(Slo(1.0, 0.050), 0.017) == pytest.approx(1 / 2.0 / 2)


def test_each_side_counts_with_its_best_run() -> None:
    points = [
        point("2U", [9.0] * 2),
        point("2U", [9.0] * 3, chunk=256),
        point("2U", [30.0] * 9),
        point("1P1D", [9.0] * 6),
    ]
    tight = next(verdict for verdict in verdicts(points) if verdict.slo == "tight")
    assert (tight.aggregated, tight.split, tight.ratio) == (0.75, 1.5, 2.0)
    assert "256" in tight.aggregated_by


def test_the_crossover_is_the_last_target_at_which_two_pools_are_clearly_better() -> None:
    points = [point("2U", [12.5] * 8), point("1P1D", [8.5] * 6)]
    assert crossover_ms(by_tpot(points, "azure", 1.0)) == 12
    assert crossover_ms(by_tpot([point("2U", [8.0] * 6), point("1P1D", [8.0] * 6)], "azure", 1.0)) is None


def test_a_run_is_what_it_was_when_it_is_read_again() -> None:
    run = point("1P1D", [9.0], failed=1)
    assert Point.from_json(json.loads(json.dumps(asdict(run)))) == run
