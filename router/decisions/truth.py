"""Whether a worker's part of the index is worth believing: what it promised of the prompts placed there, against what the
worker found. Pure.

    error = Σ tokens promised and not found / Σ tokens promised

over the last samples, older ones counting less by number and by time. A worker whose error is high is routed by load
alone; its promises are noted all the same, so that true ones, or time, bring it back. A block's worth of difference is
none: a worker computes at least the last block of a prompt. More found than promised is no error: events lag.
"""

from dataclasses import dataclass
from enum import StrEnum

KEEP_PER_SAMPLE = 0.9
HALF_LIFE_SECONDS = 60.0
MIN_SAMPLES = 2.5  # as they count, faded: three fresh ones
DISTRUST_ERROR = 0.5
TRUST_ERROR = 0.2


class Fallback(StrEnum):
    """Why a placement did not use the index for a worker."""

    DISTRUSTED = "distrusted"
    UNPROVEN = "unproven"
    UNFOLLOWED = "unfollowed"
    SELF_CHECK = "self-check"


@dataclass(slots=True)
class _Record:
    at: float
    num_samples: float = 0.0
    promised: float = 0.0
    missing: float = 0.0

    def fade(self, keep: float) -> None:
        self.num_samples *= keep
        self.promised *= keep
        self.missing *= keep


class Truth:
    """Owns the records of one router."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._distrusted: set[str] = set()

    def found(self, worker: str, promised: int, actual: int, block_size: int, now: float) -> None:
        """A prompt of which the mirror had promised so many tokens was computed on the worker."""
        if promised <= block_size:
            return
        record = self._at(worker, now)
        record.fade(KEEP_PER_SAMPLE)
        record.num_samples += 1
        record.promised += promised
        record.missing += max(promised - actual - block_size, 0)
        error = record.missing / record.promised
        if error <= TRUST_ERROR:
            self._distrusted.discard(worker)
        elif error > DISTRUST_ERROR and record.num_samples >= MIN_SAMPLES:
            self._distrusted.add(worker)

    def distrusted(self, now: float) -> frozenset[str]:
        """The workers that are routed by load alone. Doubt without fresh samples fades: at less than half a sample the
        worker begins anew."""
        for worker in tuple(self._distrusted):
            if self._at(worker, now).num_samples < 0.5:
                self.forget(worker)
        return frozenset(self._distrusted)

    def error(self, worker: str) -> float:
        record = self._records.get(worker)
        return record.missing / record.promised if record is not None and record.promised else 0.0

    def forget(self, worker: str) -> None:
        """A new generation begins without a record."""
        self._records.pop(worker, None)
        self._distrusted.discard(worker)

    def _at(self, worker: str, now: float) -> _Record:
        record = self._records.setdefault(worker, _Record(now))
        record.fade(0.5 ** (max(now - record.at, 0.0) / HALF_LIFE_SECONDS))
        record.at = now
        return record
