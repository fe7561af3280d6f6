"""What is remembered of a request, running or over: why it ran where it ran, and what became of it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.values import DEFAULT_TENANT, Usage
from router.decisions.placement import Decided, Why
from router.decisions.tenants import NO_CLASS
from router.stages import RequestTimeline


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended placement `placement` (counted from 0): which worker, and its error."""

    placement: int
    worker_id: str
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request ran where it ran, an entry for each placement, and what became of it: how it ended, or its state while
    it runs. `seconds` from its arrival on; TTFT and TPOT None where they never were. `worker_name`: its id among workers,
    as their logs and Control.Describe have it. `revision`: whose workers ran it, while there was a canary."""

    request_id: str
    whys: tuple[Why, ...]
    failures: tuple[Failure, ...]
    outcome: str
    usage: Usage
    timeline: RequestTimeline
    seconds: float
    ttft_seconds: float | None
    tpot_seconds: float | None
    tenant: str = DEFAULT_TENANT
    service_class: str = NO_CLASS
    worker_name: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Recent:
    """A request as a list of them has it: its explanation without the whys, but for the reason of each placement.
    `seconds_ago`: since it ended; None while it runs."""

    outline: Explanation
    reasons: tuple[str, ...]
    seconds_ago: float | None = None


class Explanations:
    """Owns the explanations of the last requests that ended, `limit` of them, by the ids that their edge gave them. The
    whys are worked out of what was decided when somebody asks: each takes as long as a placement, and nearly all are
    forgotten unread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: dict[str, tuple[Explanation, tuple[Decided, ...], float]] = {}

    def add(self, outline: Explanation, decided: Sequence[Decided], now: float) -> None:
        self._by_id.pop(outline.request_id, None)
        self._by_id[outline.request_id] = outline, tuple(decided), now
        if len(self._by_id) > self._limit:
            del self._by_id[next(iter(self._by_id))]

    def find(self, request_id: str) -> Explanation | None:
        found = self._by_id.get(request_id)
        return explained(found[0], found[1]) if found is not None else None

    def latest(self, now: float) -> Iterator[Recent]:
        """The last one that ended first."""
        for outline, decided, ended_at in reversed(self._by_id.values()):
            yield Recent(outline, reasons_of(decided), now - ended_at)


def reasons_of(decided: Sequence[Decided]) -> tuple[str, ...]:
    return tuple([its.reason for its in decided])


def explained(outline: Explanation, decided: Sequence[Decided]) -> Explanation:
    return replace(outline, whys=tuple([its.why for its in decided]))
