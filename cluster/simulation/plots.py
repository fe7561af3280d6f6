"""Plots of simulated runs, for those who installed the `plots` extra."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.simulation.results import Summary, Tally, ttft_seconds
from headrace.pyplot import pyplot


def draw(runs: Sequence[tuple[Summary, Tally]], path: pathlib.Path) -> None:
    """TTFT as a distribution, a line a policy; and how busy each worker of the last run was over time."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for summary, tally in runs:
        ordered = sorted(ttft_seconds(one) for one in tally.served if one.first_token_at is not None)
        left.plot(ordered, [(at + 1) / len(ordered) for at in range(len(ordered))], label=summary.policy)
    left.set(xscale="log", xlabel="TTFT, s", ylabel="fraction of requests", title="time to first token")
    left.grid(alpha=0.3)
    left.legend()
    summary, tally = runs[-1]
    width = max(len(worker.busy_seconds) for worker in tally.workers.values())
    busy = [
        [seconds / tally.slice_seconds for seconds in worker.busy_seconds] + [0.0] * (width - len(worker.busy_seconds))
        for worker in tally.workers.values()
    ]
    extent = (0, width * tally.slice_seconds, len(busy) - 0.5, -0.5)
    shown = right.imshow(busy, aspect="auto", interpolation="nearest", vmin=0, vmax=1, extent=extent)
    if len(busy) <= 32:
        right.set_yticks(range(len(busy)), list(tally.workers))
    right.set(xlabel="s", title=f"share of time that a worker computes: {summary.policy}")
    figure.colorbar(shown, ax=right)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_sweep(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """A sweep's p90 TTFT and goodput over rates, a line a policy, with the seeds' range as a band."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    runs = [
        {**run, "ttft_p90": run["ttft_seconds"]["p90"], "goodput": run["goodput_per_second"]} for run in result["runs"]
    ]
    fractions = sorted({run["fraction"] for run in runs})
    panels = (
        (left, "TTFT p90, s", "ttft_p90"),
        (right, "goodput, requests a second", "goodput"),
    )
    for policy in dict.fromkeys(run["policy"] for run in runs):
        for axes, name, key in panels:
            by_rate = [
                [run[key] for run in runs if (run["policy"], run["fraction"]) == (policy, fraction)]
                for fraction in fractions
            ]
            means = [sum(values) / len(values) for values in by_rate]
            width = 2.5 if policy == "ours" else 1.2
            (line,) = axes.plot(fractions, means, marker="o", markersize=3, linewidth=width, label=policy)
            axes.fill_between(
                fractions, list(map(min, by_rate)), list(map(max, by_rate)), alpha=0.1, color=line.get_color()
            )
            axes.set(xlabel=f"of capacity ({result['capacity_per_second']:.1f} requests a second)", ylabel=name)
            axes.grid(alpha=0.3)
    left.set(yscale="log")
    left.legend()
    figure.suptitle(f"{result['trace']}, {result['fleet']['prefill']} + {result['fleet']['decode']} workers")
    figure.savefig(path, dpi=110)
    plt.close(figure)
