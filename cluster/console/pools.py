"""A pool's figures from what its workers say, and whether it is short of anything. Pure.

Pressure is what part of the pool is taken, by the scarcest of three: KV blocks that cannot be evicted, places for
sequences, and seconds of prompts that wait (of those that admission lets workers have before them).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.lifecycle import Phase
from cluster.state import WorkerRecord
from cluster.worker_client import WorkerReport
from headrace.values import BlockCounts

SHORT_PRESSURE = 0.9


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker: what the controller says of it, what it last said itself, `age_seconds` ago, and why it is silent if it
    is."""

    record: WorkerRecord
    report: WorkerReport | None = None
    age_seconds: float | None = None
    silence: str = ""

    @property
    def role(self) -> str:
        return self.report.role if self.report is not None else self.record.role

    @property
    def kv_used(self) -> float | None:
        """The part of its blocks that running sequences and pins hold."""
        if self.report is None or not self.report.blocks.total:
            return None
        return (self.report.blocks.active + self.report.blocks.pinned) / self.report.blocks.total

    @property
    def trouble(self) -> str:
        """Why it is not as it should be, in its own words or others'; empty when it is."""
        if self.silence:
            return self.silence
        unhealthy = self.report.unhealthy_reason if self.report is not None else ""
        return unhealthy or self.record.reason

    @property
    def backlog_seconds(self) -> float:
        """For how long the prompts that wait there will, by its own cost model: until those are computed that are at work,
        too. Where none waits, none waits for these."""
        if self.report is None or not self.report.load.num_waiting:
            return 0.0
        tokens = self.report.load.waiting_prefill_tokens
        return self.report.cost.prefill_seconds(tokens) if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Pool:
    """`desired` None: nobody says how many. Sums are over the workers that are ready and have answered, `num_heard`;
    `backlog_seconds` is their mean over those that prefill."""

    name: str
    desired: int | None
    phases: Mapping[str, int] = field(default_factory=dict)
    roles: Mapping[str, int] = field(default_factory=dict)
    ready_roles: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[str, int] = field(default_factory=dict)
    num_ranks: int = 0
    num_heard: int = 0
    num_silent: int = 0
    oldest_seconds: float = 0.0
    blocks: BlockCounts = field(default_factory=BlockCounts)
    num_running: int = 0
    num_seats: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    backlog_seconds: float = 0.0
    num_preemptions: int = 0
    pressures: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_ready(self) -> int:
        return self.phases.get(Phase.READY, 0)

    @property
    def num_missing(self) -> int:
        return max((self.desired or 0) - self.num_ready, 0)

    @property
    def pressure(self) -> float:
        return max(self.pressures.values(), default=0.0)

    @property
    def pressed_by(self) -> str:
        return max(self.pressures, key=lambda name: self.pressures[name], default="")

    @property
    def is_short(self) -> bool:
        return self.pressure >= SHORT_PRESSURE

    @property
    def decodes(self) -> bool:
        return any(self.roles.get(role, 0) for role in ("decode", "unified"))


def pools_of(seen: Iterable[Seen], desired: Mapping[str, int], max_backlog_seconds: float) -> list[Pool]:
    """In the order of their names: those that are desired, and those that have workers."""
    members: dict[str, list[Seen]] = {name: [] for name in desired}
    for worker in seen:
        members.setdefault(worker.record.pool, []).append(worker)
    return [
        _pool(name, desired.get(name, 0) if desired else None, members[name], max_backlog_seconds)
        for name in sorted(members)
    ]


def ranks_of(layout: str) -> int:
    """Of a layout as it is written; 1 where it is not one."""
    found = re.fullmatch(r"tp(\d{1,4})·pp(\d{1,4})", layout)
    return int(found[1]) * int(found[2]) if found else 1


def _pool(name: str, desired: int | None, seen: Sequence[Seen], max_backlog_seconds: float) -> Pool:
    ready = [worker for worker in seen if worker.record.phase == Phase.READY]
    heard = [(worker, worker.report) for worker in ready if worker.report is not None]
    reports = [report for _, report in heard]
    blocks = BlockCounts(
        *(
            sum(getattr(report.blocks, kind) for report in reports)
            for kind in ("free", "cached", "active", "pinned", "quarantined", "stranded")
        )
    )
    backlogs = [worker.backlog_seconds for worker, report in heard if report.role != "decode"]
    backlog_seconds = sum(backlogs) / len(backlogs) if backlogs else 0.0
    running = sum(report.load.num_running for report in reports)
    seats = sum(report.max_num_seqs for report in reports)
    pressures = {
        "kv": (blocks.active + blocks.pinned) / blocks.total if blocks.total else 0.0,
        "seats": running / seats if seats else 0.0,
        "backlog": backlog_seconds / max_backlog_seconds,
    }
    return Pool(
        name=name,
        desired=desired,
        phases=Counter(worker.record.phase for worker in seen),
        roles=Counter(worker.role for worker in seen),
        ready_roles=Counter(worker.role for worker in ready),
        layouts=Counter(worker.record.layout for worker in seen),
        num_ranks=sum(ranks_of(worker.record.layout) for worker in seen if worker.record.phase != Phase.DEAD),
        num_heard=len(heard),
        num_silent=sum(bool(worker.silence) for worker in ready),
        oldest_seconds=max((worker.age_seconds or 0.0 for worker, _ in heard), default=0.0),
        blocks=blocks,
        num_running=running,
        num_seats=seats,
        num_waiting=sum(report.load.num_waiting for report in reports),
        waiting_tokens=sum(report.load.waiting_prefill_tokens for report in reports),
        backlog_seconds=backlog_seconds,
        num_preemptions=sum(report.num_preemptions for report in reports),
        pressures=pressures,
    )
