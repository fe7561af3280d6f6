"""`headrace simulate`: a trace on virtual workers, with production's router and schedulers."""

import json
import pathlib

import click

from cluster.commands.screen import screen
from headrace.errors import ConfigError


@click.command(name="simulate")
@click.option("--trace", type=click.Path(path_type=pathlib.Path), help="Azure .csv or Mooncake .jsonl")
@click.option("--shape", help="made traffic instead of a trace: smooth, shared-block, hot-prefix, long-among, …")
@click.option("--requests", "num_requests", type=click.IntRange(min=1), help="how many; of a shape 1,000 unless given")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="requests a second; the trace's own unless given"
)
@click.option("--bursts", is_flag=True, help="once a minute, 26 seconds' requests within one second")
@click.option("--day", is_flag=True, help="a rate that swings by 80 %, ten minutes a day")
@click.option("--prefill", type=click.IntRange(min=0), default=8, show_default=True)
@click.option("--decode", type=click.IntRange(min=0), default=8, show_default=True)
@click.option("--unified", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--routers", type=click.IntRange(min=1), default=1, show_default=True, help="that take turns")
@click.option("--card", default="h100", show_default=True, help="what a worker runs on: h100 or h200")
@click.option(
    "--policy", "policies", multiple=True, default=("ours",), show_default=True, help="may be given often; or all"
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--ttft", type=float, default=3.0, show_default=True, help="what goodput asks of TTFT, seconds")
@click.option("--tpot", type=float, default=0.05, show_default=True, help="what goodput asks of TPOT, seconds")
@click.option("--json", "json_path", type=click.Path(path_type=pathlib.Path), help="where the whole result is written")
@click.option("--plot", "plot_path", type=click.Path(path_type=pathlib.Path), help="a PNG (needs the `plots` extra)")
def command(
    trace: pathlib.Path | None,
    shape: str | None,
    num_requests: int | None,
    rate: float | None,
    bursts: bool,
    day: bool,
    prefill: int,
    decode: int,
    unified: int,
    routers: int,
    card: str,
    policies: tuple[str, ...],
    seed: int,
    ttft: float,
    tpot: float,
    json_path: pathlib.Path | None,
    plot_path: pathlib.Path | None,
) -> None:
    """Replay traffic on virtual workers, and compare policies of placement.

    Requests pass production's admission, placement, index and schedulers under a virtual clock; what a step or a
    transfer takes comes from the card's cost model.
    """
    from cluster.simulation import cards, compare, plots
    from cluster.simulation.fleet import Fleet
    from cluster.simulation.policies import POLICIES
    from headrace import generators, traces
    from headrace.goodput import Slo
    from headrace.pyplot import pyplot

    fleet = Fleet(cards.load(card), prefill=prefill, decode=decode, unified=unified, routers=routers)
    if (trace is None) == (shape is None):
        raise click.UsageError("give either --trace or --shape")
    num_removed = 0
    if trace is not None:
        try:
            rows, num_removed = traces.within(traces.read(trace), fleet.max_context_tokens)
        except (OSError, traces.TraceError) as error:
            raise ConfigError(str(error)) from error
        if num_requests is not None:
            rows = generators.window(rows, num_requests, seed)
        if rate is not None:
            rows = generators.scaled(rows, rate / generators.rate(rows))
    else:
        assert shape is not None
        rows = generators.generate(shape, num_requests or 1000, rate or 10.0, seed)
    if bursts:
        rows = generators.bursts(rows)
    if day:
        rows = generators.day_curve(rows)
    if plot_path is not None:
        pyplot()
    traffic = (
        f"{trace.name if trace is not None else shape}: {len(rows)} requests, {generators.rate(rows):.2f} a second"
    )
    if num_removed:
        traffic += f", {num_removed} too long"
    console = screen()
    console.print(traffic, highlight=False)
    slo = Slo(ttft, tpot)
    runs = [
        compare.run(fleet, policy, rows, slo=slo, seed=seed)
        for policy in (tuple(POLICIES) if "all" in policies else policies)
    ]
    console.print(compare.table([summary for summary, _ in runs]))
    if json_path is not None:
        json_path.write_text(json.dumps(compare.as_json(fleet, slo, runs, traffic)) + "\n", encoding="utf-8")
    if plot_path is not None:
        plots.draw(runs, plot_path)
