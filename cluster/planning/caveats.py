"""What a plan stands on, what it does not know, and what in it deserves doubt: said beside its figures."""

import math
from collections.abc import Sequence
from dataclasses import replace

from cluster.planning.asked import PlanAsked
from cluster.planning.check import Simulated
from cluster.planning.gpus import BASIS, BASIS_PRECISION
from cluster.planning.load import Target
from cluster.planning.options import HOURS_PER_MONTH, Option
from cluster.planning.outlook import WhatIf
from cluster.planning.prediction import Prediction
from cluster.planning.settle import Settled
from cluster.planning.shapes import SERVED, ModelSpec, Precision
from cluster.planning.sizing import MOST_WORKERS, Unreachable
from cluster.planning.traffic import Traffic

SURE_SCV = 2.0  # of arrivals, up to which predictions were held against simulations
FEWEST_BURSTS = 40  # in a run that says anything of them, as of requests
MOST_NAMED = 3  # ways of serving in one line
DOUBT = 0.15  # between predicted and simulated, from which on it is said


def assumptions(asked: PlanAsked, model: ModelSpec, option: Option, traffic: Traffic) -> list[str]:
    gpu = option.gpu
    found = [
        f"{model.name}: shape from {model.source}; {model.num_params / 1e9:.2f} B parameters, {model.attention}",
        *(f"{gpu.name}, {name}: {figure.origin}, {figure.source}" for name, figure in gpu.figures().items()),
        f"times of other shapes than Llama-3.1-8B in bfloat16, with which {gpu.name} was measured, follow from bytes and "
        "operations (roofline scaling)"
        if gpu.is_measured
        else f"{gpu.name}: data sheet × what measured cards reach of theirs",
        f"{gpu.name}: attention of prompts runs in waves over {gpu.sheet.multiprocessors} multiprocessors; how slow "
        "programs that share a context are, and how round the roofline's corner is, was fitted to steps of an H200",
        *traffic.assumptions,
        f"sized for {asked.headroom.traffic:g} × the peak, no pool busier than 90 %, and "
        f"{asked.headroom.spare_workers} spare worker(s) a pool, whose loss it stands",
        f"a request keeps the SLO if TTFT ≤ {asked.slo.ttft_seconds:g} s and TPOT ≤ {asked.slo.tpot_seconds:g} s; failed "
        "ones do not",
        f"a GPU-hour costs what was given ({gpu.price_per_hour:g}), {HOURS_PER_MONTH:g} hours a month",
    ]
    if option.kind == "disaggregated":
        kv = min(option.prefill_budget.kv_bytes, option.decode_budget.kv_bytes)
        found.append(f"every worker has {kv / 1e9:.1f} GB of KV: engine.kv_bytes is one for all pools")
    if max(option.prefill_budget.layout.tp, option.decode_budget.layout.tp) > 1:
        found.append(
            "tp: a sum of 8 µs twice a layer, and its rows over the link; decode steps of two ranks were measured "
            "(docs/benchmarks/parallel-h200.json), prompts on several ranks and more than two ranks were not"
        )
    return found


def as_ms(seconds: float) -> str:
    """Milliseconds in the two digits that the record allows."""
    return f"{float(f'{seconds * 1e3:.2g}'):g}"


def unsure(option: Option, what_ifs: Sequence[WhatIf]) -> str:
    """How many GPUs it would be if all steps were as much faster or slower as the figures are unsure."""
    gpu = option.gpu
    counts = [one.num_gpus for one in what_ifs if one.what.startswith("steps × ")]
    where = "measured" if gpu.is_measured else "from a data sheet, not measured"
    low, high = (min(found), max(found)) if (found := [one for one in counts if one is not None]) else (0, 0)
    if len(found) < len(counts):
        ends = f"{low} GPUs, or more than can be had, at their ends"
    else:
        ends = f"{low} to {high} GPUs at their ends" if low < high else f"{low} GPUs at either end"
    return f"{gpu.name}'s figures are {where}, ± {gpu.uncertainty:.0%}: {ends}"


