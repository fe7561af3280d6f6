"""What all ranks of a worker were asked to do, and which of them have not answered yet.

Each question is a future that completes once every rank has answered it: to be built, a step, a task (a pull, digests).
No thread and no channel: whoever hears the ranks says here what they said.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from headrace.errors import HeadraceError, InternalError, WorkerLost
from workers.ranks.messages import Ready, Stepped
from workers.scheduling.plan import StepResult

T = TypeVar("T")


@dataclass(slots=True)
class _Flight:
    """A step under way. `missing`: ranks that have not done it."""

    future: "Future[StepResult]"
    missing: set[int]
    result: StepResult | None = None
    seconds: float = 0.0
    ahead_seconds: float = float("inf")
    launch_seconds: float = 0.0


@dataclass(slots=True)
class _Task:
    """A pull or a digest under way: what the ranks said so far, and what to make of it once all have."""

    future: "Future[Any]"
    conclude: Callable[[list[Any]], Any]
    missing: set[int]
    parts: list[Any] = field(default_factory=list)


class Answers:
    """Owned by one executor, called from its threads: `_lock` guards all that changes, futures complete outside it.

    At most `most_steps` are in flight. After lose() every question is answered with WorkerLost at once. `progress` is when
    the ranks last ended a step, or began one with none before it.
    """

    def __init__(self, ranks: frozenset[int], most_steps: int) -> None:
        self._ranks = ranks
        self._most_steps = most_steps
        self._lock = threading.Lock()
        self._flights: dict[int, _Flight] = {}
        self._tasks: dict[int, _Task] = {}
        self._num_tasks = 0
        self.ready: dict[int, Ready] = {}
        self.started: Future[None] = Future()
        self.lost: HeadraceError | None = None
        self.progress = 0.0

    # -- questions

    def begin_step(self, number: int, now: float) -> "Future[StepResult]":
        future: Future[StepResult] = _under_way()
        with self._lock:
            lost = self.lost
            if lost is None:
                if len(self._flights) == self._most_steps:
                    raise ValueError(f"at most {self._most_steps} steps may be in flight, plan {number} is more")
                if not self._flights:
                    self.progress = now
                self._flights[number] = _Flight(future, set(self._ranks))
        if lost is not None:
            future.set_exception(worker_lost(lost))
        return future

    def begin_task(self, conclude: Callable[[list[Any]], T]) -> tuple[int, "Future[T]"]:
        """Its number, and what completes with what `conclude` makes of the ranks' parts."""
        future: Future[T] = _under_way()
        with self._lock:
            self._num_tasks += 1
            task, lost = self._num_tasks, self.lost
            if lost is None:
                self._tasks[task] = _Task(future, conclude, set(self._ranks))
        if lost is not None:
            future.set_exception(worker_lost(lost))
        return task, future

    def late_step(self, now: float, seconds: float) -> tuple[int, set[int]] | None:
        """When no step has ended for so long: the plan that was given first, and the ranks that have not done it."""
        with self._lock:
            if now - self.progress <= seconds:
                return None
            return next(((number, set(flight.missing)) for number, flight in self._flights.items()), None)

    # -- answers; those that come after a loss are dropped: their futures have said so

    def is_ready(self, rank: int, ready: Ready) -> None:
        with self._lock:
            self.ready[rank] = ready
            complete = self.lost is None and len(self.ready) == len(self._ranks)
        if complete:
            self.started.set_result(None)

    def stepped(self, rank: int, stepped: Stepped, now: float) -> None:
        """InternalError when all have done the step, and none had its result."""
        with self._lock:
            flight = self._flights.get(stepped.number)
            if flight is None:
                return
            flight.missing.discard(rank)
            flight.seconds = max(flight.seconds, stepped.seconds)
            flight.ahead_seconds = min(flight.ahead_seconds, stepped.ahead_seconds)
            flight.launch_seconds = max(flight.launch_seconds, stepped.launch_seconds)
            flight.result = flight.result or stepped.result
            if flight.missing:
                return
            del self._flights[stepped.number]
            self.progress = now
        if flight.result is None:
            error = InternalError(f"no rank had a result of plan {stepped.number}")
            flight.future.set_exception(worker_lost(error))
            raise error
        figures = flight.seconds, flight.ahead_seconds, flight.launch_seconds
        flight.future.set_result(timed(flight.result, *figures))

    def answered(self, rank: int, task: int, part: object) -> None:
        with self._lock:
            asked = self._tasks.get(task)
            if asked is None:
                return
            asked.missing.discard(rank)
            asked.parts.append(part)
            if asked.missing:
                return
            del self._tasks[task]
        try:
            asked.future.set_result(asked.conclude(asked.parts))
        except HeadraceError as error:
            asked.future.set_exception(error)

    def lose(self, error: HeadraceError) -> bool:
        """All that waits fails; False when it has already. The first reason counts."""
        with self._lock:
            if self.lost is not None:
                return False
            self.lost = error
            waiting: list[Future[Any]] = [flight.future for flight in self._flights.values()]
            waiting += [task.future for task in self._tasks.values()]
            self._flights.clear()
            self._tasks.clear()
            starting = len(self.ready) < len(self._ranks)
        if starting:
            self.started.set_exception(error)
        for future in waiting:
            future.set_exception(worker_lost(error))
        return True


def timed(result: StepResult, seconds: float, ahead_seconds: float, launch_seconds: float) -> StepResult:
    return replace(result, seconds=seconds, ahead_seconds=ahead_seconds, launch_seconds=launch_seconds)


def worker_lost(error: HeadraceError) -> WorkerLost:
    return error if isinstance(error, WorkerLost) else WorkerLost(f"a rank failed: {error.type}: {error.message}")


def _under_way() -> "Future[Any]":
    """A future that who waits for it cannot cancel: what it stands for goes on."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
