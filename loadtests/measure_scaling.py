"""The autoscaler's rows of `make bench-operate`, through its simulations' own commands.

week_slo_attainment          requests within their targets in a week of days, nights, surges and bursts (a fluid by the
                             second before the production autoscaler: cluster/simulation/week.py)
week_gpu_hours_vs_clairvoyant  its GPU-hours over those of one who knows the future and keeps 99 %
constant_load_changes        the most changes of sizes within any hour of a day of constant load
week_fluid_error             the most by which the fluid's share of kept targets is off, in moments of two days that
                             production's router and schedulers serve again, request by request
controller_1000_ms           one decision for 1,000 workers
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loadtests.report import Row

SEEDS = (1, 2, 3, 21, 22)  # on none of them was anything chosen


def _said(module: str, *words: str) -> Any:
    command = [sys.executable, "-m", module, *words]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure_week(num_runs: int) -> Sequence[Row]:
    """A seed a run, five at most: each is a week, and takes a minute."""
    seeds = SEEDS[: max(num_runs, 1)]
    weeks = [_said("cluster.simulation.run_week", "--seed", str(seed)) for seed in seeds]
    first = weeks[0]
    note = (
        f"{first['days']:g} days of up to {first['rate']:g} requests/s, {first['arrivals']} arrivals each, seeds "
        f"{seeds}; a fluid by the second, not an event simulation"
    )

    def row(name: str, key: str, unit: str, better: str, must: float, *, worst: Any) -> Row:
        values = [week[key] for week in weeks]
        return Row(name, worst(values), unit, better, must, samples=values, note=note)

    return [
        row("week_slo_attainment", "attainment", "fraction", "higher", 0.99, worst=min),
        replace(
            row("week_gpu_hours_vs_clairvoyant", "ratio", "ratio", "lower", 1.25, worst=max),
            detail={f"GPU-hours of the first, {cause}": hours for cause, hours in first["gpu_hours_by_cause"].items()},
        ),
        row("constant_load_changes", "constant_changes_an_hour", "changes/h", "lower", 2.0, worst=max),
    ]


def measure_spots(num_runs: int) -> Sequence[Row]:
    """Two minutes of CPU, once: it is the same each time."""
    found = _said("cluster.simulation.run_week", "--seed", str(SEEDS[0]), "--days", "2", "--spots")
    off = [spot["fluid"] - spot["simulated"] for spot in found]
    both = {f"{spot['name']}: {by}": spot[by] for spot in found for by in ("fluid", "simulated", "deviation")}
    note = "; ".join(
        f"{spot['name']}: {spot['prefill']} + {spot['decode']} workers, {spot['requests']} requests" for spot in found
    )
    return [Row("week_fluid_error", max(map(abs, off)), "fraction", "lower", samples=off, detail=both, note=note)]


def measure_decision(num_runs: int) -> Sequence[Row]:
    samples = _said("cluster.simulation.decision_time", "--runs", str(4 * max(num_runs, 1)))
    note = "4 pools of 250, a week of arrivals, no cache warm; reading and writing Redis not included; CPU time"
    return [Row("controller_1000_ms", statistics.median(samples), "ms", "lower", 50.0, samples=samples, note=note)]
