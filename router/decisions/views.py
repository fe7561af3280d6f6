"""Who keeps the view of the workers: of reports, the router's own ledger, health, and what other routers tell. Pure."""

from typing import Protocol

from headrace.values import Load, LoadReport, WorkerInfo
from router.decisions.costs import Costs, is_idle
from router.decisions.health import Health
from router.decisions.ledger import NOTHING, Ledger, plus
from router.decisions.told import Told, ToldLoads
from router.decisions.view import View, WorkerView

MANY_CHANGED = 0.25  # of all; to look at them all is no dearer


class Live(Protocol):
    """A worker's session, as far as the view goes."""

    info: WorkerInfo
    report: LoadReport | None


class Views:
    """Keeps the view, and makes anew only what changed since: a worker that reported, or on which this router placed
    something, or whose health changed, or of which another router told. Owned by router.requests, which passes on what it
    hears of sessions and of other routers."""

    def __init__(self, ledger: Ledger, health: Health) -> None:
        self._ledger = ledger
        self._health = health
        self._sessions: dict[str, Live] = {}
        self._views: dict[str, WorkerView] = {}
        self._last: View | None = None
        self._stale: set[str] = set()
        self._health_version = health.version
        self._told = ToldLoads()
        self._costs = Costs()
        self._costs_version = self._costs.version

    def heard(self, worker_id: str, session: Live | None, now: float) -> None:
        """The worker's session began, reported, or (None) ended."""
        if session is None:
            self._sessions.pop(worker_id, None)
            self._views.pop(worker_id, None)
            self._last = None
            self._costs.forget(worker_id)
            self._told.forget(worker_id)
        else:
            self._sessions[worker_id] = session
            self._stale.add(worker_id)
            if session.report is not None:
                report = session.report
                self._told.expire(now)
                self._told.reported(worker_id, now)
                self._costs.heard(session.info, report.cost, now, idle=is_idle(report.total))

    def told(self, told: Told, now: float) -> None:
        """Another router placed something."""
        if (load := told.load) is None:
            return
        prefill, decode = self._sessions.get(told.worker_id), self._sessions.get(load.decode)
        if prefill is not None and decode is not None:
            self._told.hear(told, load.at_most(prefill.info.capacity, decode.info.capacity), now)

    def view(self) -> View:
        """The workers as they are believed to be now."""
        stale = self._stale | self._ledger.drain_changed() | self._told.drain_changed()
        versions = self._health.version, self._costs.version
        if versions != (self._health_version, self._costs_version):
            self._health_version, self._costs_version = versions
            stale.update(self._sessions)
        self._stale.clear()
        last, changed = self._last, list[WorkerView]()
        follows = len(stale) <= MANY_CHANGED * len(self._views)
        for worker_id in stale:
            session = self._sessions.get(worker_id)
            if session is not None:
                worker = worker_view(session.info, session.report, self._ledger, self._health, self._costs, self._told)
                before = self._views.get(worker_id)
                follows = follows and before is not None and _serves_as(before, worker)
                self._views[worker_id] = worker
                changed.append(worker)
        if changed or last is None:
            workers = tuple(self._views.values())
            last = self._last = last.after(workers, changed) if last is not None and follows else View(workers)
        return last


def _serves_as(before: WorkerView, after: WorkerView) -> bool:
    """Whether it may be in the pools in which it was, as one of whom nothing is new but its figures."""
    return (
        before.decode_limit == after.decode_limit
        and before.prefill_limit == after.prefill_limit
        and before.ejected_until == after.ejected_until
    )


def net_load(total: Load, yours: Load, own: Load) -> Load:
    """(total − yours) + own: others' work as the worker reports it, and ours as we know it (design 5.6).

    Blocks are only the worker's to know and stay as reported; who prefills no placement asks. A report may be older than
    what left since; nothing goes below zero.
    """
    return Load(
        num_waiting=max(total.num_waiting - yours.num_waiting, 0) + own.num_waiting,
        num_running=max(total.num_running - yours.num_running, 0) + own.num_running,
        waiting_prefill_tokens=max(total.waiting_prefill_tokens - yours.waiting_prefill_tokens, 0)
        + own.waiting_prefill_tokens,
        context_tokens=max(total.context_tokens - yours.context_tokens, 0) + own.context_tokens,
        used_blocks=total.used_blocks,
        pinned_blocks=total.pinned_blocks,
        claimed_tokens=max(total.claimed_tokens - yours.claimed_tokens, 0) + own.claimed_tokens,
    )


def worker_view(
    info: WorkerInfo,
    report: LoadReport | None,
    ledger: Ledger,
    health: Health,
    costs: Costs,
    told: ToldLoads | None = None,
) -> WorkerView:
    """A worker that has not reported yet is taken to be empty but for what this router and those that tell it placed
    there."""
    own, beside = ledger.own(info.worker_id), ledger.beside(info.worker_id)
    if told is not None and (others := told.of(info.worker_id)) is not NOTHING:
        own = plus(own, others)
    cost = costs.of(info, report.cost, own, report.total) if report is not None else costs.of(info, info.cost, own)
    ejected_until, unlinked = health.ejected_until(info.worker_id), health.unlinked(info.worker_id)
    if report is None:
        free_blocks = info.capacity.num_blocks
        return WorkerView(info, info.role, own, cost, free_blocks, False, ejected_until, unlinked, beside)
    return WorkerView(
        info,
        report.role,
        net_load(report.total, report.yours, own),
        cost,
        report.free_blocks,
        report.draining,
        ejected_until,
        unlinked,
        beside,
    )
