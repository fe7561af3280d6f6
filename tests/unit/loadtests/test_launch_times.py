"""From the notes of a decode worker to what is said of its launches."""

import pytest

from loadtests.launch_times import launch_rows

# begin, end, decodes, tokens, whether something arrives; its launch's begin and end. In milliseconds, for the eye.
STEPS = [
    (0, 10, 4, 4, False, -3, -1),
    (10, 20, 4, 4, False, 6, 8),
    (20.5, 30, 5, 5, True, 12, 20.2),
    (30, 40, 5, 5, False, 27, 28),
    (40, 90, 5, 69, False, 36, 38),
    (90, 95, 3, 3, False, 80, 81),
]
PACED = [
    (0.01, True, 0.004, 0.003, 0.01, 0.0025, 0.002, 0.002),
    (0.02, False, 0.001, 0.008, 0.01, None, -0.0002, 0.0082),
]


def notes(paced: list[tuple[object, ...]]) -> dict[str, object]:
    steps = [[*[at / 1e3 for at in step[:2]], *step[2:5], *[at / 1e3 for at in step[5:]]] for step in STEPS]
    return {"steps": steps, "notes": [["runnable", "a", 0.005], ["runnable", "b", 0.1]], "paced": paced}


def test_launches_say_how_long_they_took_and_how_many_waited_for_the_step_before() -> None:
    (row,) = launch_rows(notes([]), 4)
    assert row.name == "launch_ms"
    assert row.value == pytest.approx(2.0)
    assert "nothing arrives: p50 2.00, p99 2.00 ms, 0 of 3" in row.note
    assert "something does: p50 8.20, p99 8.20 ms, 1 of 1 over within 1 ms" in row.note


def test_of_late_launches_the_time_in_hand_how_long_they_were_held_and_what_the_device_waited() -> None:
    rows = {row.name: row for row in launch_rows(notes(PACED), 4)}
    assert rows["held_ms"].value == pytest.approx(4.0)
    assert rows["lead_ms"].value == pytest.approx(2.5)
    assert rows["waited_fraction"].value == pytest.approx(0.5)
    assert "for p50 0.20" in rows["waited_fraction"].note
    assert "0.0125 of its time" in rows["waited_fraction"].note
