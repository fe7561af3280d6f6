"""A plan: what was asked, the ways to serve it, the one to take, and whether it holds.

    fit the memory → size every way → settle the best aggregated and the best disaggregated one by simulation
    → the cheaper of the two → what it costs, and what if

A pool that the simulation finds too small grows until the SLO holds, so that the figures a plan stands on were run.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from cluster.planning import caveats, outlook, speed
from cluster.planning.asked import PlanAsked
from cluster.planning.gpus import GpuType
from cluster.planning.load import Load, Target
from cluster.planning.memory import Budget, TooLarge, does_not_fit, feasible
from cluster.planning.options import Option, options
from cluster.planning.outlook import BreakEven, Money, WhatIf
from cluster.planning.prediction import Prediction
from cluster.planning.settle import Say, Settled, best, check_budget, over_budget, settle, with_full, within
from cluster.planning.shapes import ModelSpec
from cluster.planning.sizing import Unreachable
from cluster.planning.traffic import Traffic, of
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    asked: PlanAsked
    model: ModelSpec
    traffic: Traffic
    load: Load
    budgets: dict[str, list[Budget]]
    too_large: dict[str, list[TooLarge]]
    ways: list[Option]
    chosen: Settled
    other: Settled | None
    prediction: Prediction
    money: Money
    what_ifs: list[WhatIf]
    by_hour: list[dict[str, Any]]
    rooflines: list[speed.Roofline]
    break_even: BreakEven | None
    assumptions: list[str]
    unknowns: list[str]
    warnings: list[str] = field(default_factory=list)

    @property
    def option(self) -> Option:
        return self.chosen.option


def make(asked: PlanAsked, model: ModelSpec, say: Say = lambda line: None) -> Plan:
    """The plan. ConfigError, with figures, where nothing fits, no size keeps the SLO, or a budget is below the minimum."""
    target, precision, spare = asked.slo.target, asked.held, asked.headroom.spare_workers
    context = asked.engine.max_context_tokens or model.max_context_tokens
    if context > model.max_context_tokens:
        raise ConfigError.out_of_range(
            "engine.max_context_tokens", context, f"at most the model's {model.max_context_tokens}"
        )
    traffic = of(
        asked.traffic, max_context_tokens=context, num_rows=2 * asked.simulate.requests, seed=asked.simulate.seed
    )
    load = traffic.peak.at(asked.headroom.traffic)
    gpus = [(one, one.resolve()) for one in asked.gpus]
    longest = asked.engine.max_context_tokens or traffic.longest_tokens
    budgets, too_large = _fit(asked, model, [gpu for _, gpu in gpus], longest)
    ways: list[Option] = []
    unreachable: list[Unreachable] = []
    for _, gpu in gpus:
        found, missed = options(
            model,
            gpu,
            budgets[gpu.name],
            precision,
            load,
            target,
            spare=spare,
            max_num_seqs=asked.engine.max_num_seqs,
            max_step_tokens=asked.engine.max_step_tokens,
        )
        ways += [option for option in found if asked.serve in ("any", option.kind)]
        unreachable += missed
    if not ways:
        nearest = max(unreachable, key=lambda one: (one.attainment, -one.beyond(target)))
        raise ConfigError(f"no number of GPUs meets the SLO: {nearest.reason}", attainment=nearest.attainment)
    ways.sort(key=lambda option: (option.per_hour, option.num_gpus, option.pools.num_workers))
    available = {gpu.name: one.available for one, gpu in gpus}
    affordable = within(asked, ways, available)
    tried = [
        settle(asked, option, traffic, load, target, longest, say)
        for kind in ("disaggregated", "aggregated")
        if (option := best(affordable, kind)) is not None
    ]
    tried.sort(
        key=lambda one: (
            not one.holds,
            over_budget(asked, one.option, available) is not None,
            one.option.per_hour,
            one.option.num_gpus,
        )
    )
    chosen, other = tried[0], tried[1] if len(tried) > 1 else None
    check_budget(asked, chosen.option, available)
    chosen = with_full(asked, chosen, traffic, load, target, longest, say)
    option = chosen.option
    prediction = option.predict(option.pools, load, target)
    assert isinstance(prediction, Prediction)
    api = asked.api
    return Plan(
        asked=asked,
        model=model,
        traffic=traffic,
        load=load,
        budgets=budgets,
        too_large=too_large,
        ways=ways,
        chosen=chosen,
        other=other,
        prediction=prediction,
        money=outlook.money(option, load, target, list(traffic.by_hour), spare),
        what_ifs=outlook.what_ifs(option, load, target, spare),
        by_hour=_by_hour(option, traffic, load, target, spare),
        rooflines=_rooflines(asked, model, option, prediction, traffic),
        break_even=outlook.break_even(
            option, load, target, traffic.mean_per_second, spare, api.per_million_input, api.per_million_output
        )
        if api is not None
        else None,
        assumptions=caveats.assumptions(asked, model, option, traffic),
        unknowns=caveats.unknowns(asked, option),
        warnings=caveats.warnings(asked, chosen, traffic, prediction) + caveats.not_compared(asked, unreachable),
    )


def _fit(
    asked: PlanAsked, model: ModelSpec, gpus: list[GpuType], longest: int
) -> tuple[dict[str, list[Budget]], dict[str, list[TooLarge]]]:
    budgets: dict[str, list[Budget]] = {}
    too_large: dict[str, list[TooLarge]] = {}
    for gpu in gpus:
        budgets[gpu.name], too_large[gpu.name] = feasible(
            model,
            gpu,
            asked.held,
            context_tokens=longest,
            max_num_seqs=asked.engine.max_num_seqs,
            max_step_tokens=asked.engine.max_step_tokens,
        )
    if not any(budgets.values()):
        least = min(gpus, key=lambda gpu: min(one.missing_bytes for one in too_large[gpu.name]))
        raise does_not_fit(
            model,
            least,
            asked.held,
            too_large[least.name],
            context_tokens=longest,
            max_num_seqs=asked.engine.max_num_seqs,
            max_step_tokens=asked.engine.max_step_tokens,
        )
    return budgets, too_large


def _by_hour(option: Option, traffic: Traffic, load: Load, target: Target, spare: int) -> list[dict[str, Any]]:
    """What each hour of a day is to look like with the planned pools: what reality is laid beside."""
    found = []
    for hour, rate in enumerate(traffic.by_hour):
        now = replace(load, requests_per_second=rate)
        prediction = option.predict(option.pools, now, target)
        row: dict[str, Any] = {"hour": hour, "requests_per_second": rate}
        row["gpus_following"] = outlook.hour_gpus(option, now, target, spare)
        if isinstance(prediction, Prediction):
            row |= {
                "ttft_seconds": prediction.ttft_seconds,
                "tpot_seconds": prediction.tpot_seconds,
                "attainment": prediction.attainment,
                "prefill_busy": prediction.prefill_busy,
                "decode_busy": prediction.decode_busy,
                "sequences_per_worker": prediction.sequences,
            }
        found.append(row)
    return found


def _rooflines(
    asked: PlanAsked, model: ModelSpec, option: Option, prediction: Prediction, traffic: Traffic
) -> list[speed.Roofline]:
    precision, gpu = asked.held, option.gpu
    context = traffic.input_tokens + traffic.output_tokens / 2
    computed = traffic.input_tokens * (1 - traffic.hit_rate)
    prefill, decode = option.prefill_budget.layout, option.decode_budget.layout
    return [
        speed.prefill_roofline(model, gpu, prefill, precision, option.prefill.cost, computed),
        speed.decode_roofline(
            model, gpu, decode, precision, option.decode.cost, max(prediction.sequences, 1.0), context
        ),
    ]
