"""A plan on a terminal: what to run, whether it holds, what it costs, what if."""

import json
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.planning.caveats import as_ms, recorded, unsure
from cluster.planning.check import Simulated
from cluster.planning.load import Pools
from cluster.planning.memory import Budget
from cluster.planning.options import Option, worth_comparing
from cluster.planning.plan import Plan
from cluster.planning.plan_json import cluster
from cluster.planning.prediction import Overload, Prediction
from cluster.planning.settle import Round, Settled

GB = 1e9


def show(plan: Plan, console: Console) -> None:
    option, asked = plan.option, plan.asked
    traffic = plan.traffic
    console.print(f"[bold]{escape(plan.model.name)}[/] on {escape(option.gpu.name)}: {headline(plan)}", highlight=False)
    console.print(
        f"{escape(traffic.about)}; {traffic.mean_per_second:.3g} requests a second on average, sized for "
        f"{plan.load.requests_per_second:.3g}; SLO: {100 * asked.slo.attainment:g}% within "
        f"TTFT {asked.slo.ttft_seconds:g} s, TPOT {asked.slo.tpot_seconds * 1e3:g} ms",
        highlight=False,
    )
    console.print(unsure(option, plan.what_ifs), highlight=False, markup=False)
    console.print(recorded(option, plan.model, asked.held), highlight=False, markup=False)
    for warning in plan.warnings:
        console.print(f"! {warning}", highlight=False, markup=False, style="yellow")
    for title, table in tables(plan):
        console.print(f"\n[bold]{title}[/]")
        console.print(table)
    if plan.break_even is not None:
        console.print("\n" + broken_even(plan), highlight=False)
    console.print("\n[bold]In a cluster's file[/]")
    decided = cluster(plan)
    if decided is None:
        console.print("  nothing: the engine serves no such precision")
    for section, values in (decided or {}).items():
        console.print(f"  {section}: {json.dumps(values)}", highlight=False, markup=False, soft_wrap=True)
    console.print("\n[bold]Stands on[/]")
    for line in plan.assumptions:
        console.print(f"  {line}", highlight=False, markup=False, style="dim")
    console.print("[bold]Does not know[/]")
    for line in plan.unknowns:
        console.print(f"  {line}", highlight=False, markup=False, style="dim")


def headline(plan: Plan) -> str:
    option = plan.option
    return (
        f"{said(option.pools)} ({option.layouts}), {option.num_gpus} GPUs, {option.per_month:,.0f} a month, "
        f"{plan.money.per_million:.3f} a million tokens"
    )


def said(pools: Pools) -> str:
    if pools.unified:
        return f"{pools.unified} unified workers"
    return f"{pools.prefill} prefill and {pools.decode} decode workers"


def tables(plan: Plan) -> Iterable[tuple[str, Table]]:
    yield "Predicted against simulated (production's router and schedulers, virtual time)", checked(plan)
    yield "Memory of one GPU, GB", memory(plan)
    yield "Ways to serve, cheapest first (by prediction)", ways(plan)
    yield "Roofline of a step, a GPU", rooflines(plan)
    yield "Money", money(plan)
    yield "What if (by prediction)", what_ifs(plan)


