"""Virtual time: in order, never backwards, and what passes is heard of once."""

import pytest

from workers.virtual.time import VirtualTime


def test_what_is_due_happens_in_order_and_equal_times_in_the_order_asked_for() -> None:
    time, seen = VirtualTime(), list[tuple[float, str]]()
    for seconds, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "never")):
        time.at(seconds, lambda name: seen.append((time.now, name)), name)
    time.run(5.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert (time.now, time.num_happened) == (5.0, 3)


def test_what_happens_may_ask_for_more_at_the_same_time() -> None:
    time, seen = VirtualTime(), list[float]()
    time.at(1.0, lambda: time.after(0.0, lambda: seen.append(time.now)))
    time.run()
    assert seen == [1.0]


def test_the_past_is_over() -> None:
    time = VirtualTime()
    time.run(3.0)
    with pytest.raises(ValueError, match=r"2\.0 s is over: it is 3\.0 s"):
        time.at(2.0, lambda: None)


def test_seconds_that_pass_are_heard_of_before_what_they_lead_to() -> None:
    seen: list[object] = []
    time = VirtualTime(seen.append)
    for seconds in (1.0, 1.0, 4.0):
        time.at(seconds, seen.append, "then")
    time.run()
    assert seen == [1.0, "then", "then", 3.0, "then"]
