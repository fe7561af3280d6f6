"""A worker's life in its slot, as values: what is desired, what is observed, and what may be done about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headrace.values import STABLE, ParallelLayout, Role

STEADY_SECONDS = 60.0
FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 30.0
FOUND_SECONDS = 10.0  # after it is ready, by when every router has found a worker and placed on it


@dataclass(frozen=True, slots=True)
class DesiredPool:
    """How many workers of which kind. `lent` of them serve the other one of prefill and decode, until they are needed here
    again: they keep their slots, weights and caches. `revision`: of the settings that its workers are to have."""

    role: Role
    replicas: int
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    lent: int = 0
    revision: str = STABLE

    @property
    def num_gpus(self) -> int:
        """Ranks, on CPUs."""
        return self.replicas * self.layout.world_size

    def lent_of(self, there: int) -> int:
        """How many may be lent while only so many of the replicas are there: one stays, unless none was to."""
        return min(self.lent, there if self.lent >= self.replicas else max(there - 1, 0))


@dataclass(frozen=True, slots=True)
class Desired:
    """All pools by name. `trusted`: read from Redis as somebody wrote it, not rebuilt from the configuration."""

    pools: Mapping[str, DesiredPool]
    trusted: bool = True


class Phase(StrEnum):
    """Where a worker is in its life. DRAINED and DEAD workers serve nothing and wait to be removed."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker would leave, by its own last word: requests that it decodes, or will, beside as many as it may, and
    blocks of KV that are in use, or may be found again."""

    num_requests: int = 0
    max_num_seqs: int = 0
    num_blocks: int = 0

    def __str__(self) -> str:
        return f"{self.num_requests} requests and {self.num_blocks} blocks of KV"


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """One worker as the controller knows it. `since` is when its phase began, in seconds of the controller's clock.
    `pending`: it starts, and has no room in the cluster yet. `leaves_at`: when its node is taken away, by that clock.
    `failing`: it does not answer, or says that it makes no progress. `held` None: it has not said yet."""

    pool: str
    index: int
    generation: int
    role: Role
    layout: ParallelLayout
    phase: Phase
    since: float
    reason: str = ""
    pending: bool = False
    leaves_at: float | None = None
    revision: str = STABLE
    failing: bool = False
    held: Held | None = None

    @property
    def worker_id(self) -> str:
        return worker_id(self.pool, self.index)

    @property
    def price(self) -> tuple[bool, bool, int, int, int]:
        """What its leaving costs: who fails is no loss; then by the requests that it has to finish, in tenths of its rows
        (those begun count, so that an idle one is cheaper than any other, and one sequence more outweighs no cache), then
        by the KV that goes with it. Who has not said anything may have all of it. Of equals the highest index."""
        its = self.held or Held()
        tenths = -(-10 * its.num_requests // max(its.max_num_seqs, 1))
        return not self.failing, self.held is None, tenths, its.num_blocks, -self.index

    def is_found(self, now: float) -> bool:
        """Whether it stays, works, and routers place on it by now."""
        stays = self.phase is Phase.READY and self.leaves_at is None
        return stays and not self.failing and now - self.since >= FOUND_SECONDS


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of a slot: the last generation it had, how often it failed in a row, and why it last did."""

    generation: int = 0
    failures: int = 0
    failed_at: float = 0.0
    reason: str = ""

    def started(self, generation: int) -> "History":
        return replace(self, generation=generation)

    def failed(self, now: float, ready_seconds: float, reason: str) -> "History":
        """One more failure in a row, or the first one when the worker had served for STEADY_SECONDS."""
        failures = 1 if ready_seconds >= STEADY_SECONDS else self.failures + 1
        return History(self.generation, failures, now, reason)

    def served(self, ready_seconds: float) -> "History":
        """It ended in order: whoever had served for STEADY_SECONDS takes the failures before that with it."""
        return replace(self, failures=0) if ready_seconds >= STEADY_SECONDS else self

    @property
    def not_before(self) -> float:
        """When the slot may start again."""
        if not self.failures:
            return float("-inf")
        return self.failed_at + min(FIRST_DELAY_SECONDS * 2.0 ** min(self.failures - 1, 32), MAX_DELAY_SECONDS)


@dataclass(frozen=True, slots=True)
class Observed:
    """All workers that exist in any phase, and the history of every slot that ever had one (by worker id)."""

    workers: Sequence[ObservedWorker]
    history: Mapping[str, History] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    pool: str
    index: int
    generation: int
    role: Role
    layout: ParallelLayout
    revision: str = STABLE

    @property
    def worker_id(self) -> str:
        return worker_id(self.pool, self.index)


@dataclass(frozen=True, slots=True)
class SetRole:
    """The worker keeps its weights and its cache, and serves the other role."""

    worker_id: str
    generation: int
    role: Role


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new work, finish what runs; the worker is DRAINED afterwards."""

    worker_id: str
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Remove:
    """End all ranks, give their resources back, and forget the worker. `failed`: its slot waits before it starts again."""

    worker_id: str
    generation: int
    why: str
    failed: bool = False


Action = Start | SetRole | Drain | Remove


def worker_id(pool: str, index: int) -> str:
    return f"{pool}-{index}"


def leave(worker: ObservedWorker, why: str) -> Action:
    """A worker that serves is drained first; one that never was ready holds nothing."""
    if worker.phase is Phase.STARTING:
        return Remove(worker.worker_id, worker.generation, why)
    return Drain(worker.worker_id, worker.generation, why)
