"""Which workers answer with failures, and are therefore passed over for a while. Pure.

After `max_failures` failures in a row a worker is ejected for `eject_seconds`, twice as long each further time up to
`max_eject_seconds`. When the time is over it is tried again: the first outcome brings it back or ejects it anew.
What is the client's fault, or the worker's good right (a full queue, draining), is no failure, whoever reports it: the
worker itself of a request, or a decode worker of its hand-off.
"""

from dataclasses import dataclass

from headrace.errors import (
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)

_NO_FAILURE = (InvalidRequest, Unauthenticated, Overloaded, Unavailable, DeadlineExceeded, RequestCancelled)


@dataclass(slots=True)
class _Record:
    num_failures: int = 0
    num_ejections: int = 0
    ejected_until: float = 0.0


class Health:
    """Owns the failure records of one router, over all its requests. `version` changes with who is ejected."""

    def __init__(self, max_failures: int = 3, eject_seconds: float = 5.0, max_eject_seconds: float = 60.0) -> None:
        self._max_failures = max_failures
        self._eject_seconds = eject_seconds
        self._max_eject_seconds = max_eject_seconds
        self._records: dict[str, _Record] = {}
        self.version = 0

    def succeeded(self, worker: str) -> None:
        self.forget(worker)

    def failed(self, worker: str, error: HeadraceError, now: float) -> None:
        """Counts the error against the worker if it is one that a sound worker would not have made."""
        if isinstance(error, _NO_FAILURE) and not isinstance(error, WorkerLost):
            return
        record = self._records.setdefault(worker, _Record())
        if now < record.ejected_until:
            return
        record.num_failures += 1
        if record.num_failures >= self._max_failures or record.num_ejections:
            seconds = min(self._eject_seconds * 2**record.num_ejections, self._max_eject_seconds)
            record.ejected_until = now + seconds
            record.num_ejections += 1
            record.num_failures = 0
            self.version += 1

    def ejected_until(self, worker: str) -> float:
        """The time before which the worker is passed over; 0 when it never was ejected."""
        record = self._records.get(worker)
        return record.ejected_until if record is not None else 0.0

    def num_ejected(self, now: float) -> int:
        return sum(record.ejected_until > now for record in self._records.values())

    def forget(self, worker: str) -> None:
        """A new generation of the worker begins without a record."""
        record = self._records.pop(worker, None)
        if record is not None and record.num_ejections:
            self.version += 1
