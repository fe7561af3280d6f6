"""Counted intervals read like any Prometheus histogram."""

from prometheus_client import CollectorRegistry, generate_latest

from router.intervals import Intervals


def test_buckets_are_cumulative_and_a_bound_belongs_to_its_bucket() -> None:
    registry = CollectorRegistry()
    intervals = Intervals("itl_seconds", "Between messages.", registry)
    for seconds in (0.0005, 0.001, 0.0015, 100.0):
        intervals.of("m").observe(seconds)
    lines = generate_latest(registry).decode().splitlines()
    assert 'itl_seconds_bucket{le="0.001",model="m"} 2.0' in lines
    assert 'itl_seconds_bucket{le="0.002",model="m"} 3.0' in lines
    assert 'itl_seconds_bucket{le="+Inf",model="m"} 4.0' in lines
    assert 'itl_seconds_count{model="m"} 4.0' in lines
    assert 'itl_seconds_sum{model="m"} 100.003' in lines
