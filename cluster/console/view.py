"""A scene: the one JSON value that the page shows. Pure; every list in it is bounded, and says how many it leaves out.

Names and reasons are text of others: they are passed on as they are, cut to a length, and the page shows them as text.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from cluster.canary.report import Standing, figures
from cluster.console.decisions import scaling
from cluster.console.planned import Measured, compared
from cluster.console.pools import Pool, Seen, pools_of
from cluster.console.verdict import Rules, Sources, judge, pressed, rolled_back
from cluster.growth import NOTHING, Growth, attainment, num_ended
from cluster.scaling.values import Recorded
from headrace.errors import ConfigError
from headrace.metrics import Stage
from headrace.reports import RouterReport
from router.explanations import Recent
from router.flight import STATES

Json = dict[str, Any]
MAX_TEXT = 300
MAX_WORKERS = 2000
MAX_PAIRS = 64
MAX_REQUESTS = 100
MAX_FAILURES = 100

WORKER_COLUMNS = (
    "id",
    "generation",
    "pool",
    "role",
    "phase",
    "kv",
    "running",
    "waiting",
    "waiting_tokens",
    "pinned",
    "handoffs_in",
    "handoffs_out",
    "age",
    "trouble",
)
STAGES: Mapping[str, tuple[Stage, ...]] = {
    "queue": (Stage.EDGE, Stage.QUEUE, Stage.PLACEMENT),
    "retry": (Stage.RETRY,),
    "wait": (Stage.WORKER_QUEUE, Stage.TICKET_WAIT),
    "prefill": (Stage.PREFILL,),
    "transfer": (Stage.TRANSFER, Stage.JOIN),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """What does not change while it is watched. `recorded`: what the page says it shows, where it is not live."""

    name: str
    model: str
    api: str
    recorded: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """What one router listed, or why it did not."""

    router_id: str
    requests: tuple[Recent, ...] = ()
    silence: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """All that was seen, at `wall_seconds` of Unix time. `minute`, `live`, `window`: the growth of the last minute, of
    the last seconds, of five minutes."""

    cluster: Cluster
    wall_seconds: float
    sources: Sources
    desired: Mapping[str, int] = field(default_factory=dict)
    workers: Sequence[Seen] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    reports: Mapping[str, RouterReport] = field(default_factory=dict)
    heard: Sequence[Heard] = ()
    live: Growth = NOTHING
    minute: Growth = NOTHING
    window: Growth = NOTHING
    scaling: tuple[Recorded, Sequence[Recorded]] | None = None
    plan: Json | ConfigError | None = None
    canary: Standing | None = None


def scene(look: Look, rules: Rules) -> Json:
    pools = pools_of(look.workers, look.desired, rules.max_backlog_seconds)
    canary = figures(look.canary) if look.canary is not None else None
    verdict = judge(rules, look.sources, pools, look.minute, look.window, rolled_back(canary))
    return {
        "at": look.wall_seconds,
        "cluster": asdict(look.cluster),
        "sources": {
            "redis_seconds": look.sources.redis_seconds,
            "redis_why": _cut(look.sources.redis_why),
            "controller": _cut(look.sources.controller),
        },
        "verdict": {
            "level": verdict.level,
            "title": _cut(verdict.title),
            "lines": [{"level": line.level, "text": _cut(line.text), "where": line.where} for line in verdict.lines],
        },
        "targets": _targets(look, rules),
        "traffic": _traffic(look),
        "pools": [_pool(pool) for pool in pools],
        "workers": _workers(look.workers),
        "failures": [
            {"worker": _cut(worker), "reason": _cut(why)} for worker, why in list(look.failures.items())[:MAX_FAILURES]
        ],
        "flows": _flows(look.minute, {worker.record.worker_id: worker.record.pool for worker in look.workers}),
        "routers": _routers(look),
        "requests": _requests(look.heard),
        "scaling": scaling(*look.scaling) if look.scaling is not None else None,
        "plan": _plan(look, pools),
        "canary": canary,
    }


def _plan(look: Look, pools: Sequence[Pool]) -> Json | None:
    """Laid beside what is; `error` where that cannot be."""
    if look.plan is None:
        return None
    tpots = [one.outline.tpot_seconds for heard in look.heard for one in heard.requests]
    known = [seconds for seconds in tpots if seconds is not None]
    measured = Measured(pools, look.live, look.minute, look.window, median(known) if known else None)
    try:
        if isinstance(look.plan, ConfigError):
            raise look.plan
        return compared(look.plan, measured)
    except ConfigError as error:
        return {"error": _cut(error.message)}


def point(shown: Json) -> Json:
    """What is kept of a scene to draw it over time."""
    traffic = shown["traffic"]
    return {
        "at": shown["at"],
        **{name: traffic[name] for name in ("arrivals", "generated", "hit_rate", "queued", "in_flight", "ttft")},
        "attainment": traffic["attainment"],
        "pools": {
            pool["name"]: [pool["ready"], pool["desired"], round(pool["pressures"]["kv"], 3), pool["pressure"]]
            for pool in shown["pools"][:16]
        },
    }


def as_json(shown: Json) -> bytes:
    """As a browser reads it: JSON knows no number that is none, and one of them was the end of the page."""
    try:
        return json.dumps(shown, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(finite(shown), separators=(",", ":"), allow_nan=False).encode()


def finite(value: Any) -> Any:
    """None in the place of what is no finite number, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def _traffic(look: Look) -> Json:
    """Rates by the second of the last seconds; the queue as it stands."""
    live, reports = look.live, look.reports.values()
    return {
        "arrivals": round(live.per_second("arrivals"), 3),
        "ended": round(live.per_second("ended"), 3),
        "prompt_tokens": round(live.per_second("prompt_tokens"), 1),
        "computed_tokens": round(live.per_second("computed_tokens"), 1),
        "generated": round(live.per_second("generated_tokens"), 1),
        "hit_rate": look.minute.hit_rate,
        "ttft": look.minute.mean_ttft_seconds,
        "attainment": attainment(look.minute.all_outcomes),
        "in_flight": sum(report.in_flight for report in reports),
        "queued": sum(report.queued for report in reports),
        "queued_tokens": sum(report.queued_tokens for report in reports),
        "oldest_queued_seconds": max((report.oldest_queued_seconds for report in reports), default=0.0),
    }