def recorded(option: Option, model: ModelSpec, precision: Precision) -> str:
    """How far simulations with this GPU's figures were from what such GPUs did, of runs that were kept; and what of this
    plan none of them had."""
    gpu = option.gpu
    if not gpu.record:
        return (
            f"{gpu.name}: no run of whole traffic was kept; how far simulated TTFT and TPOT are from real ones is open"
        )
    ttft, tpot, goodput = (f"{math.ceil(gpu.record[name] * 100):d} %" for name in ("ttft", "tpot", "goodput"))
    said = (
        f"{gpu.name}: of {gpu.record['runs']:.0f} runs of two GPUs with Llama-3.1-8B, to which nothing was fitted, TTFT "
        f"was simulated within {ttft}, TPOT within {tpot} (p50 and p90) and goodput within {goodput} (docs/planning.md)"
    )
    layouts = {budget.layout for budget in (option.prefill_budget, option.decode_budget)}
    other = [
        *([model.name] if _layers(model) != _layers(BASIS) else []),
        *sorted(f"tp {layout.tp}, pp {layout.pp}" for layout in layouts if layout.world_size > 1),
        *([f"{precision.weights} with KV in {precision.kv}"] if precision != BASIS_PRECISION else []),
        *([f"{option.num_gpus} GPUs"] if option.num_gpus > 2 else []),
    ]
    return f"{said}. No run was kept of {', '.join(other)}: how near this plan is remains open" if other else said


def _layers(model: ModelSpec) -> ModelSpec:
    """What its steps cost depends on."""
    return replace(model, name="", source="", max_context_tokens=0)


def unknowns(asked: PlanAsked, option: Option) -> list[str]:
    found = [
        "hand-overs between hosts: the link is that within a host; a slower network adds to TTFT by bytes over bandwidth",
        "retries of clients, cancelled requests, and tenants' quotas",
        "correlated failures: a host that takes several workers with it",
        "how long a new worker takes to start, and whether GPUs are to be had",
        "speculation, adapters and structured output, which change what a step costs",
        "power, storage, network, staff: the price of a GPU-hour is all that is counted",
    ]
    if option.kind == "disaggregated":
        found.append(
            "sequences whose whole context decode already holds are computed there: with multi-turn traffic decode "
            "is a little busier, and prefill less, than predicted; the simulation shows it"
        )
    else:
        cost, limit = option.decode.cost, asked.engine.max_step_tokens
        stall = cost.step_seconds(limit, limit / 2, 1, limit)
        found.append(
            f"gaps between tokens: TPOT is a mean, and a step with {limit} tokens of prompts holds up every stream of its "
            f"worker for {stall * 1e3:.0f} ms, which no limit here forbids; separate pools have no such steps"
        )
    if not asked.simulate.requests:
        found.append("whether it holds: nothing was simulated")
    return found


def _by_simulation(chosen: Settled, target: Target) -> list[str]:
    """Where it settled on more than prediction did, or by a hair."""
    found, first, last = [], chosen.rounds[0], chosen.rounds[-1]
    if chosen.holds and last.pools != first.pools:
        found.append(
            f"prediction asked for {first.pools.said}, simulation for {last.pools.said} (spare workers not counted): "
            "what if, pools that follow the day and break-even are by prediction, and too low by as much"
        )
    kept, by_chance = last.simulated.attainment, last.simulated.deviation
    if chosen.holds and kept - by_chance < target.attainment:
        found.append(
            f"{kept:.1%} ± {by_chance:.1%} of {_counted(last.simulated)} keep the SLO without spare workers, and "
            f"{100 * target.attainment:g}% are asked for: too near to tell, raise simulate.requests"
        )
    found += _longer_with_more(chosen, last.simulated, chosen.full)
    return found


def _counted(found: Simulated) -> str:
    drawn = f", of traffic that was drawn {found.num_draws} times," if found.num_draws > 1 else ""
    return f"{found.num_requests} simulated requests{drawn}"


def _longer_with_more(chosen: Settled, fewer: Simulated, more: Simulated | None) -> list[str]:
    """A reader who finds that a larger pool is slower looks for the mistake: mostly it is the traffic's chance."""
    if more is None or more.pools == fewer.pools or more.ttft_seconds["p90"] <= fewer.ttft_seconds["p90"]:
        return []
    off = math.hypot(more.ttft_p90_deviation, fewer.ttft_p90_deviation)
    beyond = more.ttft_seconds["p90"] - fewer.ttft_seconds["p90"] > 2 * off
    said = (
        f"simulated TTFT p90 is {_with_chance(more)} with all workers and {_with_chance(fewer)} without the spare ones: "
        + ("more than chance makes of it" if beyond else "no more apart than by chance")
    )
    if min(more.scale, fewer.scale) < 1:
        return [f"{said}; each of its own small part of the pools, which queues more than the whole does"]
    if chosen.option.kind == "aggregated":
        said += (
            "; more unified workers shorten TPOT rather than TTFT: placement has a prompt wait behind another one where "
            "that holds up fewer streams"
        )
    return [said]


