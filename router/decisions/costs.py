"""What workers' steps cost, as they report it; whoever has not measured a kind of work yet is lent another's figures. Pure.

A worker reports its own fit, line by line (prefill, decode, transfer), and the guess it started from where it has no fit.
Priced by that guess, which is a laptop's, it would look slower than all who have measured, get nothing to do, and so
never measure. Workers of one class and layout lend to each other: the last one heard of lends.

A fit grows old, too: who was slow once is spared while others are cheaper, and what it does not do it does not measure. So
the price of a worker that is idle, and slower than most of its kind, comes nearer to theirs, half of the way in
HALF_LIFE_SECONDS and never beyond; one prompt then tries it, for with work it has its own price again. If its fit is faster
after that, it stays near; if not, it is at its own price, and the next approach takes twice as long, up to
MAX_HALF_LIFE_SECONDS: a worker that is slow by nature is tried about once in four hours in the end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import exp2
from operator import attrgetter
from statistics import median_low

from headrace.costmodel import CostModel
from headrace.values import Compatibility, Load, ParallelLayout, WorkerInfo

GUESS = CostModel()
LINES = tuple(
    tuple(name for name in CostModel.__dataclass_fields__ if name.startswith(line))
    for line in ("prefill", "decode", "transfer")
)
FIGURES = {line: attrgetter(*line) for line in LINES}
GUESSED = {line: figures(GUESS) for line, figures in FIGURES.items()}
Kind = tuple[Compatibility, ParallelLayout]

HALF_LIFE_SECONDS = 60.0
MAX_HALF_LIFE_SECONDS = 32 * HALF_LIFE_SECONDS
SLOW_RATIO = 1.05  # than most of its kind
FASTER_RATIO = 0.99  # than it was
TRIED_FRACTION = 0.5  # of the way: whoever gets work from there on, gets it for that
MEDIAN_SECONDS = 10.0  # for which what most of a kind take is not looked at anew


def _usual_prefill(cost: CostModel) -> float:
    return cost.prefill_seconds(2048)


def _usual_step(cost: CostModel) -> float:
    return cost.decode_step_seconds(8, 8 * 1024)


# What is compared of a line: the seconds of a usual piece of work. Of links there is nothing like it.
USUAL = _usual_prefill, _usual_step


@dataclass(slots=True)
class _Approach:
    """One slow worker's way to the price of its kind, in one line. `tried`: what its usual work took as its trial began."""

    idle_since: float
    half_life: float = HALF_LIFE_SECONDS
    tried: float | None = None

    def fraction(self, now: float) -> float:
        return 1 - exp2(-max(now - self.idle_since, 0.0) / self.half_life)


@dataclass(slots=True)
class _Peers:
    """The workers of one kind. `usual`: of each line the figures of the one in the middle."""

    costs: dict[str, CostModel] = field(default_factory=dict)
    usual: tuple[CostModel, ...] = ()
    looked_at: float = float("-inf")


