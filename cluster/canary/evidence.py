"""From routers' reports to what both revisions did over the same time: differences of counters, as everywhere. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from json import dumps, loads
from typing import Any

from cluster.canary.values import Evidence
from headrace.config import CanaryConfig
from headrace.reports import RevisionCounts, RouterReport, decode_counts, encode_counts

MOST_ROUTERS = 256  # that are remembered

Counted = Mapping[str, RevisionCounts]


def heard(
    evidence: Evidence, reports: Mapping[str, RouterReport], now: float, its: CanaryConfig, base: str
) -> Evidence:
    """With what was counted since the last look. What routers say of another canary is of no time of this one's. A window
    that is over goes on until there was enough in it to judge: where little comes, it must not begin anew for ever."""
    enough = min(evidence.of(base).ended, evidence.of(its.revision).ended) >= its.min_requests
    if enough and now - evidence.since > its.window_seconds:
        evidence = begun(evidence, now)
    sides, last = dict(evidence.sides), dict(evidence.last)
    for name, report in reports.items():
        if report.canary != evidence.number:
            continue
        before = last.pop(name, {})
        for revision, counts in report.revisions.items():
            more = counts.plus(before.get(revision, RevisionCounts()), -1)
            sides[revision] = sides.get(revision, RevisionCounts()).plus(more)
        last[name] = report.revisions
    while len(last) > max(MOST_ROUTERS, len(reports)):
        del last[next(iter(last))]
    return replace(evidence, sides=sides, last=last)


def fresh(number: int, reports: Mapping[str, RouterReport], now: float, percent: float) -> Evidence:
    """Of a canary that begins. What routers say of its number already is of another one's time: where Redis was flushed,
    numbers begin anew."""
    before = {name: report.revisions for name, report in reports.items() if report.canary == number}
    return Evidence(number, now, percent, last=before)


def begun(evidence: Evidence, now: float, percent: float | None = None) -> Evidence:
    """A new window. How often was looked goes on: the confidence is over all of them."""
    share = evidence.percent if percent is None else percent
    return replace(evidence, since=now, percent=share, sides={}, num_looked_at=0)


def encode_sides(sides: Counted) -> str:
    return dumps({name: encode_counts(counts) for name, counts in sides.items()}, separators=(",", ":"))


def decode_sides(raw: str) -> dict[str, RevisionCounts]:
    """ValueError or TypeError when it is not what encode_sides makes."""
    return _sides(loads(raw))


def encode_evidence(its: Evidence) -> str:
    last = {name: {of: encode_counts(counts) for of, counts in sides.items()} for name, sides in its.last.items()}
    sides = {name: encode_counts(counts) for name, counts in its.sides.items()}
    plain = (its.number, its.since, its.percent, its.look, its.num_looked_at)
    return dumps([*plain, sides, last], separators=(",", ":"))


def decode_evidence(raw: bytes | None) -> Evidence | None:
    """None when it is not what encode_evidence of this version makes."""
    if raw is None:
        return None
    try:
        number, since, percent, look, num_looked_at, sides, last = loads(raw)
        if not all(type(one) is int for one in (number, look, num_looked_at)):
            return None
        by_router = {name: _sides(its) for name, its in last.items()}
        return Evidence(number, float(since), float(percent), _sides(sides), by_router, look, num_looked_at)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _sides(data: Any) -> dict[str, RevisionCounts]:
    return {name: decode_counts(counts) for name, counts in data.items()}
