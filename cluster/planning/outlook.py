"""What a plan comes to when something is otherwise: more traffic, longer prompts, a colder cache, a slower GPU, an API."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster.planning.load import Length, Load, Pools, Target, Worker
from cluster.planning.options import HOURS_PER_MONTH, Option, with_spare
from cluster.planning.prediction import Overload, Prediction
from cluster.planning.sizing import Idle, Unreachable
from headrace.costmodel import CostModel
from headrace.devicecost import DeviceCost

TRAFFIC_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
MOST_FACTOR = 64.0
SECONDS_PER_MONTH = HOURS_PER_MONTH * 3600


@dataclass(frozen=True, slots=True)
class WhatIf:
    """`needed` and `pools` (with spare workers) for the changed load; None: no size keeps the SLO. `attainment`: what the
    planned pools would keep of it as they are, 0 where they never catch up."""

    what: str
    needed: Pools | None
    pools: Pools | None
    num_gpus: int | None
    per_month: float | None
    attainment: float
    note: str = ""


def stretched(load: Load, *, inputs: float = 1.0, outputs: float = 1.0, hits: float = 1.0) -> Load:
    """The load with longer prompts or answers, or a hit rate `hits` times as high (at most all of a prompt)."""
    return replace(
        load,
        lengths=[
            Length(
                length.input_tokens * inputs,
                max(length.output_tokens * outputs, 1.0),
                min(length.cached_tokens * inputs * hits, length.input_tokens * inputs - 1),
            )
            for length in load.lengths
        ],
    )


def slower(cost: CostModel, factor: float) -> CostModel:
    """Every step takes `factor` times as long."""
    scaled = replace(
        cost,
        prefill_base_seconds=cost.prefill_base_seconds * factor,
        prefill_token_seconds=cost.prefill_token_seconds * factor,
        prefill_token_context_seconds=cost.prefill_token_context_seconds * factor,
        decode_base_seconds=cost.decode_base_seconds * factor,
        decode_sequence_seconds=cost.decode_sequence_seconds * factor,
        decode_context_token_seconds=cost.decode_context_token_seconds * factor,
    )
    if not isinstance(scaled, DeviceCost):
        return scaled
    whole = replace(
        scaled.whole,
        launch_seconds=scaled.whole.launch_seconds * factor,
        token_context_seconds=scaled.whole.token_context_seconds * factor,
    )
    return replace(scaled, attention_launch_seconds=scaled.attention_launch_seconds * factor, whole=whole)


def what_ifs(option: Option, load: Load, target: Target, spare: int) -> list[WhatIf]:
    found = [what_if(f"traffic × {factor:g}", option, load.at(factor), target, spare) for factor in TRAFFIC_FACTORS]
    changed = [
        ("prompts × 1.5", stretched(load, inputs=1.5)),
        ("prompts × 2", stretched(load, inputs=2.0)),
        ("answers × 2", stretched(load, outputs=2.0)),
        ("arrivals in bursts, scv × 4", replace(load, gap_scv=load.gap_scv * 4)),
    ]
    if any(length.cached_tokens for length in load.lengths):
        changed += [("hit rate × 0.5", stretched(load, hits=0.5)), ("hit rate 0", stretched(load, hits=0.0))]
    found += [what_if(what, option, other, target, spare) for what, other in changed]
    for sign in (1, -1):
        factor = 1 + sign * option.gpu.uncertainty
        other_gpu = replace(
            option,
            prefill=_with_cost(option.prefill, factor),
            decode=_with_cost(option.decode, factor),
        )
        found.append(what_if(f"steps × {factor:.2g} (how unsure the figures are)", other_gpu, load, target, spare))
    return found


def _with_cost(worker: Worker, factor: float) -> Worker:
    return replace(worker, cost=slower(worker.cost, factor))


def what_if(what: str, option: Option, load: Load, target: Target, spare: int) -> WhatIf:
    as_is = option.predict(option.pools, load, target)
    kept = 0.0 if isinstance(as_is, Overload) else as_is.attainment
    sized = option.size(load, target)
    if isinstance(sized, Unreachable):
        return WhatIf(what, None, None, None, None, kept, sized.reason)
    if isinstance(sized, Idle):
        return WhatIf(what, Pools(), Pools(), 0, 0.0, 1.0, "no traffic")
    pools = with_spare(sized.pools, spare)
    gpus = option.gpus_of(pools)
    return WhatIf(what, sized.pools, pools, gpus, gpus * option.gpu.price_per_hour * HOURS_PER_MONTH, kept)


@dataclass(frozen=True, slots=True)
class Money:
    """US dollars or whatever prices were given in. `per_million`: of all tokens that pass, prompts too;
    `per_million_output`: all cost on the answers.
    `following_per_month`: pools that follow the day, hour by hour, spare workers included."""

    per_month: float
    per_million: float
    per_million_output: float
    tokens_per_month: float
    following_per_month: float
    following_gpu_hours: float
    fixed_gpu_hours: float


def money(option: Option, load: Load, target: Target, by_hour: list[float], spare: int) -> Money:
    """`load` is the peak's; `by_hour` the rates of a day."""
    mean = sum(by_hour) / len(by_hour)
    inputs, outputs = load.mean(lambda x: x.input_tokens), load.mean(lambda x: x.output_tokens)
    tokens = mean * SECONDS_PER_MONTH * (inputs + outputs)
    hourly = [hour_gpus(option, replace(load, requests_per_second=rate), target, spare) for rate in by_hour]
    following = sum(hourly) / len(hourly) * HOURS_PER_MONTH
    fixed = option.num_gpus * HOURS_PER_MONTH
    return Money(
        per_month=option.per_month,
        per_million=option.per_month / tokens * 1e6,
        per_million_output=option.per_month / (mean * SECONDS_PER_MONTH * outputs) * 1e6,
        tokens_per_month=tokens,
        following_per_month=following * option.gpu.price_per_hour,
        following_gpu_hours=following,
        fixed_gpu_hours=fixed,
    )