class Costs:
    """Owns the figures that are lent, of one router. `version` changes when a kind of work is measured for the first
    time: from then on all who have not measured it are priced anew."""

    def __init__(self) -> None:
        self.version = 0
        self._lent: dict[Kind, dict[str, float]] = {}
        self._complete: dict[str, CostModel] = {}  # by worker: its last report, where it has measured everything
        self._peers: dict[Kind, _Peers] = {}
        self._approaches: dict[str, list[_Approach | None]] = {}  # by worker, by line
        self._nearer: dict[str, CostModel] = {}  # by worker: its price while it is idle

    def heard(self, info: WorkerInfo, cost: CostModel, now: float, *, idle: bool) -> None:
        """The worker reported this, and whether it has anything to do."""
        kind = info.compatibility, info.layout
        peers = self._peers.setdefault(kind, _Peers())
        peers.costs[info.worker_id] = cost
        if idle or info.worker_id in self._approaches:
            self._approach(info.worker_id, cost, peers, now, idle)
        lent = self._lent.setdefault(kind, {})
        measured = [line for line in LINES if _measured(cost, line)]
        for line in measured:
            self.version += line[0] not in lent
            lent.update(zip(line, FIGURES[line](cost), strict=True))
        if len(measured) == len(LINES):
            self._complete[info.worker_id] = cost
        else:
            self._complete.pop(info.worker_id, None)

    def forget(self, worker_id: str) -> None:
        """The worker is gone; what it lent stays."""
        for by_worker in (self._complete, self._approaches, self._nearer, *(p.costs for p in self._peers.values())):
            by_worker.pop(worker_id, None)  # type: ignore[attr-defined]

    def _approach(self, worker: str, cost: CostModel, peers: _Peers, now: float, idle: bool) -> None:
        if now >= peers.looked_at + MEDIAN_SECONDS:
            peers.usual, peers.looked_at = tuple(_usual(peers.costs.values(), line) for line in range(len(USUAL))), now
        approaches = self._approaches.get(worker) or [None] * len(USUAL)
        nearer = cost
        for line, seconds in enumerate(USUAL):
            own, theirs = seconds(cost), seconds(peers.usual[line])
            if own <= SLOW_RATIO * theirs or not _measured(cost, LINES[line]):
                approaches[line] = None
                continue
            approach = approaches[line] = _next(approaches[line] or _Approach(now), own, now, idle)
            if idle and (fraction := approach.fraction(now)):
                nearer = _between(nearer, peers.usual[line], LINES[line], fraction)
        if any(approaches):
            self._approaches[worker] = approaches
        else:
            self._approaches.pop(worker, None)
        if nearer is not cost:
            self._nearer[worker] = nearer
        else:
            self._nearer.pop(worker, None)

    def of(self, info: WorkerInfo, cost: CostModel, *loads: Load) -> CostModel:
        """The worker's cost, with what it has not measured itself lent by others. `loads`: all that it has to do."""
        if self._nearer and info.worker_id in self._nearer and all(map(is_idle, loads)):
            cost = self._nearer[info.worker_id]
        if self._complete.get(info.worker_id) is cost:
            return cost
        lent = self._lent.get((info.compatibility, info.layout))
        if not lent:
            return cost
        missing = {name: lent[name] for line in LINES if line[0] in lent and not _measured(cost, line) for name in line}
        return replace(cost, **missing) if missing else cost


def is_idle(load: Load) -> bool:
    return not (load.num_running or load.num_waiting or load.waiting_prefill_tokens)


def _next(approach: _Approach, own: float, now: float, idle: bool) -> _Approach:
    """The approach after a report: of an idle worker, or of one at work."""
    if not idle:
        if approach.tried is None and approach.fraction(now) >= TRIED_FRACTION:
            approach.tried = own
        elif approach.tried is None:
            approach.idle_since = now  # it measures itself, at its own price
    elif approach.tried is not None:
        if own <= FASTER_RATIO * approach.tried:
            approach.half_life = HALF_LIFE_SECONDS
        else:
            approach.idle_since, approach.half_life = now, min(2 * approach.half_life, MAX_HALF_LIFE_SECONDS)
        approach.tried = None
    return approach


def _usual(costs: Iterable[CostModel], line: int) -> CostModel:
    """The one in the middle of those that measured the line; the guess where none did."""
    measured = [cost for cost in costs if _measured(cost, LINES[line])]
    if not measured:
        return GUESS
    middle = median_low(map(USUAL[line], measured))
    return next(cost for cost in measured if USUAL[line](cost) == middle)


def _between(cost: CostModel, other: CostModel, line: tuple[str, ...], fraction: float) -> CostModel:
    """That line so far on its way to the other's."""
    return replace(
        cost, **{name: (1 - fraction) * getattr(cost, name) + fraction * getattr(other, name) for name in line}
    )


def _measured(cost: CostModel, line: tuple[str, ...]) -> bool:
    return bool(FIGURES[line](cost) != GUESSED[line])
