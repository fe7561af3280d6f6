"""Pools that grow until a simulation keeps the SLO: when that ends, and how much of a cluster is run."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.planning import caveats, check, settle
from cluster.planning.check import Simulated
from cluster.planning.load import Pools
from cluster.planning.plan import Plan
from cluster.planning.settle import MOST_ROUNDS, Settled
from tests.unit.cluster.planning.small import made, with_traffic


@pytest.fixture(scope="module")
def small() -> Plan:
    return made(simulate={"requests": 40}, serve="disaggregated", api=None)


class Kept:
    """Simulations by what they show from so many decode workers on."""

    def __init__(self, plan: Plan, *kept: tuple[int, float]) -> None:
        self._like = plan.chosen.rounds[-1].simulated
        self._kept = kept
        self.ran: list[int] = []

    def __call__(self, pools: Pools, *_: Any, **__: Any) -> Simulated:
        self.ran.append(pools.decode)
        kept = next(share for number, share in reversed(self._kept) if pools.decode >= number)
        its = {"ttft_attainment": 1.0, "tpot_attainment": kept, "deviation": 0.01}
        return replace(self._like, pools=pools, attainment=kept, **its)


def settled(plan: Plan, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Settled:
    monkeypatch.setattr(settle, "simulate", kept)
    target = plan.asked.slo.target
    option = plan.option.with_needed(Pools(1, 4), 0)
    return settle.settle(plan.asked, option, plan.traffic, plan.load, target, 4096, lambda line: None)


def test_case_at_the_edge_of_a_card_where_no_number_of_workers_helps_three_runs_tell(
    small: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rounds showed the same to the last digit, and the last of them was 96 workers."""
    kept = Kept(small, (0, 0.90))
    found = settled(small, kept, monkeypatch)
    assert not found.holds
    assert kept.ran == [4, 5, 15], "twice the same, and the most that six rounds more come to"
    assert [one.pools.decode for one in found.rounds] == [4, 5]
    assert found.option.needed.decode == 5
    said = caveats.warnings(small.asked, found, small.traffic, small.prediction)[0]
    assert said == (
        "the SLO did not hold in simulation after 2 rounds: 90.0%, and 95% are asked for; many more workers are no help: "
        "7 + 15 come to 90.0%"
    )


def test_rounds_that_change_nothing_are_no_end_where_more_workers_do_hold(
    small: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(small, (0, 0.90), (8, 0.96))
    found = settled(small, kept, monkeypatch)
    assert found.holds
    assert kept.ran == [4, 5, 15, 6, 7, 8], "looked ahead once"
    assert found.option.needed.decode == found.rounds[-1].pools.decode == 8
    assert found.no_better is None


def test_largest_pools_that_are_short_by_chance_are_no_end(small: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 requests with cached prefixes 10 + 7 workers kept 81.0 %, 5 + 1 of them 81.7, and 81 were asked for."""
    kept = Kept(small, (0, 0.90), (6, 0.952), (12, 0.945))
    found = settled(small, kept, monkeypatch)
    assert found.holds
    assert kept.ran == [4, 5, 15, 6]


def test_pools_that_get_better_grow_as_often_as_they_may(small: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(small, *((number, 0.70 + 0.02 * number) for number in range(4, 30)))
    assert settled(small, kept, monkeypatch).holds is False
    assert kept.ran == list(range(4, 4 + MOST_ROUNDS))


@pytest.mark.parametrize("pools", [Pools(unified=9413), Pools(6000, 3000)])
def test_case_ten_thousand_workers_are_not_run_for_a_few_requests(pools: Pools) -> None:
    """At a card's edge 9,413 workers for three requests a second took 23 GB."""
    small, rate, number = check.part(pools, 3.0, 150, 450, stay_seconds=1.0)
    assert small.num_workers <= check.MOST_RUN_WORKERS * check.PROPORTION
    assert rate / small.num_workers == pytest.approx(3.0 / pools.num_workers, rel=check.PROPORTION - 1)
    assert number == 150


def test_ways_of_more_workers_than_are_counted_to_are_said() -> None:
    """A wider layout was taken, and nothing said that narrower ones had not been compared."""
    quick: dict[str, Any] = {"simulate": {"requests": 0}, "api": None}
    (said,) = [line for line in made(**with_traffic(requests_per_second=2e6), **quick).warnings if "65,536" in line]
    assert "wider ones may have been taken though these are cheaper: aggregated on h200, tp1·pp1" in said
    assert said.endswith(" more")
    only = made(**with_traffic(requests_per_second=1e6), **quick, serve="disaggregated")
    assert not any("65,536" in line for line in only.warnings), "what was not asked for was not left out"
