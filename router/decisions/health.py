"""Which workers answer with failures, and are therefore passed over for a while. Pure.

After `max_failures` failures in a row a worker is ejected for `eject_seconds`, twice as long each further time up to
`max_eject_seconds`. When the time is over it is tried again: the first outcome brings it back or ejects it anew.
What is the client's fault, or the worker's good right (a full queue, draining), is no failure, whoever reports it: the
worker itself of a request, or a decode worker of its hand-off.

Two workers may each be sound and yet fail each other, where no link between them works: their hand-offs are counted by pair
too, and such a pair is passed over like a worker, for as long. Where one refuses the other by name, as two versions do
while a deployment is rolled over, neither has failed: the pair alone is passed over, and at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import (
    DeadlineExceeded,
    HeadraceError,
    IncompatiblePeer,
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
        self._pairs: dict[str, dict[str, _Record]] = {}  # by decode worker, by prefill worker
        self.version = 0

    def succeeded(self, worker: str) -> None:
        self._forgive(self._records, worker)

    def served(self, decode: str, prefill: str | None, *, handed_off: bool) -> None:
        """A request was answered by these; `handed_off`: the prompt came from one to the other."""
        self.succeeded(decode)
        self.succeeded(prefill or decode)
        if prefill is not None and handed_off:
            self._forgive(self._pairs.get(decode, {}), prefill)

    def failed(self, worker: str, error: HeadraceError, now: float) -> None:
        """Counts the error against the worker if it is one that a sound worker would not have made."""
        if not isinstance(error, _NO_FAILURE) or isinstance(error, WorkerLost):
            self._count(self._records, worker, now)

    def peer_failed(self, decode: str, prefill: str, error: HeadraceError, now: float) -> None:
        """The decode worker says so of its hand-off: it counts against the prefill worker, and against the two."""
        if isinstance(error, IncompatiblePeer):
            self._count(self._pairs.setdefault(decode, {}), prefill, now, most=1)
            return
        self.failed(prefill, error, now)
        if not isinstance(error, _NO_FAILURE) or isinstance(error, WorkerLost):
            self._count(self._pairs.setdefault(decode, {}), prefill, now)

    def _count(self, records: dict[str, _Record], name: str, now: float, most: int | None = None) -> None:
        """`most`: failures in a row, where not `max_failures`."""
        record = records.setdefault(name, _Record())
        if now < record.ejected_until:
            return
        record.num_failures += 1
        if record.num_failures >= (most or self._max_failures) or record.num_ejections:
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

    def unlinked(self, decode: str) -> Mapping[str, float] | None:
        """The prefill workers that the decode worker is not to be paired with, and until when; None, as most often."""
        records = self._pairs.get(decode)
        if not records:
            return None
        return {name: record.ejected_until for name, record in records.items() if record.num_ejections} or None

    def forget(self, worker: str) -> None:
        """A new generation of the worker begins without a record."""
        self._forgive(self._records, worker)
        for record in self._pairs.pop(worker, {}).values():
            self.version += bool(record.num_ejections)
        for records in self._pairs.values():
            self._forgive(records, worker)

    def _forgive(self, records: dict[str, _Record], name: str) -> None:
        record = records.pop(name, None)
        if record is not None and record.num_ejections:
            self.version += 1
