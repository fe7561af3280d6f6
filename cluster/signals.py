"""SIGINT and SIGTERM as an ordinary way out: they cancel a task once, and what follows is its orderly end."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import click

from cluster.launch import Report, Step


class Interrupted(click.ClickException):
    """A signal ended what had not been done yet. The command's status is what a shell makes of that."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number  # type: ignore[misc]  # click reads it from the error, whichever way it got there


class Signals:
    """Belongs to the task that made it. `received` is the first signal; further ones change nothing: the end is under
    way."""

    def __init__(self, report: Report) -> None:
        self.received: int | None = None
        self._report = report
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.install()

    def install(self) -> None:
        """To be repeated after Ray has started: it replaces the handlers of the process by some that print a stack."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def report(self, step: Step) -> None:
        """Passes a step on, and installs the handlers again when Ray is up."""
        if step.name == "ray" and step.done:
            self.install()
        self._report(step)

    def _receive(self, number: int) -> None:
        if self.received is None:
            self.received = number
            self._task.cancel()
            self._report(Step("end", f"{signal.Signals(number).name}: ends what was started"))


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """SIGTERM and SIGINT as Interrupted, for code that blocks and has no event loop."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