def hour_gpus(option: Option, load: Load, target: Target, spare: int) -> int:
    """GPUs that this hour needs, never more than the plan's; a pool is never without a worker."""
    sized = option.size(load, target)
    if not isinstance(sized, (Idle, Unreachable)):
        return min(option.gpus_of(with_spare(sized.pools, spare)), option.num_gpus)
    one = Pools(unified=1) if option.kind == "aggregated" else Pools(1, 1)
    return option.gpus_of(with_spare(one, spare))


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Against an API's price for the same tokens. `factor` of today's traffic from which on own GPUs are cheaper, the pools
    growing with it; None: they never are, up to MOST_FACTOR times it."""

    api_per_month: float
    own_per_month: float
    factor: float | None
    requests_per_second: float | None


def break_even(
    option: Option, load: Load, target: Target, mean: float, spare: int, per_input: float, per_output: float
) -> BreakEven:
    """Prices a million tokens. The peak keeps its ratio to the mean."""
    inputs, outputs = load.mean(lambda x: x.input_tokens), load.mean(lambda x: x.output_tokens)
    per_request = (inputs * per_input + outputs * per_output) / 1e6
    api = mean * SECONDS_PER_MONTH * per_request

    def saves(factor: float) -> bool:
        found = what_if("", option, load.at(factor), target, spare)
        return found.per_month is not None and found.per_month <= api * factor

    factor = _first(saves, MOST_FACTOR)
    return BreakEven(api, option.per_month, factor, None if factor is None else mean * factor)


def _first(holds: Callable[[float], bool], most: float) -> float | None:
    """The lowest factor from which on it holds, found on a geometric grid and then halved; None: not at `most` either."""
    grid = [most / 1.6**step for step in range(24)]
    if not holds(grid[0]):
        return None
    last = grid[0]
    for factor in grid[1:]:
        if not holds(factor):
            low, high = factor, last
            for _ in range(8):
                middle = (low * high) ** 0.5
                low, high = (low, middle) if holds(middle) else (middle, high)
            return high
        last = factor
    return last


def prediction_json(found: Prediction | Overload) -> dict[str, Any]:
    if isinstance(found, Overload):
        return {"overloaded": found.pool, "utilisation": found.utilisation, "reason": found.reason}
    return {
        "ttft_seconds": {"mean": found.ttft_mean_seconds, **found.ttft_seconds},
        "tpot_seconds": {"mean": found.tpot_mean_seconds, **found.tpot_seconds},
        "attainment": found.attainment,
        "ttft_attainment": found.ttft_attainment,
        "tpot_attainment": found.tpot_attainment,
        "goodput_per_second": found.goodput_per_second,
        "queue_seconds": {"chance": found.wait.chance, "mean": found.wait.mean},
        "prefill_busy": found.prefill_busy,
        "sequences_per_worker": found.sequences,
        "sequences_that_fit": found.slots,
        "decode_busy": found.decode_busy,
    }
