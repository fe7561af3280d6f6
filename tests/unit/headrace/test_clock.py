import pytest

from headrace.clock import ManualClock, SystemClock


def test_a_manual_clock_stands_until_it_is_advanced_and_never_goes_back() -> None:
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(0.5)
    assert clock.now() == 5.5
    with pytest.raises(ValueError, match="-1"):
        clock.advance(-1)


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)
