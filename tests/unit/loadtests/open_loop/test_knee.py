"""The knee of curves whose knee is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.open_loop.knee import Beyond, Knee, Point, TooFew, knee, said


def mm1(loads: list[float]) -> list[Point]:
    """M/M/1 of capacity 1."""
    return [Point(load, load, 1 / (1 - load)) for load in loads]


def test_the_knee_of_a_single_queue_is_half_its_capacity() -> None:
    assert knee(mm1([at / 20 for at in range(1, 20)])) == Knee(0.5)


def test_a_server_that_saturates_bends_where_it_does() -> None:
    points = [Point(rate, min(rate, 8.0), 2.0 if rate <= 8 else 2.0 + (rate - 8) * 10) for rate in (1, 2, 4, 8, 16, 32)]
    assert knee(points) == Knee(8)


def test_a_sweep_that_does_not_reach_the_knee_says_where_to_go() -> None:
    assert knee(mm1([0.1, 0.2, 0.3])) == Beyond(0.3, "highest")
    assert knee(mm1([0.7, 0.8, 0.9])) == Beyond(0.7, "lowest")
    assert "sweep higher" in said(knee(mm1([0.1, 0.2, 0.3])))


def test_rates_without_an_answer_do_not_count() -> None:
    assert knee([*mm1([0.1, 0.5]), Point(2.0, 0.0, 0.0)]) == TooFew(2)


@given(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=12, unique=True), st.floats(0.01, 100), st.randoms())
def test_neither_units_nor_order_move_the_knee(loads: list[float], scale: float, random: object) -> None:
    points = mm1(loads)
    found = knee(points)
    scaled = knee([Point(p.offered, p.throughput * scale, p.latency_seconds / scale) for p in reversed(points)])
    assert type(found) is type(scaled)
    assert not isinstance(found, TooFew)
    assert not isinstance(scaled, TooFew)
    power = {load: load * (1 - load) for load in loads}
    assert power[scaled.offered] == pytest.approx(power[found.offered])