def _targets(look: Look, rules: Rules) -> list[Json]:
    """The classes that are configured, and those that had requests; "" is that of requests without one."""
    names = sorted({*rules.classes, *(name for name, _ in look.window.classes)})
    shown = []
    for name in names:
        its = rules.classes.get(name)
        spans = {}
        for span, growth in (("minute", look.minute), ("window", look.window)):
            counts = growth.outcomes(name)
            spans[span] = {**asdict(counts), "ended": num_ended(counts), "attainment": attainment(counts)}
        shown.append(
            {
                "name": _cut(name),
                "ttft_seconds": its.ttft_seconds if its else None,
                "tpot_seconds": its.tpot_seconds if its else None,
                "objective": rules.objective,
                **spans,
            }
        )
    return shown


def _pool(pool: Pool) -> Json:
    held = pool.blocks.active + pool.blocks.pinned
    return {
        "name": pool.name,
        "desired": pool.desired,
        "ready": pool.num_ready,
        "phases": dict(pool.phases),
        "roles": dict(pool.roles),
        "layouts": {_cut(layout): number for layout, number in pool.layouts.items()},
        "ranks": pool.num_ranks,
        "heard": pool.num_heard,
        "silent": pool.num_silent,
        "oldest_seconds": round(pool.oldest_seconds, 1),
        "running": pool.num_running,
        "seats": pool.num_seats,
        "waiting": pool.num_waiting,
        "waiting_tokens": pool.waiting_tokens,
        "backlog_seconds": round(pool.backlog_seconds, 3),
        "blocks": {
            "held": held,
            "pinned": pool.blocks.pinned,
            "cached": pool.blocks.cached,
            "total": pool.blocks.total,
        },
        "preemptions": pool.num_preemptions,
        "pressures": {name: round(value, 4) for name, value in pool.pressures.items()},
        "pressure": round(pool.pressure, 4),
        "pressed_by": pool.pressed_by,
        "words": {name: pressed(pool, name) for name in pool.pressures},
        "short": pool.is_short,
    }


def _workers(workers: Sequence[Seen]) -> Json:
    """Rows in the order of pools and ids; beyond MAX_WORKERS those in trouble stay, and the fullest."""
    kept = sorted(workers, key=lambda worker: (not worker.trouble, -(worker.kv_used or 0.0)))[:MAX_WORKERS]
    kept.sort(key=lambda worker: (worker.record.pool, _natural(worker.record.worker_id)))
    return {"columns": WORKER_COLUMNS, "rows": [_row(worker) for worker in kept], "left_out": len(workers) - len(kept)}


def _row(worker: Seen) -> list[Any]:
    record, report = worker.record, worker.report
    head = [_cut(record.worker_id), record.generation, _cut(record.pool), worker.role, record.phase]
    if report is None:
        return [*head, None, None, None, None, None, None, None, None, _cut(worker.trouble)]
    load = report.load
    return [
        *head,
        round(worker.kv_used or 0.0, 3),
        load.num_running,
        load.num_waiting,
        load.waiting_prefill_tokens,
        report.blocks.pinned,
        report.num_handoffs_in,
        report.num_handoffs_out,
        round(worker.age_seconds or 0.0, 1),
        _cut(worker.trouble),
    ]


