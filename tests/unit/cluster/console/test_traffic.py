"""Rates out of counters: nothing is lost with a report, nothing is invented when routers come and go."""

from cluster.console.traffic import Ring, Traffic
from cluster.growth import Growth, attainment, grown
from headrace.reports import ClassCounts
from tests.unit.cluster.console.looks import routed


def test_what_was_there_before_the_first_look_is_not_counted_and_a_new_router_is_from_its_start() -> None:
    traffic = Traffic(300.0)
    traffic.hear(0.0, {"old": routed("old", arrivals=1_000_000)})
    traffic.hear(10.0, {"old": routed("old", arrivals=1_000_020), "new": routed("new", arrivals=30)})
    last = traffic.last(10.0, 60.0)
    assert (last.of("arrivals"), last.seconds, last.per_second("arrivals")) == (50, 10.0, 5.0)


def test_a_report_that_is_lost_loses_nothing_and_a_router_that_leaves_takes_nothing_away() -> None:
    traffic = Traffic(300.0)
    traffic.hear(0.0, {"r": routed(arrivals=10)})
    traffic.hear(1.0, {})
    traffic.hear(2.0, {"r": routed(arrivals=14)})
    traffic.hear(3.0, {})
    assert traffic.last(3.0, 60.0).of("arrivals") == 4


def test_a_counter_that_shrinks_counts_nothing() -> None:
    before = routed(arrivals=10, pairs={("p", "d"): 7}, classes={"chat": ClassCounts(met=5)})
    after = routed(arrivals=3, pairs={("p", "d"): 2}, classes={"chat": ClassCounts(met=1, failed=1)})
    more = grown(before, after)
    assert (more.of("arrivals"), dict(more.pairs), dict(more.classes)) == (0, {}, {("chat", "failed"): 1})


def test_the_window_forgets_what_is_older() -> None:
    traffic = Traffic(10.0)
    for second in range(30):
        traffic.hear(float(second), {"r": routed(arrivals=second)})
    assert traffic.last(29.0, 5.0).of("arrivals") == 5
    assert traffic.last(29.0, 10.0).of("arrivals") == traffic.last(29.0, 100.0).of("arrivals") == 10


def test_nothing_is_no_rate_and_no_attainment() -> None:
    assert Growth().per_second("arrivals") == 0.0
    assert (Growth().hit_rate, Growth().mean_ttft_seconds, attainment(ClassCounts())) == (None, None, None)
    more = Growth(
        1.0, {"cached_tokens": 3, "computed_tokens": 1, "ttft_seconds": 2.0}, {}, {("p", "d"): 3, ("", "d"): 1}
    )
    assert (more.hit_rate, more.mean_ttft_seconds) == (0.75, 0.5)


def test_a_ring_keeps_points_apart_and_no_more_than_its_length() -> None:
    ring = Ring(5.0, 3)
    for second in range(40):
        if ring.due(float(second)):
            ring.add(float(second), {"at": second})
    assert [point["at"] for point in ring.points] == [25, 30, 35]
