"""Policies over rates: capacity first, then each policy at fractions of it, each seed the same traffic for all.

Capacity of a trace is least load's highest rate at which 90 % of its requests meet the SLO, over the traffic of all seeds:
one stretch of a trace may be half as heavy as another. It is found once, to within CAPACITY_STEP.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cluster.simulation import compare
from cluster.simulation.fleet import Fleet
from cluster.simulation.results import Summary
from headrace import generators
from headrace.errors import ConfigError
from headrace.goodput import Slo
from headrace.traces import TraceRow

ATTAINMENT = 0.9
CAPACITY_STEP = 0.03
Traffic = Callable[[int], list[TraceRow]]


def capacity(fleet: Fleet, stretches: Sequence[list[TraceRow]], slo: Slo, start_per_second: float) -> float:
    """Requests a second, by doubling and then halving the interval. ConfigError when no rate is low enough."""

    def holds(per_second: float) -> bool:
        met = 0.0
        for rows in stretches:
            traffic = generators.scaled(rows, per_second / generators.rate(rows))
            met += compare.run(fleet, "least-load", traffic, slo=slo)[0].attainment
        return met >= ATTAINMENT * len(stretches)

    low, high = start_per_second, start_per_second
    if holds(low):
        while holds(high := low * 2):
            low = high
    else:
        while not holds(low := high / 2):
            high = low
            if low < start_per_second / 2**10:
                raise ConfigError(f"at {low:.3g} requests a second least load does not meet the SLO either")
    while high / low > 1 + CAPACITY_STEP:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def sweep(
    fleet: Fleet,
    policies: Sequence[str],
    fractions: Sequence[float],
    seeds: Sequence[int],
    traffic: Traffic,
    slo: Slo,
    capacity_per_second: float,
    note: Callable[[str, list[dict[str, Any]]], None],
    before: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """A row a (seed, rate, policy): the summary, with `fraction` and `seed`. `note` hears of each, with all so far; what
    was found `before` is not made again. A seed is done at all rates before the next begins, so that whatever is there
    when a sweep is ended compares whole curves."""
    found = list(before)
    known = {(row["fraction"], row["seed"], row["policy"]) for row in found}
    for seed in seeds:
        for fraction in fractions:
            left = [policy for policy in policies if (fraction, seed, policy) not in known]
            if not left:
                continue
            rows = traffic(seed)
            rows = generators.scaled(rows, fraction * capacity_per_second / generators.rate(rows))
            for policy in left:
                summary, _ = compare.run(fleet, policy, rows, slo=slo, seed=seed)
                found.append({"fraction": fraction, "seed": seed, **summary.as_json()})
                note(_line(fraction, seed, summary), found)
    return found


def _line(fraction: float, seed: int, one: Summary) -> str:
    return (
        f"{fraction:.2f} seed {seed} {one.policy:15} TTFT p90 {one.ttft_seconds.get('p90', float('nan')):7.3f} s, "
        f"goodput {one.goodput_per_second:7.3f}/s, met {one.attainment:6.1%}, hits {one.hit_rate:5.1%}"
    )


def whole(rows: Sequence[dict[str, Any]], policies: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of stretches of traffic that all policies were run on: a comparison is of equal traffic."""
    ran: dict[tuple[float, int], set[str]] = {}
    for row in rows:
        ran.setdefault((row["fraction"], row["seed"]), set()).add(row["policy"])
    return [row for row in rows if ran[row["fraction"], row["seed"]] >= set(policies)]


def verdict(rows: Sequence[dict[str, Any]], ours: str = "ours", base: str = "least-load") -> dict[str, Any]:
    """Means over seeds: ours against the best other policy's p90 TTFT at each rate, and maximum goodput against `base`'s;
    `per_rate` holds the p90 TTFT and goodput of each policy."""
    per_rate: dict[float, dict[str, dict[str, float]]] = {}
    for row in rows:
        per_rate.setdefault(row["fraction"], {}).setdefault(row["policy"], {})
    for fraction, policies in per_rate.items():
        for policy, mean in policies.items():
            runs = [row for row in rows if row["fraction"] == fraction and row["policy"] == policy]
            mean["ttft_p90_seconds"] = sum(row["ttft_seconds"]["p90"] for row in runs) / len(runs)
            mean["goodput_per_second"] = sum(row["goodput_per_second"] for row in runs) / len(runs)
    ttft = {
        fraction: policies[ours]["ttft_p90_seconds"]
        / min(mean["ttft_p90_seconds"] for policy, mean in policies.items() if policy != ours)
        for fraction, policies in per_rate.items()
    }
    best = {
        policy: max(policies[policy]["goodput_per_second"] for policies in per_rate.values()) for policy in (ours, base)
    }
    against_base = {
        fraction: {key: policies[ours][key] / policies[base][key] for key in ("ttft_p90_seconds", "goodput_per_second")}
        for fraction, policies in per_rate.items()
        if policies[base]["goodput_per_second"]
    }
    return {
        "per_rate": per_rate,
        "ttft_p90_vs_best_other": ttft,
        "max_goodput_ratio": best[ours] / best[base],
        "against_base": against_base,
    }
