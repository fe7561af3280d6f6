"""How a rank's start goes: weights as they come, and what each phase took."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from workers.models.weights import LoadProgress

log = logging.getLogger(__name__)

SAID = 4  # times in a log, where nobody watches a bar


@contextmanager
def weights_progress(stream: TextIO) -> Iterator[LoadProgress]:
    """A bar on a terminal, which it leaves as it was; elsewhere a line of the log for every quarter, and nothing that draws
    bars is loaded: every rank of every worker would wait for it."""
    if not stream.isatty():
        yield _said_in_the_log()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=stream, force_terminal=True)
    columns = TextColumn("weights"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("weights", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress


def _said_in_the_log() -> LoadProgress:
    said = 0

    def progress(done: int, total: int) -> None:
        nonlocal said
        if (quarter := SAID * done // total) > said:
            said = quarter
            log.info("weights: %d of %d tensors", done, total)

    return progress


class Phases:
    """Times one after the other, from when it is made."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self._found: list[str] = []

    def ended(self, name: str) -> None:
        now = time.perf_counter()
        self._found.append(f"{name} {now - self._at:.1f} s")
        self._at = now

    def __str__(self) -> str:
        return ", ".join(self._found)
