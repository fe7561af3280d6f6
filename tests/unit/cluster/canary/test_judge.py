"""What is called worse, and how seldom by mistake."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.canary.evidence import heard
from cluster.canary.judge import bounds, difference, is_due, judge, quantile, wilson
from cluster.canary.values import Evidence, Verdict
from headrace.reports import RevisionCounts, RouterReport, bucket_of, seconds_of
from tests.unit.cluster.canary.world import ITS, counted


def verdicts(base: RevisionCounts, canary: RevisionCounts, look: int = 0) -> dict[str, Verdict]:
    return {test.name: test.verdict for test in judge(ITS, base, canary, look).tests}


def test_newcombes_own_example() -> None:
    """56/70 against 48/80: the paper's table II gives 0.0524 to 0.3339 at 95 %."""
    low, high = difference(48, 80, 56, 70, 1.959964)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


def test_wilson_holds_where_nothing_or_all_failed() -> None:
    assert wilson(0, 100, 1.96) == (0.0, pytest.approx(0.037, abs=1e-3))
    assert wilson(100, 100, 1.96) == (pytest.approx(0.963, abs=1e-3), pytest.approx(1.0))


@given(st.floats(1e-4, 1e3))
def test_a_latency_lies_in_its_bucket(seconds: float) -> None:
    bucket = bucket_of(seconds)
    assert seconds_of(bucket) <= seconds * (1 + 1e-9)
    assert seconds <= seconds_of(bucket + 1) * (1 + 1e-9)


@given(st.lists(st.floats(1e-3, 10.0), min_size=20, max_size=200), st.sampled_from([0.5, 0.9]))
def test_a_quantile_of_what_was_seen_lies_between_its_bounds(seconds: list[float], part: float) -> None:
    histogram: dict[int, int] = {}
    for one in seconds:
        histogram[bucket_of(one)] = histogram.get(bucket_of(one), 0) + 1
    low, high = bounds(histogram, part, 2.0)
    middle = quantile(histogram, part)
    assert middle is not None
    assert low <= middle <= high


def test_of_too_few_requests_nothing_is_said_however_bad_they_are() -> None:
    few = judge(ITS, counted(5000), counted(99, failed=99), 0)
    assert (few.verdict, few.tests) == (Verdict.FEW, ())
    assert judge(ITS, counted(99), counted(5000, failed=5000), 0).verdict is Verdict.FEW


def test_what_fails_is_worse() -> None:
    found = judge(ITS, counted(2000, failed=2), counted(100, failed=30), 0)
    assert found.verdict is Verdict.WORSE
    assert {test.name for test in found.worse} >= {"failed", "missed targets"}
    failed = found.tests[0]
    assert failed.change == pytest.approx(0.299)
    assert failed.low is not None
    assert failed.low > ITS.max_error_increase


def test_what_is_twice_as_slow_is_worse_and_only_that_is_said() -> None:
    slow = verdicts(counted(2000), counted(300, ttft=0.4, seed=1))
    assert [name for name, verdict in slow.items() if verdict is Verdict.WORSE] == ["TTFT at the median", "TTFT at 90%"]
    slow = verdicts(counted(2000), counted(300, tpot=0.04, seed=1))
    assert [name for name, verdict in slow.items() if verdict is Verdict.WORSE] == ["TPOT at the median", "TPOT at 90%"]


def test_what_keeps_its_targets_less_often_is_worse_though_nothing_fails() -> None:
    found = verdicts(counted(2000, missed=10), counted(400, missed=80, seed=1))
    assert [name for name, verdict in found.items() if verdict is Verdict.WORSE] == ["missed targets"]


def test_equal_ones_are_shown_no_worse_once_there_are_enough_and_not_before() -> None:
    assert Verdict.UNDECIDED in verdicts(counted(100), counted(100, seed=1)).values()
    assert set(verdicts(counted(40_000), counted(20_000, seed=1)).values()) == {Verdict.NO_WORSE}


def test_who_is_looked_at_a_hundred_times_is_called_worse_no_oftener_than_was_promised() -> None:
    """Equal ones that stand right at the thresholds, the hardest case: errors equal, each look's chance counted."""
    random, called = Random(5), 0
    for _ in range(200):
        base = canary = failures = ours = 0
        look, looked_at = 0, 0
        while canary < 3000 and look < 100:
            base, canary = base + 100, canary + 100
            ours += sum(random.random() < 0.05 for _ in range(100))
            failures += sum(random.random() < 0.05 + ITS.max_error_increase for _ in range(100))
            if canary >= max(ITS.min_requests, 1.25 * looked_at):
                sides = RevisionCounts(base, ours, base - ours), RevisionCounts(canary, failures, canary - ours)
                looked_at, look = canary, look + 1
                if judge(ITS, *sides, look - 1).tests[0].verdict is Verdict.WORSE:
                    called += 1
                    break
    assert called <= 200 * (1 - ITS.confidence)


def test_looks_come_as_evidence_grows() -> None:
    sides = {"stable": counted(1000), "v2": counted(124)}
    assert is_due(ITS, Evidence(1, sides=sides), "stable")
    assert not is_due(ITS, Evidence(1, sides=sides, num_looked_at=100), "stable")
    assert not is_due(ITS, Evidence(1, sides={"v2": counted(1000)}), "stable")


def report(name: str, canary: int = 1, **revisions: RevisionCounts) -> RouterReport:
    return RouterReport(name, "", 0.0, canary=canary, revisions=revisions)


SHORT = ITS.model_copy(update={"window_seconds": 100.0, "min_requests": 50})


def said(evidence: Evidence, now: float, *reports: RouterReport) -> Evidence:
    return heard(evidence, {report.router_id: report for report in reports}, now, SHORT, "stable")


def test_counters_are_differences_over_all_routers_and_another_canarys_are_not_counted() -> None:
    first = RevisionCounts(10, 1, 9, ttft={5: 9})
    evidence = said(Evidence(1), 1.0, report("a", v2=first), report("b", 2, v2=first))
    assert evidence.of("v2") == first
    more = RevisionCounts(15, 1, 14, ttft={5: 10, 7: 4})
    evidence = said(evidence, 2.0)  # a report that is lost costs nothing
    evidence = said(evidence, 3.0, report("a", v2=more))
    assert evidence.of("v2") == more


def test_a_window_that_is_over_begins_anew_once_it_was_enough_to_judge_and_not_before() -> None:
    few, enough = RevisionCounts(49, 0, 49), RevisionCounts(50, 0, 50)
    evidence = said(Evidence(1), 1.0, report("a", stable=enough, v2=few))
    evidence = said(evidence, 200.0, report("a", stable=enough, v2=enough))
    assert (evidence.since, evidence.of("v2")) == (0.0, enough), "where little comes nothing would ever be judged"
    evidence = said(evidence, 201.0, report("a", stable=enough, v2=enough.plus(few)))
    assert (evidence.since, evidence.of("v2"), evidence.of("stable")) == (201.0, few, RevisionCounts())