def _natural(worker_id: str) -> tuple[str, int, str]:
    """decode-2 before decode-10."""
    name, _, number = worker_id.rpartition("-")
    return (name, int(number), "") if number.isascii() and number.isdigit() and len(number) < 10 else (worker_id, 0, "")


def _flows(growth: Growth, pools: Mapping[str, str]) -> Json:
    """Hand-offs between workers, those of most prompts first, and between pools; "" stands for: nobody handed over."""
    pairs = sorted(growth.pairs.items(), key=lambda item: (-item[1], item[0]))
    between: Counter[tuple[str, str]] = Counter()
    for (prefill, decode), number in pairs:
        between[pools.get(prefill, "?") if prefill else "", pools.get(decode, "?")] += number
    return {
        "seconds": round(growth.seconds, 1),
        "pairs": [[_cut(prefill), _cut(decode), number] for (prefill, decode), number in pairs[:MAX_PAIRS]],
        "left_out": sum(number for _, number in pairs[MAX_PAIRS:]),
        "pools": [[_cut(source), _cut(target), number] for (source, target), number in between.most_common(MAX_PAIRS)],
    }


def _routers(look: Look) -> list[Json]:
    silent = {heard.router_id: heard.silence for heard in look.heard if heard.silence}
    return [
        {
            "id": _cut(report.router_id),
            "address": _cut(report.http_address),
            "in_flight": report.in_flight,
            "queued": report.queued,
            "arrivals": report.arrivals,
            "silence": _cut(silent.get(report.router_id, "")),
        }
        for report in list(look.reports.values())[:MAX_PAIRS]
    ]


def _requests(heard: Sequence[Heard]) -> Json:
    """Those that run, the oldest first, then those that ended, the last one first."""
    listed = [(heard_of.router_id, recent) for heard_of in heard for recent in heard_of.requests]
    running = sorted((one for one in listed if one[1].seconds_ago is None), key=lambda one: -one[1].outline.seconds)
    ended = sorted((one for one in listed if one[1].seconds_ago is not None), key=lambda one: one[1].seconds_ago or 0.0)
    shown = running[: MAX_REQUESTS // 2]
    shown += ended[: MAX_REQUESTS - len(shown)]
    return {"rows": [_request(router, recent) for router, recent in shown], "left_out": len(listed) - len(shown)}


def _request(router_id: str, recent: Recent) -> Json:
    outline = recent.outline
    return {
        "id": _cut(outline.request_id),
        "router": _cut(router_id),
        "tenant": _cut(outline.tenant),
        "class": _cut(outline.service_class),
        "outcome": _cut(outline.outcome),
        "runs": outline.outcome in STATES,
        "ago": None if recent.seconds_ago is None else round(recent.seconds_ago, 1),
        "seconds": outline.seconds,
        "ttft": outline.ttft_seconds,
        "tpot": outline.tpot_seconds,
        "prompt": outline.usage.prompt_tokens,
        "cached": outline.usage.cached_tokens,
        "generated": outline.usage.completion_tokens,
        "prefill": _cut(outline.timeline.worker.prefill_worker),
        "decode": _cut(outline.timeline.decode_worker),
        "reasons": [_cut(reason) for reason in recent.reasons[-4:]],
        "attempts": outline.timeline.attempts,
        "failures": [
            {"worker": _cut(failure.worker_id), "error": _cut(f"{failure.error}: {failure.message}")}
            for failure in outline.failures[-4:]
        ],
        "stages": stages(recent),
    }


def stages(recent: Recent) -> list[tuple[str, float]]:
    """Where the time of a request went, in order, and to the last of it: those of its first token (router.stages), by who
    had it; then decode. Of one that runs its worker has told nothing yet: the parts are what its router saw."""
    outline, ttft = recent.outline, recent.outline.ttft_seconds
    queue, known = outline.timeline.router_queue_seconds, outline.timeline.ttft_stages
    if outline.outcome == "queued":
        parts = [("queue", outline.seconds)]
    elif ttft is None:
        parts = [("queue", queue), ("prefill" if recent.seconds_ago is None else "other", outline.seconds - queue)]
    elif not known:
        parts = [("queue", queue), ("prefill", ttft - queue), ("decode", outline.seconds - ttft)]
    else:
        parts = [(name, sum(known.get(stage, 0.0) for stage in of)) for name, of in STAGES.items()]
        parts += [("other", ttft - sum(seconds for _, seconds in parts)), ("decode", outline.seconds - ttft)]
    return [(name, round(seconds, 6)) for name, seconds in parts if seconds > 1e-6]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
