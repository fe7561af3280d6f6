"""A plan as one page of HTML that needs nothing else: tables, and plots as SVG. Made from the plan's JSON alone."""

from collections.abc import Mapping, Sequence
from html import escape
from json import dumps
from math import ceil, floor, log10
from typing import Any

from cluster.planning.caveats import as_ms

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #667085; --line: #d5dae2; --ours: #0b6bcb; --theirs: #c2571a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ecf3; --dim: #98a2b3; --line: #344054; --ours: #6db3f8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 500; }
.warn { border-left: 3px solid var(--theirs); padding-left: .7rem; margin: .4rem 0; }
.dim, li { color: var(--dim); } .plots { display: flex; flex-wrap: wrap; gap: 1.5rem; }
h1, p, li { overflow-wrap: anywhere; } pre { overflow-x: auto; } svg { max-width: 100%; height: auto; }
figure { margin: 0; min-width: 0; } figcaption { color: var(--dim); font-size: .85rem; }
svg text { fill: var(--dim); font-size: 11px; }
"""
WHO = ("predicted", "simulated")
WIDTH, HEIGHT, LEFT, BOTTOM = 460, 230, 54, 30
Points = Sequence[tuple[float, float]]


def page(plan: Mapping[str, Any]) -> str:
    chosen, traffic = plan["chosen"], plan["traffic"]
    title = f"{plan['model']['name']} on {chosen['num_gpus']} {chosen['gpu_type']}"
    slo = plan["asked"]["slo"]
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{_pools(chosen['pools'])}, {escape(_layouts(chosen))} · {chosen['per_month']:,.0f} a month · "
        f"{plan['money']['per_million']:.3f} a million tokens</p>",
        f"<p class=dim>{escape(traffic['about'])} · {traffic['mean_per_second']:.3g} requests a second on average, sized "
        f"for {traffic['sized_for_per_second']:.3g} · SLO: {100 * slo['attainment']:g}% within "
        f"TTFT {slo['ttft_seconds']:g} s, TPOT {slo['tpot_seconds'] * 1e3:g} ms</p>",
        *(f"<p class=dim>{escape(plan[said])}</p>" for said in ("doubt", "record")),
        *(f"<p class=warn>{escape(warning)}</p>" for warning in plan["warnings"]),
        "<div class=plots>",
        _hours(plan),
        _traffic(plan),
        _latency(plan, "ttft_seconds", "TTFT", slo["ttft_seconds"]),
        _latency(plan, "tpot_seconds", "TPOT", slo["tpot_seconds"]),
        _roofline(plan),
        "</div>",
        "<h2>Predicted against simulated</h2>",
        _checked(plan),
        "<h2>Ways to serve</h2>",
        _ways(plan),
        "<h2>Memory of one GPU</h2>",
        _memory(plan),
        "<h2>Roofline of a step, a GPU</h2>",
        _rooflines(plan),
        "<h2>What if (by prediction)</h2>",
        _what_if(plan),
        "<h2>Money</h2>",
        _money(plan),
        "<h2>In a cluster's file</h2>",
        _cluster(chosen),
        "<h2>Figures of the GPU</h2>",
        _figures(chosen),
        "<h2>Stands on</h2>",
        _list(plan["assumptions"]),
        "<h2>Does not know</h2>",
        _list(plan["unknowns"]),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _pools(pools: Mapping[str, int] | None) -> str:
    if pools is None:
        return "none keeps the SLO"
    if pools["unified"]:
        return f"{pools['unified']} unified"
    return f"{pools['prefill']} prefill + {pools['decode']} decode"


def _layouts(option: Mapping[str, Any]) -> str:
    layouts = option["layouts"]
    return layouts["decode"] if option["kind"] == "aggregated" else f"{layouts['prefill']} → {layouts['decode']}"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


# -- tables


def _checked(plan: Mapping[str, Any]) -> str:
    rows: list[list[object]] = []
    for way in filter(None, (plan["chosen"], plan["other_kind"])):
        for one in way["rounds"]:
            name = f"{_pools(one['pools'])} {way['gpu_type']}"
            rows += [[name, who, *_latencies(one[who])] for who in WHO]
    chosen = plan["chosen"]
    name = f"{_pools(chosen['pools'])}, none missing"
    rows += [[name, who, *_latencies(chosen[who])] for who in WHO if chosen[who] is not None]
    columns = (
        "pools",
        "",
        "TTFT p50 ms",
        "p90",
        "p99",
        "TPOT p50 ms",
        "p90",
        "p99",
        "SLO kept",
        "goodput /s",
        "prefill busy",
    )
    return _table(columns, rows)


def _latencies(found: Mapping[str, Any]) -> list[object]:
    if "overloaded" in found:
        return [f"{found['overloaded']} overloaded", *[""] * 8]
    ttft, tpot = found["ttft_seconds"], found["tpot_seconds"]
    return [
        *(as_ms(of.get(p, 0.0)) for of in (ttft, tpot) for p in ("p50", "p90", "p99")),
        f"{found['attainment']:.1%}" + (f" ± {found['deviation']:.1%}" if "deviation" in found else ""),
        f"{found['goodput_per_second']:.2f}",
        f"{found['prefill_busy']:.0%}" if found["prefill_busy"] is not None else "",
    ]


def _ways(plan: Mapping[str, Any]) -> str:
    return _table(
        ("kind", "GPU", "measured", "layout", "needed", "with spare", "GPUs", "a month"),
        [
            (
                one["kind"],
                one["gpu_type"],
                "yes" if one["measured"] else "no",
                _layouts(one),
                _pools(one["needed"]),
                _pools(one["pools"]),
                one["num_gpus"],
                f"{one['per_month']:,.0f}",
            )
            for one in plan["ways"]
        ],
    )


def _memory(plan: Mapping[str, Any]) -> str:
    rows: list[list[object]] = []
    for name, budgets in plan["memory"].items():
        for one in budgets:
            sizes = (f"rank_{part}_bytes" for part in ("weight", "activation", "overhead", "kv"))
            rows.append(
                [
                    f"{name} {one['layout']}",
                    *(f"{one[size] / 1e9:.1f} GB" for size in sizes),
                    f"{one['kv_bytes_per_token'] / 1e3:.1f} kB",
                    f"{one['kv_tokens']:,}",
                    f"{one['max_sequences_at_mean_context']:,}",
                ]
            )
    columns = ("GPU, layout", "weights", "activations", "overhead", "KV", "KV a token", "KV tokens", "sequences")
    missed = [line for lines in plan["does_not_fit"].values() for line in lines]
    return _table(columns, rows) + _list(missed)


def _what_if(plan: Mapping[str, Any]) -> str:
    return _table(
        ("if", "planned pools would keep", "needed with spare", "GPUs", "a month"),
        [
            (
                one["what"],
                f"{one['attainment']:.1%}",
                _pools(one["pools"]),
                one["num_gpus"] if one["num_gpus"] is not None else "",
                f"{one['per_month']:,.0f}" if one["per_month"] is not None else "",
            )
            for one in plan["what_if"]
        ],
    )


def _money(plan: Mapping[str, Any]) -> str:
    money, even = plan["money"], plan["break_even"]
    share = money["following_per_month"] / money["per_month"] if money["per_month"] else 0.0
    rows = [
        (
            what,
            f"{money[f'{which}_gpu_hours']:,.0f}",
            f"{part * money['per_month']:,.0f}",
            f"{part * money['per_million']:.3f}",
            f"{part * money['per_million_output']:.3f}",
        )
        for what, which, part in (
            ("as planned, all day", "fixed", 1.0),
            ("following the day, hour by hour", "following", share),
        )
    ]
    if even is not None:
        per_million = even["api_per_month"] / money["tokens_per_month"] * 1e6
        rows.append(("an API, the same tokens", "", f"{even['api_per_month']:,.0f}", f"{per_million:.3f}", ""))
    found = _table(("", "GPU-hours a month", "a month", "a million tokens", "a million of output"), rows)
    if even is not None:
        found += "<p class=dim>" + (
            "own GPUs are not cheaper at any traffic up to 64 × this"
            if even["factor"] is None
            else f"own GPUs are cheaper from {even['factor']:.2g} × this traffic on: {even['requests_per_second']:.3g}/s"
        )
    return found


def _rooflines(plan: Mapping[str, Any]) -> str:
    return _table(
        ("phase", "operations a byte", "ridge", "bound by", "TFLOP/s", "of the roof", "step ms"),
        [
            (
                one["phase"],
                f"{one['intensity']:.0f}",
                f"{one['ridge']:.0f}",
                one["bound"],
                f"{one['flops_per_second'] / 1e12:.1f}",
                f"{one['reached']:.0%}",
                f"{one['seconds'] * 1e3:.1f}",
            )
            for one in plan["rooflines"]
        ],
    )


def _cluster(chosen: Mapping[str, Any]) -> str:
    decided = chosen["cluster"]
    if decided is None:
        return "<p class=dim>nothing: the engine serves no such precision</p>"
    lines = "\n".join(f"{section}: {dumps(values)}" for section, values in decided.items())
    return f"<pre>{escape(lines)}</pre>"


def _figures(chosen: Mapping[str, Any]) -> str:
    return _table(
        ("figure", "value", "origin", "± ", "source"),
        [
            (name, f"{one['value']:.4g}", one["origin"], f"{one['uncertainty']:.0%}", one["source"])
            for name, one in chosen["gpu"].items()
        ],
    )


# -- plots


def _hours(plan: Mapping[str, Any]) -> str:
    hours = plan["by_hour"]
    needed = [(one["hour"], one["gpus_following"]) for one in hours]
    fixed = [(one["hour"], plan["chosen"]["num_gpus"]) for one in hours]
    return _plot("GPUs over a day: planned, and what each hour needs", {"planned": fixed, "needed": needed}, "hour")


def _traffic(plan: Mapping[str, Any]) -> str:
    rows = [one for one in plan["what_if"] if one["what"].startswith("traffic × ") and one["num_gpus"] is not None]
    points = [(float(one["what"].removeprefix("traffic × ")), one["num_gpus"]) for one in rows]
    return _plot("GPUs over traffic, times what was asked", {"needed": points}, "× traffic")


def _latency(plan: Mapping[str, Any], key: str, name: str, limit: float) -> str:
    """Percentiles of prediction and simulation, beside the limit."""
    chosen = plan["chosen"]
    places = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    lines: dict[str, Points] = {}
    for who in WHO:
        found = (chosen[who] or {}).get(key)
        if found:
            lines[who] = [(place, found[p] * 1e3) for p, place in places.items()]
    lines["limit"] = [(50.0, limit * 1e3), (99.0, limit * 1e3)]
    return _plot(f"{name}, ms, by percentile", lines, "percentile")


def _roofline(plan: Mapping[str, Any]) -> str:
    """Both axes are powers of ten."""
    roofs = plan["rooflines"]
    peak = max(one["attainable_flops_per_second"] for one in roofs)
    ridge = roofs[0]["ridge"]
    top = max(peak, *(one["attainable_flops_per_second"] * ridge / min(one["intensity"], ridge) for one in roofs))
    left, right = 0.0, max(4.0, *(log10(one["intensity"]) for one in roofs))
    roof = [(left, log10(top / ridge)), (log10(ridge), log10(top)), (right, log10(top))]
    marks = {one["phase"]: [(log10(one["intensity"]), log10(one["flops_per_second"]))] for one in roofs}
    return _plot("Roofline: log₁₀ FLOP/s over log₁₀ operations a byte", {"roof": roof, **marks}, "log₁₀", zero=False)


def _ticks(low: float, high: float) -> list[float]:
    """At most six round numbers between them."""
    least = (high - low) / 5 or 1.0
    power = 10.0 ** floor(log10(least))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= least * (1 - 1e-9))
    return [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


COLOURS = ("var(--ours)", "var(--theirs)", "#3f9142", "#8250c8")


def _plot(title: str, lines: Mapping[str, Points], x_name: str, *, zero: bool = True) -> str:
    """Lines, and points where there is one alone; axes from the data, y from 0 unless told otherwise."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    if not xs:
        return ""
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = (0.0 if zero else min(ys) - 0.2), max(ys) * (1.08 if zero else 1) + (0 if zero else 0.2)
    x_span, y_span = (x_high - x_low) or 1.0, (y_high - y_low) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / x_span * (WIDTH - LEFT - 12)
        return across, HEIGHT - BOTTOM - (y - y_low) / y_span * (HEIGHT - BOTTOM - 24)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{escape(title)}">']
    for value in _ticks(y_low, y_high):
        _, down = at(x_low, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{down:.1f}" y2="{down:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in _ticks(x_low, x_high):
        across, _ = at(value, y_low)
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{_tick(value)}</text>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [at(x, y) for x, y in points]
        if len(placed) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        parts.append(f'<text x="{LEFT + 8 + 92 * number}" y="12" style="fill:{colour}">{escape(name)}</text>')
    parts.append(f'<text x="{WIDTH - 12}" y="{HEIGHT - 1}" text-anchor="end">{escape(x_name)}</text></svg>')
    return f"<figure>{''.join(parts)}<figcaption>{escape(title)}</figcaption></figure>"
