"""SIGINT and SIGTERM as an ordinary way out: they cancel a task once, and what follows is its orderly end."""

import asyncio
import signal

from cluster.launch import Report, Step


class Signals:
    """Belongs to the task that made it. Further signals change nothing: the end is under way."""

    def __init__(self) -> None:
        self.received = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.install()

    def install(self) -> None:
        """To be repeated after Ray has started: it replaces the handlers of the process by some that print a stack."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._receive)

    def after_ray(self, report: Report) -> Report:
        """The same report, which installs the handlers again when Ray is up."""

        def reporting(step: Step) -> None:
            if step.name == "ray" and step.done:
                self.install()
            report(step)

        return reporting

    def _receive(self) -> None:
        if not self.received:
            self.received = True
            self._task.cancel()
