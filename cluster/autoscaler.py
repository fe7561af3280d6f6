"""The autoscaler at work: a part of the leading controller that looks, decides (`cluster.scaling`), records and writes.

A turn reads what routers and leases say, decides, and writes what is desired together with the record of why; the
controller's loop does the rest, as for anyone who writes `desired`. While Redis is away nothing is decided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.leased import Leased, leased_workers
from cluster.lifecycle import Desired, ObservedWorker, Phase
from cluster.planning.load import Worker
from cluster.router_reports import ended_routers, router_reports
from cluster.scaling.decide import changes, decide
from cluster.scaling.forecast import History
from cluster.scaling.observe import Member, observe
from cluster.scaling.traffic import Meter
from cluster.scaling.values import Decision, Inputs, Memory, Recorded, Rules, Size
from cluster.scaling_state import ScalingState
from cluster.worker_client import WorkerReport
from headrace.clock import Clock
from headrace.config import ClusterConfig
from headrace.store import Store
from headrace.values import Role, WorkerInfo

FAILURES = 3  # in a row: whoever starts again after so many is not to be counted on
DRY_RUN = "not carried out: autoscaling.mode is dry-run"


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker of the controller's table, what it last said of itself, and how often in a row its slot failed before."""

    worker: ObservedWorker
    report: WorkerReport | None = None
    failures: int = 0


class Autoscaler:
    """Owns the meter, the history of arrivals and what is remembered from turn to turn. Only a controller that leads
    calls it. `prefix`: what workers' ids begin with before POOL-INDEX."""

    def __init__(self, config: ClusterConfig, store: Store, clock: Clock, prefix: str = "") -> None:
        self._cluster = config.name
        self._prefix = prefix
        self._rules = Rules.of(config)
        self._interval_seconds = config.autoscaling.interval_seconds
        self._store = store
        self._state = ScalingState(store, config.name)
        self._clock = clock
        self._due_at = clock.now()
        self._meter = Meter(self._rules.window_seconds)
        self._history: History | None = None
        self._looked_at: float | None = None
        self._memory = Memory()
        self._known: dict[str, Worker] = {}
        self._number = 0
        self._open: list[Recorded] = []
        self._said: tuple[object, ...] = ()

    async def turn(self, desired: Desired, seen: Sequence[Seen], reserved_gpus: int = 0) -> Desired:
        """What is desired from now on; the same where nothing is to change, or it is not time yet. `reserved_gpus` of the
        budget are a canary's, which pools do not count as theirs: all of the load is sized for, so that it can come back.
        StoreUnavailable when Redis does not answer: then nothing was changed, or all that was decided."""
        at = self._clock.now()
        if at < self._due_at:
            return desired
        self._due_at = at + self._interval_seconds
        history = await self._remembered()
        now = await self._store.time()
        complete = await self._look(history, now, at_work(seen))
        inputs = await self._inputs(history, desired, seen, now)
        budget = self._rules.budget_gpus
        if reserved_gpus and budget is not None:
            # What the canary's workers hold by now is among both.
            others = max(inputs.other_gpus - reserved_gpus, 0)
            rules = replace(self._rules, budget_gpus=max(budget - reserved_gpus, 0))
            inputs = replace(inputs, rules=rules, other_gpus=others)
        decision = decide(inputs)
        before = self._number, self._open, self._said
        carried_out = changes(decision, inputs) and self._rules.mode != "dry-run"
        records = self._outcomes(inputs, carried_out)
        turn = Recorded(self._number, inputs, decision)
        if self._is_news(inputs, decision):
            self._number += 1
            turn = replace(turn, number=self._number, outcome=_outcome(self._rules.mode, inputs, decision))
            records.append(turn)
        after = _applied(desired, decision) if carried_out else desired
        arrivals = history.arrivals if complete else None
        if not await self._state.commit(turn, records, arrivals, after if carried_out else None, desired):
            # An operator was quicker: this rests on what is desired no more. The next round decides anew.
            self._number, self._open, self._said = before
            self._due_at = at
            return desired
        self._memory = decision.memory
        if turn in records and not turn.outcome:
            self._open.append(turn)
        return after

    async def _remembered(self) -> History:
        """Once: what an earlier controller knew."""
        if self._history is None:
            before, arrivals = await self._state.now(), await self._state.arrivals()
            decisions = await self._state.decisions()
            self._history = History(arrivals)
            self._open = [one for one in decisions if not one.outcome]
            self._number = max((one.number for one in decisions), default=0)
            if before is not None:
                self._memory = before.decision.memory
                self._known = {name: pool.worker for name, pool in before.inputs.pools.items()}
        return self._history

    async def _look(self, history: History, now: float, routers: frozenset[str] | None) -> bool:
        """Counts what arrived; whether a stretch of the history is complete."""
        reports = await router_reports(self._store, self._cluster)
        arrived = self._meter.look(reports, now, await ended_routers(self._store, self._cluster), routers)
        seconds = now - self._looked_at if self._looked_at is not None and reports else 0.0
        self._looked_at = now
        return history.add(arrived, seconds, now)

    async def _inputs(self, history: History, desired: Desired, seen: Sequence[Seen], now: float) -> Inputs:
        leases = {
            leased.info.worker_id.removeprefix(self._prefix): leased
            for leased in await leased_workers(self._store, self._cluster)
        }
        clock = self._clock.now()
        members = [member(one, leases.get(one.worker.worker_id), clock) for one in seen]
        pools = observe(self._rules, desired, members, self._known)
        with_lease = {one.pool for one in members if one.speed is not None}
        self._known.update({name: pool.worker for name, pool in pools.items() if name in with_lease})
        traffic = self._meter.traffic(now)
        forecast = history.forecast(traffic.level, self._rules.lead_seconds)
        others = sum(one.worker.layout.world_size for one in seen if one.worker.pool not in self._rules.pools)
        return Inputs(now, self._rules, pools, traffic, forecast, self._memory, desired.trusted, others)

    def _is_news(self, inputs: Inputs, decision: Decision) -> bool:
        """A change, or another word on why there is none: equal turns are recorded once."""
        said = (
            decision.kind,
            tuple(sorted(decision.pools.items())),
            tuple(sorted(decision.advised.items())),
            bool(decision.needs.unreachable),
            bool(inputs.traffic.routers),
            len(decision.notes),
        )
        news, self._said = said != self._said or (decision.kind != "hold" and self._rules.mode != "dry-run"), said
        return news

    def _outcomes(self, inputs: Inputs, carried_out: bool) -> list[Recorded]:
        """The open decisions of which it is known now what came of them."""
        known: list[Recorded] = []
        for one in self._open:
            seconds = inputs.now - one.inputs.now
            if all(
                _reached(one.decision.pools.get(name), pool.desired, pool.settled)
                for name, pool in inputs.pools.items()
            ):
                known.append(replace(one, outcome=f"reached after {seconds:.0f} s"))
            elif carried_out:
                known.append(replace(one, outcome=f"superseded by {self._number + 1} after {seconds:.0f} s"))
        self._open = [one for one in self._open if one.number not in {done.number for done in known}]
        return known


