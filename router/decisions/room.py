"""What room workers have for more requests. Pure.

It is asked for with every request, and of a thousand workers a handful changed since: what all of them add up to is kept,
and counted again of those alone. Seconds are summed as whole numbers, so that what is taken off is what was added.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from math import inf
from operator import is_not

from headrace.costmodel import CostModel
from router.decisions.view import View, WorkerView

WORKER_BACKLOG = 8
GUESSED_TOKEN_SECONDS = CostModel().prefill_token_seconds
LEAST_TOKEN_SECONDS = 1e-7  # a fit may say that all the time of a step is in its base
NANOSECONDS, FEMTOSECONDS = 1e9, 1e15
MOST_SECONDS = 1e9  # whatever a worker's fit says, which may be no number
MANY_CHANGED = 0.25  # of all; to count them all is no dearer


@dataclass(slots=True)
class Room:
    """What workers take: `num_sequences` more, and `seconds` of prefill on each of `num_prefill`, which compute a token in
    `token_seconds`. `most_samples`: the rows of the largest worker that decodes; 0 when there is none. `idle`: nothing
    runs or waits anywhere."""

    num_sequences: int = 0
    seconds: float = inf
    num_prefill: int = 1
    token_seconds: float = GUESSED_TOKEN_SECONDS
    most_samples: int = 0
    idle: bool = True

    @property
    def tokens_per_second(self) -> float:
        """What all of them compute."""
        return self.num_prefill / self.token_seconds

    def take(self, num_sequences: int, num_tokens: int) -> None:
        self.num_sequences -= num_sequences
        self.seconds -= num_tokens * self.token_seconds / self.num_prefill


class Rooms:
    """Owns what the workers of the last view add up to. `backlog_seconds`: how much prefill workers may have before them,
    on average; a few prompts in any case."""

    def __init__(self, backlog_seconds: float) -> None:
        self._limit = backlog_seconds
        self._begin(())

    def of(self, view: View) -> Room:
        if view.workers is not self._workers:
            self._look(view.workers)
        room = Room(num_sequences=self._free, most_samples=self._most_samples, idle=not self._num_busy)
        if self._num_measured:
            room.num_prefill = self._num_prefill
            room.token_seconds = max(self._token_fs / FEMTOSECONDS / self._num_measured, LEAST_TOKEN_SECONDS)
            if self._num_measured == self._num_prefill:
                room.seconds = self._limit - self._backlog_ns / NANOSECONDS / self._num_measured
        return room

    def _begin(self, workers: tuple[WorkerView, ...]) -> None:
        self._workers = workers
        self._free = self._num_busy = self._most_samples = 0
        self._num_prefill = self._num_measured = self._backlog_ns = self._token_fs = 0

    def _look(self, workers: tuple[WorkerView, ...]) -> None:
        before = self._workers
        if len(before) == len(workers):
            changed = list(compress(zip(before, workers, strict=True), map(is_not, before, workers)))
            if len(changed) <= MANY_CHANGED * len(workers) and all(_as_large(one, other) for one, other in changed):
                self._count((one for one, _ in changed), -1)
                self._count((other for _, other in changed), 1)
                self._workers = workers
                return
        self._begin(workers)
        self._count(workers, 1)
        self._most_samples = max((w.max_num_seqs for w in workers if w.decode_limit >= 0), default=0)

    def _count(self, workers: Iterable[WorkerView], sign: int) -> None:
        limit, share = self._limit, self._limit / WORKER_BACKLOG
        for worker in workers:
            if worker.num_sequences:
                self._num_busy += sign
            if worker.decode_limit >= 0:
                free = worker.free_slots + WORKER_BACKLOG
                if free > 0:
                    self._free += sign * free
            if worker.prefill_limit >= 0:
                self._num_prefill += sign
                its = worker.cost.prefill_token_seconds
                if its != GUESSED_TOKEN_SECONDS:
                    self._num_measured += sign
                    self._token_fs += sign * round(min(MOST_SECONDS, its) * FEMTOSECONDS)
                    # A few prompts are no queue, however long: others are computed beside them, or where they decode.
                    queue = worker.queue_seconds
                    if queue > share:
                        num_waiting = worker.load.num_waiting
                        most = limit if num_waiting >= WORKER_BACKLOG else share * num_waiting
                        queue = queue if queue < most else most
                    self._backlog_ns += sign * round(min(MOST_SECONDS, queue) * NANOSECONDS)


def _as_large(one: WorkerView, other: WorkerView) -> bool:
    """What is the most of all is not to be had from what changed alone."""
    return one.max_num_seqs == other.max_num_seqs and (one.decode_limit >= 0) == (other.decode_limit >= 0)
