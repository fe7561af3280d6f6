"""Chance: what a run of a simulation knows of itself, and what several do."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from cluster.planning import check
from cluster.planning.chance import deviation, of_all
from cluster.planning.load import Pools
from tests.unit.cluster.planning.small import made


def mean(values: Any) -> float:
    return sum(values) / len(values)


def test_of_values_that_know_nothing_of_each_other_it_is_the_textbooks() -> None:
    random = Random(1)
    values = [float(random.random() < 0.9) for _ in range(4000)]
    assert deviation(values, mean, 1) == pytest.approx((0.09 / 4000) ** 0.5, rel=0.05)
    assert deviation(values, mean, 40) == pytest.approx((0.09 / 4000) ** 0.5, rel=0.35)


def test_of_neighbours_that_are_late_together_it_is_more() -> None:
    """Twenty are late, or none of twenty: there are so many fewer to count."""
    random = Random(2)
    values = [value for _ in range(200) for value in [float(random.random() < 0.9)] * 20]
    textbook = (0.09 / 4000) ** 0.5
    assert deviation(values, mean, 200) > 3 * textbook


def test_too_few_to_tell_are_no_error() -> None:
    assert deviation([], mean, 8) == 0.0
    assert deviation([1.0], mean, 8) == 0.0
    assert deviation([1.0, 0.0], mean, 8) > 0.0


def test_of_several_runs_it_is_what_they_know_or_how_far_they_are_apart() -> None:
    assert of_all([0.9, 0.9], [0.02, 0.02]) == pytest.approx(0.02 / 2**0.5)
    assert of_all([0.95, 0.86, 0.89], [0.01] * 3) == pytest.approx(0.0265, abs=1e-3)


def test_case_what_held_by_the_luck_of_one_draw_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's six workers kept 95.1 % of one draw, said to be right to 0.6, and 86 % of the next: the plan was a
    worker short."""
    found = made(simulate={"requests": 40}, serve="aggregated", api=None)
    option, target = found.chosen.option, found.asked.slo.target
    kept = iter([0.951, 0.864, 0.990])

    def run(*given: Any) -> check._Run:
        return check._Run([], next(kept), 0.011, 0.2, 0.01, None)

    monkeypatch.setattr(check, "_run", run)
    arguments = (option.decode, option.decode, found.traffic, 6.0, target)
    more: dict[str, Any] = {"num_requests": 40, "max_context_tokens": 4096, "stay_seconds": 1.0}
    near = check.simulate(Pools(unified=6), *arguments, **more)
    clear = check.simulate(Pools(unified=7), *arguments, **more)
    assert (near.num_draws, clear.num_draws) == (2, 1)
    assert near.num_requests == 2 * clear.num_requests
    of_a_trace = replace(found.traffic, redrawn=())
    kept = iter([0.951])
    assert check.simulate(Pools(unified=6), *arguments[:2], of_a_trace, *arguments[3:], **more).num_draws == 1
