"""Shows the steps of a start or an end: to people with or without a terminal, or as JSON lines."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO

from rich.console import Console
from rich.markup import escape

from cluster.launch import Report, Step
from headrace.clock import Clock, SystemClock

REPEAT_SECONDS = 10.0


@contextmanager
def shown(console: Console, clock: Clock | None = None) -> Iterator[Report]:
    """A report for people: with a terminal a spinner shows what goes on, without one each change is a line."""
    if not console.is_terminal:
        yield plain_lines(console.file, clock or SystemClock())
        return
    with console.status("") as status:
        last: Step | None = None

        def report(step: Step) -> None:
            nonlocal last
            if step == last:
                return
            last = step
            if step.done:
                console.print(f"[green]✓[/] {step.name:<8} {escape(step.detail)}", highlight=False)
                status.update("")
            else:
                status.update(f"{step.name:<8} {escape(step.detail)}")

        yield report


def plain_lines(stream: IO[str], clock: Clock) -> Report:
    """Each change as a line, after the seconds since the start; what takes long is said again now and then."""
    began = clock.now()
    last: Step | None = None
    said_at = began

    def report(step: Step) -> None:
        nonlocal last, said_at
        now = clock.now()
        if step == last and (step.done or now - said_at < REPEAT_SECONDS):
            return
        last, said_at = step, now
        mark = "✓" if step.done else " "
        stream.write(f"{now - began:6.1f} s  {mark} {step.name:<8} {step.detail}".rstrip() + "\n")
        stream.flush()

    return report


def json_lines(stream: IO[str]) -> Report:
    """A report for programs: one object a line, without repeats."""
    last: Step | None = None

    def report(step: Step) -> None:
        nonlocal last
        if step != last:
            last = step
            write_line(stream, asdict(step))

    return report


def write_line(stream: IO[str], value: object) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()
