"""workers.ranks.profiles: steps of a trace."""

from typing import Any

import pytest

from workers.ranks.profiles import ProfiledStep, steps_of

THREAD = 7
Event = dict[str, Any]


def span(number: int, start: float, length: float) -> Event:
    return {"cat": "user_annotation", "name": f"step {number}", "ts": start, "dur": length, "tid": THREAD}


def launch(correlation: int, start: float, thread: int = THREAD) -> Event:
    return {
        "cat": "cuda_runtime",
        "name": "x",
        "ts": start,
        "dur": 1,
        "tid": thread,
        "args": {"correlation": correlation},
    }


def kernel(correlation: int, start: float, length: float, category: str = "kernel") -> Event:
    return {"cat": category, "name": "k", "ts": start, "dur": length, "args": {"correlation": correlation}}


def test_kernels_are_their_launches_steps_however_late_they_run() -> None:
    """Step 5's kernels run while step 6 is launched; two of them overlap, and a gap lies before the last."""
    events = [
        {"ph": "M", "name": "process_name"},
        kernel(1, 50, 20),
        kernel(1, 60, 20),
        kernel(1, 90, 10),
        kernel(2, 110, 30, "gpu_memcpy"),
        kernel(3, 95, 500),
        span(5, 0, 30),
        span(6, 40, 10),
        launch(1, 10),
        launch(2, 45),
        launch(3, 46, thread=8),
    ]
    first, second = steps_of(events, [(5, 12, 3), (6, 0, 4)])
    assert (first.number, first.num_prefill_tokens, first.num_decode_tokens) == (5, 12, 3)
    assert (first.cpu_seconds, first.gpu_seconds, first.idle_seconds) == pytest.approx((30e-6, 40e-6, 10e-6))
    assert (second.cpu_seconds, second.gpu_seconds, second.idle_seconds) == pytest.approx((10e-6, 30e-6, 10e-6))


def test_without_a_device_idle_is_the_wait_for_the_next_step() -> None:
    found = steps_of([span(1, 0, 30), span(2, 50, 10)], [(1, 0, 2), (2, 0, 2), (3, 0, 2)])
    assert found == (
        ProfiledStep(1, 0, 2, pytest.approx(30e-6), 0.0, pytest.approx(20e-6)),
        ProfiledStep(2, 0, 2, pytest.approx(10e-6), 0.0, 0.0),
    )
