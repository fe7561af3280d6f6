"""A simulated fleet as a console shows one: the scene of its last second, and what came before."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.console.pools import Seen
from cluster.console.traffic import Ring, Traffic
from cluster.console.verdict import Rules, Sources
from cluster.console.view import Cluster, Heard, Look, point, scene
from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.results import Served
from cluster.state import WorkerRecord
from cluster.worker_client import WorkerReport
from headrace.config_tenants import ServiceClassConfig
from headrace.metrics import Stage
from headrace.reports import ClassCounts, RouterReport
from headrace.traces import TraceRow
from headrace.values import Timeline, Usage
from router.decisions.tenants import Targets
from router.explanations import Explanation, Recent
from router.stages import RequestTimeline
from workers.scheduling.work import StepWork
from workers.virtual.worker import VirtualWorker

ROUTER = "simulated"
CLASS = "chat"
LOOK_SECONDS = 5.0
NUM_RECENT = 100
_VERDICTS = {"met": "met", "ttft": "missed_ttft", "tpot": "missed_tpot", "both": "missed_both"}


@dataclass
class Counts:
    """What a router counts; owned by the recording. A simulation's Watcher."""

    targets: Targets
    counts: Counter[str] = field(default_factory=Counter)
    ttft_seconds: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    last: list[Served] = field(default_factory=list)

    def step(self, worker_id: str, now: float, work: StepWork, seconds: float) -> None:
        """Steps are not shown."""

    def ended(self, served: Served) -> None:
        self.counts["ended"] += 1
        self.counts["generated_tokens"] += served.num_generated
        self.last = [*self.last[1 - NUM_RECENT :], served]
        if served.first_token_at is None or served.ended_at is None or served.outcome != "finished":
            self.verdicts["failed"] += 1
            return
        ttft = served.first_token_at - served.arrived_at
        self.ttft_seconds += ttft
        self.counts["cached_tokens"] += served.cached_tokens
        self.counts["computed_tokens"] += served.input_tokens - served.cached_tokens
        self.pairs[served.prefill or "", served.decode] += 1
        self.verdicts[_VERDICTS[self.targets.judge(ttft, _tpot(served))]] += 1


def record(
    fleet: Fleet, name: str, rows: Sequence[TraceRow], targets: Targets, until: float, wall_seconds: Callable[[], float]
) -> dict[str, Any]:
    """Runs the fleet for `until` seconds of the rows' time; {"scene": …, "history": …}."""
    counts = Counts(targets)
    simulation = Simulation(fleet, "ours", counts)
    traffic, ring = Traffic(300.0), Ring(LOOK_SECONDS, 180)
    rules = Rules({CLASS: ServiceClassConfig(ttft_seconds=targets.ttft_seconds, tpot_seconds=targets.tpot_seconds)})
    cluster = Cluster(
        name, fleet.card.name, "", f"Simulated: {fleet.num_workers:,} virtual workers. Nothing here is live."
    )
    began = wall_seconds() - until
    shown: dict[str, Any] = {}

    def look() -> None:
        nonlocal shown
        now = simulation.time.now
        report = _report(counts, simulation, rows, now)
        traffic.hear(now, {ROUTER: report})
        shown = scene(
            Look(
                cluster=cluster,
                wall_seconds=began + now,
                sources=Sources(0.0, num_routers=1),
                desired=Counter(worker.role.value for worker in simulation.workers.values()),
                workers=[_seen(worker, counts, now) for worker in simulation.workers.values()],
                reports={ROUTER: report},
                heard=[Heard(ROUTER, tuple(_recent(served, now) for served in reversed(counts.last)))],
                live=traffic.last(now, 10.0),
                minute=traffic.last(now, 60.0),
                window=traffic.last(now, 300.0),
            ),
            rules,
        )
        ring.add(now, point(shown))

    for number in range(int(until / LOOK_SECONDS) + 1):
        simulation.time.at(number * LOOK_SECONDS, look)
    simulation.run(rows, until)
    history = {"step_seconds": LOOK_SECONDS, "points": list(ring.points)}
    return {"scene": {**shown, "point": ring.points[-1]}, "history": {"recent": history, "day": history}}


def _report(counts: Counts, simulation: Simulation, rows: Sequence[TraceRow], now: float) -> RouterReport:
    arrived = [row for row in rows if row.seconds <= now]
    return RouterReport(
        ROUTER,
        "",
        now,
        arrivals=len(arrived),
        prompt_tokens=sum(row.input_tokens for row in arrived),
        computed_tokens=counts.counts["computed_tokens"],
        cached_tokens=counts.counts["cached_tokens"],
        generated_tokens=counts.counts["generated_tokens"],
        ended=counts.counts["ended"],
        in_flight=sum(router.num_in_flight - router.num_queued for router in simulation.routers),
        queued=sum(router.num_queued for router in simulation.routers),
        ttft_seconds=counts.ttft_seconds,
        classes={CLASS: ClassCounts(**counts.verdicts)},
        pairs=dict(counts.pairs),
    )


def _seen(worker: VirtualWorker, counts: Counts, now: float) -> Seen:
    info, role = worker.info, worker.role.value
    record = WorkerRecord(info.worker_id, role, info.generation, role, str(info.layout), "ready", now)
    report = WorkerReport(
        worker_id=info.worker_id,
        generation=info.generation,
        role=role,
        model=info.compatibility.model,
        blocks=worker.scheduler.counts(),
        load=worker.scheduler.load(),
        draining=False,
        num_steps=0,
        num_preemptions=0,
        num_handoffs_in=0,
        num_handoffs_out=0,
        max_num_seqs=info.capacity.max_num_seqs,
        cost=info.cost,
    )
    return Seen(record, report, 0.0)


def _recent(served: Served, now: float) -> Recent:
    ended = served.ended_at if served.ended_at is not None else now
    admitted = served.admitted_at if served.admitted_at is not None else ended
    first = served.first_token_at if served.first_token_at is not None else ended
    worker = Timeline(0.0, first - admitted, 0.0, ended - first, prefill_worker=served.prefill or "")
    outline = Explanation(
        f"r{served.number}",
        (),
        (),
        served.outcome,
        Usage(served.input_tokens, served.num_generated, served.cached_tokens),
        RequestTimeline(
            worker,
            admitted - served.arrived_at,
            served.decode,
            served.num_attempts,
            {Stage.QUEUE.value: admitted - served.arrived_at, Stage.PREFILL.value: first - admitted},
        ),
        ended - served.arrived_at,
        first - served.arrived_at,
        _tpot(served),
        service_class=CLASS,
    )
    return Recent(outline, ("pair" if served.prefill else "alone",), now - ended)


def _tpot(served: Served) -> float | None:
    if served.first_token_at is None or served.ended_at is None or served.num_generated < 2:
        return None
    return (served.ended_at - served.first_token_at) / (served.num_generated - 1)
