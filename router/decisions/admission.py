"""Whether a request may run now, waits its turn, or is refused at once. Pure.

The long queue is the router's, where order can still change: higher priority first, then first come, first served.
It is bounded, and what it refuses it refuses before any work is done. Quotas of tenants will be a check in `offer`.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

from headrace.errors import HeadraceError, InvalidRequest, NoWorkers, Overloaded
from router.decisions.view import View

WORKER_BACKLOG = 8
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may be placed now."""


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits; `Admission.admit` will name it. `num_ahead` requests are served before it as things stand."""

    num_ahead: int


@dataclass(frozen=True, slots=True)
class Shed:
    """The request is refused, with the time after which a retry has a chance."""

    reason: Literal["queue_full", "no_workers", "too_many_samples"]
    retry_after_seconds: float
    error: HeadraceError


Decision = Admitted | Queued | Shed


def free_slots(view: View) -> int:
    """How many more sequences the workers that decode can take, each a little beyond what it runs at once, so that
    it never idles while the next request travels."""
    free = [worker.free_slots for worker in view.workers if worker.decode_limit >= 0]
    return sum([slots + WORKER_BACKLOG for slots in free if slots > -WORKER_BACKLOG])


class Admission:
    """Owns the queue. Entries are names; who waits behind a name is the caller's matter."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._heap: list[tuple[int, int, str]] = []
        self._waiting: dict[str, int] = {}
        self._next_number = 0
        self._num_promised = 0
        self._last_admissions: list[float] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, name: str, *, num_sequences: int, priority: int, view: View, now: float) -> Decision:
        """Decides on a new request. A Queued one stays until `admit` names it or `leave` is called."""
        most = max([worker.max_num_seqs for worker in view.workers if worker.decode_limit >= 0], default=0)
        if not most:
            return Shed("no_workers", 2.0, NoWorkers("no worker that decodes is ready", retry_after_seconds=2.0))
        if num_sequences > most:
            # It would wait until nothing runs, hold up all behind it, and then be refused.
            allowed = f"at most {most}, as many as a worker runs at once"
            return Shed("too_many_samples", 0.0, InvalidRequest.out_of_range("n", num_sequences, allowed))
        if not self._waiting and self._fits(num_sequences, free_slots(view) - self._num_promised, view):
            self._promise(num_sequences, now)
            return Admitted()
        if len(self._waiting) >= self._max_queue:
            seconds = self._retry_after_seconds(now)
            return Shed(
                "queue_full",
                seconds,
                Overloaded(
                    f"the queue is full: {len(self._waiting)} requests wait, limit {self._max_queue}",
                    retry_after_seconds=seconds,
                    limit=self._max_queue,
                    actual=len(self._waiting),
                ),
            )
        num_ahead = sum(1 for negative, _, other in self._heap if other in self._waiting and negative <= -priority)
        heapq.heappush(self._heap, (-priority, self._next_number, name))
        self._next_number += 1
        self._waiting[name] = num_sequences
        return Queued(num_ahead)

    def admit(self, view: View, now: float) -> list[str]:
        """The names that may run now, in order. Whoever does not fit keeps those behind it waiting, so none starves."""
        admitted: list[str] = []
        if not self._waiting:
            return admitted
        room = free_slots(view) - self._num_promised
        while self._heap:
            name = self._heap[0][2]
            num_sequences = self._waiting.get(name)
            if num_sequences is not None:
                if not self._fits(num_sequences, room, view):
                    break
                del self._waiting[name]
                room -= num_sequences
                self._promise(num_sequences, now)
                admitted.append(name)
            heapq.heappop(self._heap)
        return admitted

    def begun(self, num_sequences: int) -> None:
        """An admitted request is placed, and the view counts it from now on; or it ended before."""
        self._num_promised -= num_sequences

    def leave(self, name: str) -> bool:
        """The request's client went away, or its time is over. False when it no longer waits: it was admitted."""
        waited = self._waiting.pop(name, None) is not None
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)
        return waited

    def _fits(self, num_sequences: int, room: int, view: View) -> bool:
        """One with more samples than there ever is room for runs when nothing else does, or it would wait for ever."""
        return num_sequences <= room or (
            not self._num_promised
            and all(worker.load.num_running + worker.load.num_waiting == 0 for worker in view.workers)
        )

    def _promise(self, num_sequences: int, now: float) -> None:
        self._num_promised += num_sequences
        self._note_admission(now)

    def _note_admission(self, now: float) -> None:
        self._last_admissions.append(now)
        del self._last_admissions[:-32]

    def _retry_after_seconds(self, now: float) -> float:
        """How long the queue takes to drain at the pace of the last admissions."""
        if len(self._last_admissions) < 2:
            return MIN_RETRY_SECONDS
        elapsed = max(now - self._last_admissions[0], 1e-3)
        seconds = len(self._waiting) * elapsed / len(self._last_admissions)
        return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
