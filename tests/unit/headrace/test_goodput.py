"""Goodput and percentiles, as simulated and real requests share them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.goodput import PERCENTILES, Slo, percentiles


@pytest.mark.parametrize(
    ("ttft", "tpot", "met"),
    [(1.0, 0.1, True), (1.0, None, True), (1.01, 0.1, False), (1.0, 0.11, False), (float("inf"), None, False)],
)
def test_a_request_meets_an_slo_by_both_its_targets(ttft: float, tpot: float | None, met: bool) -> None:
    assert Slo(1.0, 0.1).met(ttft, tpot) is met


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300))
def test_a_percentile_is_a_value_that_so_many_do_not_pass(values: list[float]) -> None:
    found = percentiles(values)
    for percent in PERCENTILES:
        value = found[f"p{percent}"]
        assert value in values
        assert sum(one <= value for one in values) >= percent / 100 * len(values)
        assert sum(one < value for one in values) < percent / 100 * len(values)


def test_nothing_has_no_percentiles() -> None:
    assert percentiles([]) == {}
