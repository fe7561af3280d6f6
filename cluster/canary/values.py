"""What is known of a canary: frozen values that are kept as JSON. Times are seconds of Redis's clock, which outlives
controllers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from headrace.config import CanaryConfig
from headrace.reports import RevisionCounts
from headrace.values import STABLE


class Phase(StrEnum):
    STARTING = "starting"  # its workers come; no share
    LIVE = "live"  # it has its share, and is compared
    GOOD = "good"  # the same, and it was no worse for long enough
    PROMOTING = "promoting"  # the workers of what serves are replaced by its own, one at a time
    PROMOTED = "promoted"  # it is what serves
    ROLLED_BACK = "rolled_back"  # by the controller; no share, its workers finish and end
    ABORTED = "aborted"  # by an operator; the same

    @property
    def under_way(self) -> bool:
        return self in (Phase.STARTING, Phase.LIVE, Phase.GOOD, Phase.PROMOTING)

    @property
    def compared(self) -> bool:
        return self in (Phase.LIVE, Phase.GOOD)


@dataclass(frozen=True, slots=True)
class State:
    """The last canary there was. `settings` are a CanaryConfig as JSON; `base` is the revision that serves beside it;
    `shared_since`: when it got its first share. `failures` counts deaths of its workers and starts that came to nothing.
    `declared`: the last canary that a configuration asked for, as JSON: a declaration begins one, once."""

    number: int
    phase: Phase
    settings: str
    percent: float
    began: float
    since: float
    base: str = STABLE
    shared_since: float | None = None
    reason: str = ""
    failures: int = 0
    declared: str = ""

    @property
    def canary(self) -> CanaryConfig:
        return parsed(self.settings)

    @property
    def serving(self) -> str:
        """The revision that the cluster's own pools are to have."""
        promoted = self.phase in (Phase.PROMOTING, Phase.PROMOTED)
        return self.canary.revision if promoted else self.base


@lru_cache(maxsize=8)
def parsed(settings: str) -> CanaryConfig:
    """ValueError when it is no CanaryConfig of this version."""
    return CanaryConfig.model_validate_json(settings)


def written(settings: CanaryConfig) -> str:
    return settings.model_dump_json()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What routers counted of each revision since `since`, the same time for both. `last`: what each router said last, by
    revision, so that the next difference misses nothing. `look` counts the times that it was judged, `num_looked_at` are
    the requests of the smaller side then."""

    number: int = 0
    since: float = 0.0
    percent: float = 0.0
    sides: Mapping[str, RevisionCounts] = field(default_factory=dict)
    last: Mapping[str, Mapping[str, RevisionCounts]] = field(default_factory=dict)
    look: int = 0
    num_looked_at: int = 0

    def of(self, revision: str) -> RevisionCounts:
        return self.sides.get(revision, RevisionCounts())


class Verdict(StrEnum):
    FEW = "too few requests"
    WORSE = "worse"
    NO_WORSE = "no worse"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Test:
    """One comparison. `change`: canary − base of parts, canary ÷ base of latencies, somewhere between `low` and `high` at
    the judgement's confidence; more than `limit` is worse."""

    __test__ = False

    name: str
    base: float | None
    canary: float | None
    change: float | None
    low: float | None
    high: float | None
    limit: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of look number `look`, from 0. `error`: the chance that it calls something worse that is not, all tests together."""

    look: int
    verdict: Verdict
    num_base: int
    num_canary: int
    error: float
    tests: tuple[Test, ...] = ()

    @property
    def worse(self) -> tuple[Test, ...]:
        return tuple(test for test in self.tests if test.verdict is Verdict.WORSE)


@dataclass(frozen=True, slots=True)
class Event:
    """What changed a canary, and what that rests on: the state that followed, and the sides of the evidence as JSON."""

    at: float
    before: str
    state: State
    judgement: Judgement | None = None
    counts: str = ""
