"""The autoscaler's record as the page shows it: what it wants, and its last decisions with what came of them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.scaling.values import Recorded, Size

MAX_DECISIONS = 24
MAX_ALTERNATIVES = 8


def scaling(now: Recorded, decisions: Sequence[Recorded]) -> dict[str, Any]:
    """`decisions` in any order; the newest comes first. Ages by Redis's clock, as of the last look."""
    at, inputs, decision = now.inputs.now, now.inputs, now.decision
    return {
        "mode": inputs.rules.mode,
        "budget_gpus": inputs.rules.budget_gpus,
        "gpus": sum(
            rules.gpus * _held(now, name) for name, rules in inputs.rules.pools.items() if name in inputs.pools
        ),
        "needs": {role: round(number, 2) for role, number in decision.needs.workers.items()},
        "reason": decision.reason,
        "unreachable": decision.needs.unreachable,
        "forecast": {
            "peak": inputs.forecast.peak,
            "level": inputs.forecast.level,
            "trend": inputs.forecast.trend,
            "days": inputs.forecast.days,
        },
        "pools": [
            {
                "name": name,
                "desired": str(seen.desired),
                "advised": str(decision.advised.get(name, seen.desired)),
                "least": inputs.rules.pools[name].least if name in inputs.rules.pools else None,
                "most": inputs.rules.pools[name].most if name in inputs.rules.pools else None,
            }
            for name, seen in inputs.pools.items()
        ],
        "decisions": [_decided(one, at) for one in sorted(decisions, key=lambda one: -one.number)[:MAX_DECISIONS]],
    }


def _held(now: Recorded, name: str) -> int:
    seen = now.inputs.pools[name]
    return seen.staying + seen.leaving


def _decided(one: Recorded, at: float) -> dict[str, Any]:
    decision = one.decision
    before = {name: seen.desired for name, seen in one.inputs.pools.items()}
    return {
        "number": one.number,
        "ago": max(at - one.inputs.now, 0.0),
        "kind": decision.kind,
        "changes": changes(before, decision.pools),
        "reason": decision.reason,
        "notes": list(decision.notes),
        "outcome": one.outcome,
        "alternatives": [
            {"what": its.what, "gpus": its.gpus, "attainment": its.attainment, "why_not": its.why_not}
            for its in decision.alternatives[:MAX_ALTERNATIVES]
        ],
    }


def changes(before: Mapping[str, Size], after: Mapping[str, Size]) -> str:
    """Only the pools that change."""
    return ", ".join(
        f"{name} {before.get(name, Size(0))} → {size}" for name, size in after.items() if before.get(name) != size
    )