def _table(*columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def checked(plan: Plan) -> Table:
    table = _table(
        "pools", "", "TTFT p50 ms", "p90", "p99", "TPOT p50 ms", "p90", "p99", "SLO kept", "goodput /s", "prefill busy"
    )
    for settled in filter(None, (plan.chosen, plan.other)):
        for one in settled.rounds:
            _round(table, settled, one)
    prediction, full = plan.prediction, plan.chosen.full
    _predicted(table, f"{_short(plan.option)}, none missing", prediction)
    if full is not None and full is not plan.chosen.rounds[-1].simulated:
        _simulated(table, "", full)
    return table


def _short(option: Option, pools: Pools | None = None) -> str:
    return (pools or option.pools).said


def _round(table: Table, settled: Settled, one: Round) -> None:
    _predicted(table, f"{_short(settled.option, one.pools)} {settled.option.gpu.name}", one.predicted)
    _simulated(table, "", one.simulated)


def _predicted(table: Table, name: str, found: Prediction | Overload) -> None:
    if isinstance(found, Overload):
        table.add_row(name, "predicted", f"{found.pool} overloaded", *[""] * 8)
        return
    row = (found.ttft_seconds, found.tpot_seconds, found.attainment, found.goodput_per_second, found.prefill_busy)
    table.add_row(name, "predicted", *_row(*row))


def _simulated(table: Table, name: str, found: Simulated) -> None:
    row = (found.ttft_seconds, found.tpot_seconds, found.attainment, found.goodput_per_second, found.prefill_busy)
    table.add_row(name, "simulated", *_row(*row, found.deviation), style="cyan")


def _row(
    ttft: dict[str, float],
    tpot: dict[str, float],
    kept: float,
    good: float,
    busy: float | None,
    off: float | None = None,
) -> list[str]:
    return [
        *(as_ms(of.get(p, 0.0)) for of in (ttft, tpot) for p in ("p50", "p90", "p99")),
        f"{kept:.1%}" + (f" ± {off:.1%}" if off is not None else ""),
        f"{good:.2f}",
        f"{busy:.0%}" if busy is not None else "",
    ]


def memory(plan: Plan) -> Table:
    table = _table("GPU, layout", "weights", "activations", "overhead", "KV", "KV a token", "tokens", "sequences")
    context = plan.traffic.input_tokens + plan.traffic.output_tokens
    for name, budgets in plan.budgets.items():
        for one in worth_comparing(budgets):
            table.add_row(*_memory_row(name, one, context), style="bold" if _is_used(plan, name, one) else "")
    for name, missed in plan.too_large.items():
        for large in missed:
            table.add_row(
                f"{name} {large.layout}", f"does not fit: {large.missing_bytes / GB:.1f} GB missing", *[""] * 6
            )
    return table


def _is_used(plan: Plan, name: str, one: Budget) -> bool:
    option = plan.option
    return name == option.gpu.name and one.layout in (option.prefill_budget.layout, option.decode_budget.layout)


def _memory_row(name: str, one: Budget, context: float) -> list[str]:
    return [
        f"{name} {one.layout}",
        *(
            f"{size / GB:.1f}"
            for size in (one.rank_weight_bytes, one.rank_activation_bytes, one.rank_overhead_bytes, one.rank_kv_bytes)
        ),
        f"{one.kv_bytes_per_token / 1e3:.1f} kB",
        f"{one.kv_tokens:,}",
        f"{one.max_sequences(context):,}",
    ]


def ways(plan: Plan, most: int = 8) -> Table:
    table = _table("kind", "GPU", "measured", "layout", "needed", "with spare", "GPUs", "a month")
    for option in plan.ways[:most]:
        table.add_row(
            option.kind,
            option.gpu.name,
            "yes" if option.gpu.is_measured else "no",
            option.layouts,
            _short(option, option.needed),
            _short(option),
            str(option.num_gpus),
            f"{option.per_month:,.0f}",
        )
    return table


def rooflines(plan: Plan) -> Table:
    table = _table("phase", "operations a byte", "ridge", "bound by", "TFLOP/s", "of the roof", "step ms")
    for one in plan.rooflines:
        table.add_row(
            one.phase,
            f"{one.intensity:.0f}",
            f"{one.ridge:.0f}",
            one.bound,
            f"{one.flops_per_second / 1e12:.1f}",
            f"{one.reached:.0%}",
            f"{one.seconds * 1e3:.1f}",
        )
    return table


def money(plan: Plan) -> Table:
    found = plan.money
    table = _table("pools", "GPU-hours a month", "a month", "a million tokens", "a million of output")
    share = found.following_per_month / found.per_month if found.per_month else 0.0
    table.add_row(
        "as planned, all day",
        f"{found.fixed_gpu_hours:,.0f}",
        f"{found.per_month:,.0f}",
        f"{found.per_million:.3f}",
        f"{found.per_million_output:.3f}",
    )
    table.add_row(
        "following the day, hour by hour",
        f"{found.following_gpu_hours:,.0f}",
        f"{found.following_per_month:,.0f}",
        f"{found.per_million * share:.3f}",
        f"{found.per_million_output * share:.3f}",
    )
    return table


def broken_even(plan: Plan) -> str:
    found = plan.break_even
    assert found is not None
    head = f"An API would ask {found.api_per_month:,.0f} a month for this, own GPUs cost {found.own_per_month:,.0f}: "
    if found.factor is None:
        return head + "own GPUs are not cheaper at any traffic up to 64 × this"
    return (
        head
        + f"own GPUs are cheaper from {found.factor:.2g} × this traffic on ({found.requests_per_second:.3g} a second)"
    )


def what_ifs(plan: Plan) -> Table:
    table = _table("if", "planned pools would keep", "needed with spare", "GPUs", "a month")
    for one in plan.what_ifs:
        if one.pools is None:
            table.add_row(one.what, f"{one.attainment:.1%}", "no size keeps the SLO", "", "")
            continue
        table.add_row(
            one.what,
            f"{one.attainment:.1%}",
            _short(plan.option, one.pools),
            str(one.num_gpus),
            f"{one.per_month or 0.0:,.0f}",
        )
    return table
