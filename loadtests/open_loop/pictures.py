"""A sweep as one picture: the throughput–latency curve with its knee, goodput, TTFT, and the last rate over time."""

import io
from collections.abc import Sequence
from typing import Any

from headrace.pyplot import pyplot
from loadtests.open_loop.knee import Knee, knee
from loadtests.open_loop.measures import Figure
from loadtests.open_loop.plan import Plan
from loadtests.open_loop.sweep import COLUMNS, Point

DUE, TTFT, TPOT = (COLUMNS.index(name) for name in ("due", "ttft", "tpot"))


def draw(plan: Plan, points: Sequence[Point]) -> bytes:
    """A PNG. ConfigError without the `plots` extra."""
    plt = pyplot()
    figure, ((curve, good), (spread, over_time)) = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    _curve(curve, points)
    _goodput(good, points)
    _distributions(spread, points, plan)
    _over_time(over_time, points[-1], plan)
    for axes in (curve, good, spread, over_time):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    plt.close(figure)
    return out.getvalue()


def _curve(axes: Any, points: Sequence[Point]) -> None:
    throughput = [point.summary.finished_per_second for point in points]
    for name, label in (("ttft_seconds", "TTFT p50"), ("e2e_seconds", "E2E mean")):
        key = "p50" if name == "ttft_seconds" else "mean"
        _banded(axes, throughput, [getattr(point.summary, name).get(key) for point in points], label)
    found = knee([point.on_curve for point in points])
    if isinstance(found, Knee):
        at = next(point for point in points if point.rate == found.offered)
        axes.axvline(at.summary.finished_per_second, linestyle=":", color="black", label=f"knee, {at.rate:g}/s offered")
    axes.set(yscale="log", xlabel="answered requests a second", ylabel="s", title="throughput and latency")


def _goodput(axes: Any, points: Sequence[Point]) -> None:
    rates = [point.summary.offered_per_second for point in points]
    _banded(axes, rates, [point.summary.goodput_per_second for point in points], "within the SLO")
    axes.plot(rates, [point.summary.finished_per_second for point in points], marker="o", label="answered")
    axes.plot(rates, rates, linestyle=":", color="gray", label="offered")
    axes.set(xlabel="offered requests a second", ylabel="requests a second", title="goodput")


def _distributions(axes: Any, points: Sequence[Point], plan: Plan) -> None:
    for point in points:
        values = sorted(
            row[TTFT] for row in point.requests if row[TTFT] is not None and row[DUE] >= point.warmup_seconds
        )
        if values:
            axes.plot(values, [(at + 1) / len(values) for at in range(len(values))], label=f"{point.rate:g}/s")
    axes.axvline(plan.slo.ttft_seconds, linestyle=":", color="black")
    axes.set(xscale="log", xlabel="TTFT, s", ylabel="fraction of requests", title="time to first token")


def _over_time(axes: Any, point: Point, plan: Plan) -> None:
    for at, label in ((TTFT, "TTFT"), (TPOT, "TPOT")):
        rows = [row for row in point.requests if row[at] is not None and row[at] > 0]
        axes.plot([row[DUE] for row in rows], [row[at] for row in rows], ".", markersize=4, label=label)
    if point.warmup_seconds:
        axes.axvspan(0, point.warmup_seconds, alpha=0.15, color="gray", label="warm-up")
    axes.set(yscale="log", xlabel="due, s", ylabel="s", title=f"each request at {point.rate:g}/s")


def _banded(axes: Any, x: Sequence[float], figures: Sequence[Figure | None], label: str) -> None:
    """A line through the values, with their intervals as a band where there are any."""
    kept = [(at, figure) for at, figure in zip(x, figures, strict=True) if figure is not None]
    if not kept:
        return
    places = [at for at, _ in kept]
    (line,) = axes.plot(places, [figure.value for _, figure in kept], marker="o", label=label)
    low = [figure.value if figure.low is None else figure.low for _, figure in kept]
    high = [figure.value if figure.high is None else figure.high for _, figure in kept]
    axes.fill_between(places, low, high, alpha=0.15, color=line.get_color())
