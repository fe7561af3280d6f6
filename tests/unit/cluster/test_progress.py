"""What a start says while it goes on."""

import io
import json

from rich.console import Console

from cluster.launch import Step
from cluster.progress import json_lines, shown
from headrace.clock import ManualClock


def test_without_a_terminal_each_change_is_a_line_and_what_takes_long_is_said_again(clock: ManualClock) -> None:
    out = io.StringIO()
    with shown(Console(file=out), clock) as report:
        report(Step("workers", "0 of 2, decode-0 starts, prefill-0 loads"))
        for _ in range(44):
            clock.advance(0.25)
            report(Step("workers", "0 of 2, decode-0 loads, prefill-0 loads"))
        for _ in range(2):
            report(Step("workers", "2 of 2", done=True))
    assert out.getvalue().splitlines() == [
        "   0.0 s    workers  0 of 2, decode-0 starts, prefill-0 loads",
        "   0.2 s    workers  0 of 2, decode-0 loads, prefill-0 loads",
        "  10.2 s    workers  0 of 2, decode-0 loads, prefill-0 loads",
        "  11.0 s  ✓ workers  2 of 2",
    ]


def test_with_a_terminal_only_what_is_done_stays() -> None:
    out = io.StringIO()
    with shown(Console(file=out, force_terminal=True, width=80)) as report:
        report(Step("workers", "0 of 2"))
        report(Step("workers", "2 of 2", done=True))
    assert "✓\x1b[0m workers  2 of 2\n" in out.getvalue()


def test_programs_get_an_object_a_line_without_repeats() -> None:
    out = io.StringIO()
    report = json_lines(out)
    for step in (Step("ray"), Step("ray"), Step("ray", "here", done=True)):
        report(step)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"name": "ray", "detail": "", "done": False},
        {"name": "ray", "detail": "here", "done": True},
    ]
