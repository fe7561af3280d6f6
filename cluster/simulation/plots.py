"""Plots of simulated runs, for those who installed the `plots` extra."""

import pathlib
from collections.abc import Sequence
from typing import Any

from cluster.simulation.results import Summary, Tally, ttft_seconds
from headrace.errors import ConfigError


def pyplot() -> Any:
    """matplotlib's, drawing to files alone; ConfigError when it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'headrace[plots]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


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
