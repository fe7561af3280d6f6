"""A sweep as one page that needs nothing else: tables, the picture inside, what it ran on and how to repeat it."""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from loadtests.open_loop.measures import Figure
from loadtests.open_loop.plan import Plan
from loadtests.open_loop.show import notes, shown
from loadtests.open_loop.sweep import Point

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; } .warn { color: #a40000; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; } small { color: #666; }
"""
LATENCIES = (("TTFT", "ttft_seconds"), ("TPOT", "tpot_seconds"), ("ITL", "itl_seconds"), ("E2E", "e2e_seconds"))


def page(plan: Plan, points: Sequence[Point], result: Mapping[str, Any], picture: bytes | None) -> str:
    warnings = "".join(f"<li>{escape(note)}</li>" for note in notes(points))
    drawn = (
        f'<img alt="throughput and latency, goodput, distributions" src="data:image/png;base64,'
        f'{base64.b64encode(picture).decode()}">'
        if picture is not None
        else "<p>No plots: they need matplotlib (the extra <code>plots</code>).</p>"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Load on {escape(plan.model or plan.address)}</title>
<style>{STYLE}</style></head><body>
<h1>Load on {escape(plan.model or "")} at {escape(plan.address)}</h1>
<p>{escape(_traffic(plan))}. Good: TTFT within {plan.slo.ttft_seconds:g} s and TPOT within
{plan.slo.tpot_seconds * 1e3:g} ms.
{escape(result["knee"]["said"] + "." if len(points) > 1 else "")}</p>
{f'<ul class="warn">{warnings}</ul>' if warnings else ""}
{drawn}
<h2>Rates</h2>
{_rates(points)}
<h2>Latencies, ms</h2>
{_latencies(points)}
<p><small>Latencies count from each request's due time, and are of what came: a request that was shed, or timed out before
its first token, is in no percentile of TTFT, and one that did not finish in none of E2E. ± is half the 95 % interval, by
a block bootstrap over stretches of consecutive requests; requests due in the warm-up do not count; failed, shed and
timed-out ones count as not good.
</small></p>
<h2>The load generator</h2>
{_generator(points)}
<h2>To repeat it</h2>
<pre>{escape(json.dumps({key: value for key, value in result.items() if key != "points"}, indent=1))}</pre>
</body></html>
"""


def _traffic(plan: Plan) -> str:
    source = plan.trace if plan.trace is not None else f"{plan.shape} traffic, Poisson arrivals"
    bent = "" if plan.bend == "none" else f", {plan.bend}"
    return f"{source}{bent}, seed {plan.seed}, over {plan.edge}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{cells}</table>"


def _rates(points: Sequence[Point]) -> str:
    head = ("offered /s", "requests", "finished", "shed", "timed out", "failed", "answered /s", "good /s", "SLO met")
    rows = []
    for point in points:
        one = point.summary
        rows.append(
            [
                f"{point.rate:g}",
                str(one.num_requests),
                *(str(one.outcomes[outcome]) for outcome in ("finished", "shed", "timed_out", "failed")),
                f"{one.finished_per_second:.3g}",
                shown(one.goodput_per_second),
                shown(one.attainment, 100, "%"),
                f"{one.tokens_per_second:.4g}",
                f"{one.cached_fraction:.1%}",
            ]
        )
    return _table((*head, "tok/s", "prompt cached"), rows)


def _latencies(points: Sequence[Point]) -> str:
    keys = ("mean", "p50", "p90", "p99")
    rows = []
    for point in points:
        for name, field in LATENCIES:
            figures: dict[str, Figure] = getattr(point.summary, field)
            rows.append([f"{point.rate:g}/s {name}", *(shown(figures.get(key), 1e3) for key in keys)])
    return _table(("", *keys), rows)


def _generator(points: Sequence[Point]) -> str:
    rows = [
        [
            f"{point.rate:g}",
            f"{point.summary.cpu_share:.0%}",
            *(
                f"{found.get('p99', 0.0) * 1e3:.1f}"
                for found in (point.summary.lateness_seconds, point.summary.lag_seconds)
            ),
            str(point.summary.peak_in_flight),
            f"{point.summary.tokens_per_event:.2f}",
        ]
        for point in points
    ]
    head = ("offered /s", "of a core", "late p99 ms", "event loop lag p99 ms", "streams at once", "tokens an event")
    return _table(head, rows)