def _reached(wanted: Size | None, desired: Size, settled: bool) -> bool:
    return wanted == desired and settled


def _outcome(mode: str, inputs: Inputs, decision: Decision) -> str:
    """Empty while something is under way."""
    if not changes(decision, inputs):
        return "nothing to do"
    return DRY_RUN if mode == "dry-run" else ""


def _applied(desired: Desired, decision: Decision) -> Desired:
    pools = {
        name: replace(pool, replicas=decision.pools[name].replicas, lent=decision.pools[name].lent)
        if name in decision.pools
        else pool
        for name, pool in desired.pools.items()
    }
    return Desired(pools, desired.trusted)


def at_work(seen: Sequence[Seen]) -> frozenset[str] | None:
    """Routers of which some worker has a request, by workers' own words; None where one that serves says nothing."""
    reports = [one.report for one in seen if one.worker.phase in (Phase.READY, Phase.DRAINING)]
    if None in reports:
        return None
    return frozenset(router for report in reports if report is not None for router in report.routers)


def member(seen: Seen, leased: Leased | None, now: float) -> Member:
    """A lease of another generation says nothing of this worker. One that was told to drain by its host (a preStop hook),
    or whose node is about to go, leaves, though its controller did not ask for it."""
    worker, report = seen.worker, seen.report
    told = worker.phase is Phase.READY and (worker.leaves_at is not None or (report is not None and report.draining))
    info = leased.info if leased is not None and leased.info.generation == worker.generation else None
    counts = report.blocks if report is not None else None
    return Member(
        worker.pool,
        worker.role,
        Phase.DRAINING if told else worker.phase,
        now - worker.since,
        worker.pending,
        speed(info) if info is not None else None,
        counts.active + counts.pinned if counts is not None else 0,
        counts.total if counts is not None else 0,
        report.load.waiting_prefill_tokens if report is not None else 0,
        worker.leaves_at is not None,
        worker.phase is Phase.STARTING and seen.failures >= FAILURES,
        *(decoding(report) if report is not None else (0, 0)),
    )


def decoding(report: WorkerReport) -> tuple[int, int]:
    """(sequences, their tokens). Where roles have pools of their own, without those that compute their prompt: that is
    prefill's work wherever it is done, and where prompts pile up, decode workers that help would look too full to be
    lent. Who prefills by now, but did decode, has some of the requests that are its own."""
    load, role = report.load, Role(report.role)
    if role is Role.UNIFIED:
        return load.num_running, load.context_tokens
    running, tokens = load.num_running - load.num_prefilling, load.context_tokens - load.prefilling_tokens
    if role is Role.DECODE:
        return running, tokens
    number = min(running, report.num_requests)
    return number, round(tokens * number / running) if number else 0


def speed(info: WorkerInfo) -> Worker:
    """A worker as planning knows it."""
    capacity, block_size = info.capacity, info.compatibility.block_size
    return Worker(
        info.cost,
        float(capacity.num_blocks * block_size),
        capacity.max_num_seqs,
        capacity.max_step_tokens,
        capacity.block_bytes / block_size,
    )


def sizes(pools: Mapping[str, Size]) -> str:
    return ", ".join(f"{name} {size}" for name, size in pools.items())