def _with_chance(found: Simulated) -> str:
    return f"{found.ttft_seconds['p90'] * 1e3:.0f} ± {found.ttft_p90_deviation * 1e3:.0f} ms"


def _bursts(asked: PlanAsked, chosen: Settled, scv: float) -> list[str]:
    """Arrivals of so much burstiness come about as many at a time: a run is as sure as the bursts in it are many."""
    if not chosen.rounds:
        said = (
            f"burstiness {scv:.3g}: waits were held against simulations up to {SURE_SCV:g}, and nothing was simulated"
        )
        return [said] if scv > SURE_SCV else []
    number = chosen.rounds[-1].simulated.num_requests
    if asked.traffic.trace is not None or number >= FEWEST_BURSTS * scv:
        return []
    return [
        f"burstiness {scv:g}: {number} simulated requests are about {max(number / scv, 1):.0f} bursts, too few to tell: "
        f"raise simulate.requests to {math.ceil(FEWEST_BURSTS * scv):,}"
    ]


def not_compared(asked: PlanAsked, unreachable: Sequence[Unreachable]) -> list[str]:
    """Ways that would need more workers than are counted to, of those that were asked for."""
    ways = [
        one.way for one in unreachable if one.too_many and (asked.serve == "any" or one.way.startswith(asked.serve))
    ]
    if not ways:
        return []
    others = f", and {len(ways) - MOST_NAMED} more" if len(ways) > MOST_NAMED else ""
    return [
        f"more than {MOST_WORKERS:,} workers of a pool are not counted to: wider ones may have been taken though these are "
        f"cheaper: {'; '.join(ways[:MOST_NAMED])}{others}"
    ]


def warnings(asked: PlanAsked, chosen: Settled, traffic: Traffic, prediction: Prediction) -> list[str]:
    option, target = chosen.option, asked.slo.target
    found = []
    if not chosen.holds:
        last = chosen.rounds[-1].simulated
        found.append(
            f"the SLO did not hold in simulation after {len(chosen.rounds)} rounds: {last.attainment:.1%}, and "
            f"{100 * target.attainment:g}% are asked for"
        )
        if (more := chosen.no_better) is not None:
            found[-1] += f"; many more workers are no help: {more.pools.said} come to {more.simulated.attainment:.1%}"
    found += option.gpu.notes
    if chosen.rounds:
        found += _by_simulation(chosen, target)
    if "float32" in (asked.held.weights, asked.held.kv):
        found.append(
            "float32 is computed as fast as bfloat16 here, and was not measured: without tensor cores it is 4 to 16 times "
            "slower, and prompts take as much longer"
        )
    if not asked.held.is_served:
        found.append(
            f"weights in {asked.held.weights} with KV in {asked.held.kv} are arithmetic alone: the engine "
            f"serves {', '.join(SERVED)}"
        )
    if traffic.num_too_long:
        share = traffic.num_too_long / traffic.num_seen
        found.append(
            f"{traffic.num_too_long} of {traffic.num_seen} requests ({share:.1%}) are longer than the context and would be "
            f"refused: not planned for; those that fit are of {traffic.input_tokens:.0f} + {traffic.output_tokens:.0f} "
            "tokens"
        )
    found += _bursts(asked, chosen, traffic.peak.gap_scv)
    if chosen.full is not None:
        for name, ours, theirs in (
            ("TTFT p50", prediction.ttft_seconds["p50"], chosen.full.ttft_seconds.get("p50", 0.0)),
            ("TPOT p50", prediction.tpot_seconds["p50"], chosen.full.tpot_seconds.get("p50", 0.0)),
        ):
            if theirs and abs(ours / theirs - 1) > DOUBT:
                found.append(
                    f"{name}: predicted {ours * 1e3:.1f} ms, simulated {theirs * 1e3:.1f} ms: believe the simulation"
                )
        if not chosen.full.settled:
            found.append(
                f"{chosen.full.num_requests} simulated requests are too few for pools to fill: TPOT will be higher, raise "
                "simulate.requests"
            )
        if chosen.full.scale < 1:
            found.append(f"simulated on {chosen.full.scale:.0%} of the pools with as much of the traffic")
    if traffic.peak.gap_scv == 1.0 and asked.traffic.burstiness is None and asked.traffic.trace is None:
        found.append("arrivals were taken to be Poisson; real ones come in bursts (see the row of it under what if)")
    return found
