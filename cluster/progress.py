"""Shows the steps of a start or an end: a spinner for what goes on, a line for what is done, or JSON lines."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TextIO

from rich.console import Console

from cluster.launch import Report, Step


@contextmanager
def shown(console: Console) -> Iterator[Report]:
    """A report for people."""
    with console.status("") as status:
        last: Step | None = None

        def report(step: Step) -> None:
            nonlocal last
            if step == last:
                return
            last = step
            if step.done:
                console.print(f"[green]✓[/] {step.name:<8} {step.detail}", highlight=False)
                status.update("")
            elif console.is_terminal:
                status.update(f"{step.name:<8} {step.detail}")

        yield report


def json_lines(stream: TextIO) -> Report:
    """A report for programs: one object a line, without repeats."""
    last: Step | None = None

    def report(step: Step) -> None:
        nonlocal last
        if step != last:
            last = step
            write_line(stream, asdict(step))

    return report


def write_line(stream: TextIO, value: object) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()
