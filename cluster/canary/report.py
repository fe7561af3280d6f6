"""Where a canary stands, as the console and `headrace canary status` show it: one JSON value. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.canary.evidence import decode_sides
from cluster.canary.judge import judge, quantile, said
from cluster.canary.values import Event, Evidence, Judgement, State, Test
from headrace.reports import RevisionCounts

Json = dict[str, Any]
SHOWN = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MAX_EVENTS = 12


@dataclass(frozen=True, slots=True)
class Standing:
    """All that is kept of a canary, at Redis's `now`."""

    state: State
    evidence: Evidence
    events: Sequence[Event]
    now: float


def figures(its: Standing) -> Json:
    """The comparison is that of the record where it ended the canary; else as a look would find it now."""
    state, settings = its.state, its.state.canary
    last = next((event for event in reversed(its.events) if event.state.number == state.number), None)
    evidence = its.evidence.sides if its.evidence.number == state.number else {}
    judgement, looks = judge_now(state, its.evidence), its.evidence.look
    if last is not None and last.judgement is not None and not state.phase.compared:
        judgement, evidence = last.judgement, decode_sides(last.counts)
        looks = judgement.look + 1
    return {
        "number": state.number,
        "revision": settings.revision,
        "base": state.base,
        "phase": state.phase.value,
        "under_way": state.phase.under_way,
        "reason": state.reason,
        "percent": state.percent if state.phase.compared else 0.0,
        "wanted_percent": state.percent,
        "since_seconds": its.now - state.since,
        "shared_seconds": its.now - state.shared_since if state.shared_since is not None else None,
        "good_after_seconds": settings.good_after_seconds,
        "window_seconds": min(its.now - its.evidence.since, settings.window_seconds),
        "failures": state.failures,
        "max_failures": settings.max_failures,
        "min_requests": settings.min_requests,
        "confidence": settings.confidence,
        "model": settings.model,
        "pools": {name: pool.replicas for name, pool in settings.pools.items()},
        "looks": looks,
        "verdict": judgement.verdict.value,
        "sides": [side(name, evidence.get(name, RevisionCounts())) for name in (state.base, settings.revision)],
        "tests": [tested(test) for test in judgement.tests],
        "events": [
            {
                "number": event.state.number,
                "revision": event.state.canary.revision,
                "ago": max(its.now - event.at, 0.0),
                "before": event.before,
                "after": event.state.phase.value,
                "reason": event.state.reason,
            }
            for event in list(its.events)[: -MAX_EVENTS - 1 : -1]
        ],
    }


def judge_now(state: State, evidence: Evidence) -> Judgement:
    settings = state.canary
    return judge(settings, evidence.of(state.base), evidence.of(settings.revision), evidence.look)


def side(name: str, its: RevisionCounts) -> Json:
    """One revision's figures; None of what nothing is known of."""
    return {
        "name": name,
        "requests": its.ended,
        "failed": its.failed,
        "failed_part": its.failed / its.ended if its.ended else None,
        "attainment": its.met / its.ended if its.ended else None,
        "ttft": {word: quantile(dict(its.ttft), part) for word, part in SHOWN.items()},
        "tpot": {word: quantile(dict(its.tpot), part) for word, part in SHOWN.items()},
        "prompt_tokens": its.prompt_tokens,
        "cached_tokens": its.cached_tokens,
        "generated_tokens": its.generated_tokens,
    }


def tested(test: Test) -> Json:
    high = test.high if test.high is not None and test.high < float("inf") else None
    return {
        "name": test.name,
        "base": test.base,
        "canary": test.canary,
        "change": test.change,
        "low": test.low,
        "high": high,
        "limit": test.limit,
        "verdict": test.verdict.value,
        "said": said(test),
    }
