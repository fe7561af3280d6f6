"""Looks at clusters that never were, for tests of what is made of them."""

from typing import Any

from cluster.console.pools import Seen
from cluster.console.verdict import Rules, Sources
from cluster.console.view import Cluster, Look
from cluster.growth import Growth
from cluster.state import WorkerRecord
from cluster.worker_client import WorkerReport
from headrace.config_tenants import ServiceClassConfig
from headrace.costmodel import CostModel
from headrace.metrics import Stage
from headrace.reports import RouterReport
from headrace.values import BlockCounts, Load, Timeline, Usage
from router.explanations import Explanation, Recent
from router.stages import RequestTimeline

CHAT = Rules({"chat": ServiceClassConfig(ttft_seconds=0.5, tpot_seconds=0.05)})
FINE = Sources(redis_seconds=0.1, num_routers=1)
COST = CostModel(prefill_base_seconds=0.0, prefill_token_seconds=1e-3, prefill_token_context_seconds=0.0)


def report(worker_id: str, role: str, *, used: int = 0, total: int = 100, **load: int) -> WorkerReport:
    blocks = BlockCounts(free=total - used, active=used)
    return WorkerReport(worker_id, 1, role, "m", blocks, Load(**load), False, 0, 0, 0, 0, max_num_seqs=10, cost=COST)


def worker(worker_id: str, role: str = "decode", phase: str = "ready", **said: Any) -> Seen:
    """`silence` and what `report` takes; it has said nothing where none of that is given."""
    record = WorkerRecord(worker_id, role, 1, role, "tp2·pp1", phase, 1.0)
    silence = said.pop("silence", "")
    answer = report(worker_id, role, **said) if said else None
    return Seen(record, answer, 0.5 if answer else None, silence)


def growth(seconds: float = 60.0, arrivals: int = 0, **verdicts: int) -> Growth:
    """Of requests of the class chat."""
    classes = {("chat", verdict): number for verdict, number in verdicts.items()}
    return Growth(seconds, {"arrivals": arrivals or sum(verdicts.values())}, classes)


def look(**fields: Any) -> Look:
    return Look(Cluster("c", "m", "http://h/v1"), 1000.0, fields.pop("sources", FINE), **fields)


def routed(router_id: str = "r", seconds: float = 0.0, **counts: Any) -> RouterReport:
    return RouterReport(router_id, "127.0.0.1:1", seconds, **counts)


STAGES = {
    Stage.EDGE.value: 0.01,
    Stage.QUEUE.value: 0.25,
    Stage.PLACEMENT.value: 0.01,
    Stage.TICKET_WAIT.value: 0.1,
    Stage.PREFILL.value: 0.2,
    Stage.TRANSFER.value: 0.05,
    Stage.JOIN.value: 0.01,
    Stage.FIRST_TOKEN.value: 0.07,
}


def recent(request_id: str = "a", outcome: str = "finished", *, ago: float | None = 1.0, **fields: Any) -> Recent:
    worker = Timeline(0.1, 0.2, 0.05, 1.0, prefill_worker="p", join_seconds=0.01)
    timeline = RequestTimeline(worker, 0.25, "d", 1, STAGES)
    outline = Explanation(request_id, (), (), outcome, Usage(100, 5, 32), timeline, 2.0, 0.7, 0.1, **fields)
    return Recent(outline, ("pair",), ago)
