"""What is to be said first: whether targets hold, and what is short. Pure; every sentence carries its numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cluster.console.pools import Pool
from cluster.growth import Growth, attainment, num_ended
from headrace.config import ClusterConfig
from headrace.config_tenants import ServiceClassConfig
from headrace.reports import ClassCounts

OBJECTIVE = 0.99
BAD_ATTAINMENT = 0.9
ROLLED_BACK_SECONDS = 3600.0
MIN_ENDED = 10  # of fewer requests no attainment is an alarm


class Level(StrEnum):
    """In the order of how much it matters."""

    OK = "ok"
    IDLE = "idle"
    UNKNOWN = "unknown"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the cluster is held to. `from_zero`: requests wait for workers where there are none."""

    classes: Mapping[str, ServiceClassConfig] = field(default_factory=dict)
    max_backlog_seconds: float = 2.0
    objective: float = OBJECTIVE
    from_zero: bool = False

    @classmethod
    def of(cls, config: ClusterConfig) -> "Rules":
        backlog_seconds = config.admission.prefill_backlog_seconds
        return cls(dict(config.service_classes), backlog_seconds, from_zero=config.starts_from_zero)


@dataclass(frozen=True, slots=True)
class Line:
    """`where`: the part of the page that shows more of it."""

    level: Level
    text: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    title: str
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True)
class Sources:
    """How much of what is shown is to be believed. `redis_seconds`: since it last answered, None: it never did."""

    redis_seconds: float | None
    redis_why: str = ""
    controller: str = ""
    num_routers: int = 0
    routers_silent: Mapping[str, str] = field(default_factory=dict)


def judge(
    rules: Rules, sources: Sources, pools: Sequence[Pool], minute: Growth, window: Growth, more: Sequence[Line] = ()
) -> Verdict:
    if sources.redis_seconds is None:
        return Verdict(Level.UNKNOWN, "Nothing is known yet", (Line(Level.UNKNOWN, sources.redis_why, "sources"),))
    lines = [*_sources(sources), *_workers(pools, rules), *_pressure(pools), *more]
    targets, title = _targets(rules, minute, window)
    lines = sorted([*targets, *lines], key=lambda line: -_RANK[line.level])
    level = max((line.level for line in lines), key=_RANK.__getitem__, default=Level.OK)
    if level is Level.OK and not window.of("arrivals"):
        return Verdict(Level.IDLE, "Idle: no request in the last five minutes")
    if level is not Level.OK and not targets:
        title = f"{title}; but {lines[0].text}" if title else lines[0].text
    return Verdict(level, title or "All pools have what they need", tuple(lines))


def rolled_back(canary: Mapping[str, Any] | None) -> list[Line]:
    """A canary (cluster.canary.report) that the controller ended lately."""
    if canary is None or canary["phase"] != "rolled_back" or canary["since_seconds"] > ROLLED_BACK_SECONDS:
        return []
    return [Line(Level.WARN, f"canary {canary['revision']} was rolled back: {canary['reason']}", "canary")]


_RANK = {level: number for number, level in enumerate(Level)}


def _targets(rules: Rules, minute: Growth, window: Growth) -> tuple[list[Line], str]:
    """The classes whose targets do not hold; and a title for all of them."""
    lines = []
    for name in {name for name, _ in window.classes}:
        for growth, span, level, bar in (
            (minute, "the last minute", Level.BAD, BAD_ATTAINMENT),
            (window, "five minutes", Level.WARN, rules.objective),
        ):
            counts = growth.outcomes(name)
            part, ended = attainment(counts), num_ended(counts)
            if part is not None and ended >= MIN_ENDED and part < bar:
                lines.append(Line(level, _missed(name, counts, part, ended, span), "targets"))
                break
    counts = window.all_outcomes
    part, ended = attainment(counts), num_ended(counts)
    if part is None:
        return lines, ""
    if lines:
        return lines, max(lines, key=lambda line: _RANK[line.level]).text
    held = "Targets hold" if rules.classes else "Requests are answered"
    return lines, f"{held}: {_percent(part)} of {ended:,} in five minutes"


def _missed(name: str, counts: ClassCounts, part: float, ended: int, span: str) -> str:
    kinds = {
        "TTFT": counts.missed_ttft + counts.missed_both,
        "TPOT": counts.missed_tpot + counts.missed_both,
        "failed": counts.failed,
    }
    worst = ", ".join(f"{kind} {number:,}" for kind, number in kinds.items() if number)
    who = f"{name}: " if name else ""
    return f"{who}{_percent(part)} of {ended:,} requests met their targets in {span} (missed: {worst})"


def _workers(pools: Sequence[Pool], rules: Rules) -> list[Line]:
    lines = []
    for pool in pools:
        if pool.num_missing:
            level = Level.WARN if pool.num_ready else Level.BAD
            lines.append(Line(level, f"{pool.name} has {pool.num_ready} of {pool.desired} workers ready", "pools"))
        if pool.num_silent:
            lines.append(Line(Level.WARN, f"{pool.name}: {pool.num_silent} ready workers do not answer", "workers"))
    if pools and rules.from_zero and all(pool.desired == 0 and not pool.num_ready for pool in pools):
        lines.append(Line(Level.IDLE, "all pools are at zero: a request waits for the workers that it starts", "pools"))
    elif pools and not any(pool.decodes and pool.num_ready for pool in pools):
        lines.append(Line(Level.BAD, "no worker that decodes is ready: nothing is served", "pools"))
    return lines


def _pressure(pools: Sequence[Pool]) -> list[Line]:
    return [
        Line(Level.WARN, f"{pool.name} is short: {pressed(pool, pool.pressed_by)}", "pools")
        for pool in pools
        if pool.is_short
    ]


def pressed(pool: Pool, by: str) -> str:
    match by:
        case "kv":
            held = pool.blocks.active + pool.blocks.pinned
            return f"{_percent(pool.pressures['kv'])} of KV is held ({held:,} of {pool.blocks.total:,} blocks)"
        case "seats":
            return f"{pool.num_running:,} sequences in {pool.num_seats:,} places"
        case "backlog":
            return (
                f"{pool.backlog_seconds:.1f} s of prompts wait at each worker ({pool.waiting_tokens:,} tokens in all)"
            )
        case _:
            return "nothing is scarce"


def _sources(sources: Sources) -> list[Line]:
    lines = []
    if sources.redis_why:
        age = f"{sources.redis_seconds:.0f} s old" if sources.redis_seconds is not None else "unknown"
        lines.append(
            Line(Level.WARN, f"Redis does not answer: what stands here is {age}. Serving goes on without it", "sources")
        )
    elif sources.controller:
        lines.append(Line(Level.WARN, f"controller: {sources.controller}", "sources"))
    if not sources.num_routers and not sources.redis_why:
        lines.append(Line(Level.WARN, "no router reports", "sources"))
    lines += [Line(Level.WARN, f"router {name}: {why}", "sources") for name, why in sources.routers_silent.items()]
    return lines


def _percent(part: float) -> str:
    """Never rounded up to 100."""
    return "100 %" if part >= 1 else f"{min(100 * part, 99.9):.1f} %"
