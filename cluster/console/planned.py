"""A plan beside what is: its traffic, its sizes and its predictions, each with what was measured. Pure.

A plan is the JSON of `headrace plan --json` (docs/planning.md); of another format nothing is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.console.pools import Pool
from cluster.growth import Growth, attainment
from cluster.planning.plan_json import FORMAT
from headrace.errors import ConfigError

TOLERANCE = 0.15  # of a figure that was planned: beyond it the plan is not what happens


@dataclass(frozen=True, slots=True)
class Row:
    """`unit`: how a page writes the figures. `off`: reality is worse than planned, or more is asked for, by more than the
    tolerance; None where either is not known."""

    part: str
    what: str
    unit: str
    planned: float | None
    now: float | None
    off: bool | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What of reality is laid beside a plan. `tpot_seconds`: the median of the last requests."""

    pools: Sequence[Pool]
    live: Growth
    minute: Growth
    window: Growth
    tpot_seconds: float | None = None


def compared(plan: dict[str, Any], its: Measured) -> dict[str, Any]:
    """ConfigError where it is no plan of this format."""
    try:
        if plan["format"] != FORMAT:
            raise ConfigError(f"the plan has format {plan['format']!r}, this console reads {FORMAT}")
        chosen, traffic = plan["chosen"], plan["traffic"]
        rows = [*_traffic(traffic, its), *_sizes(chosen, its), *_service(plan, its)]
        about = f"{chosen['num_gpus']} × {chosen['gpu_type']}, {chosen['kind']}: {traffic['about']}"
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"this is no plan: {error!r}") from error
    return {
        "about": about,
        "holds_in_simulation": chosen.get("holds_in_simulation"),
        "rows": [{name: getattr(row, name) for name in Row.__slots__} for row in rows],
        "off": sum(bool(row.off) for row in rows),
    }


def _traffic(planned: dict[str, Any], its: Measured) -> list[Row]:
    arrivals, ended = its.minute.of("arrivals"), its.window.of("ended")
    known = its.minute.seconds > 0
    rate = its.minute.per_second("arrivals") if known else None
    inputs = its.minute.of("prompt_tokens") / arrivals if arrivals else None
    outputs = its.window.of("generated_tokens") / ended if ended else None
    return [
        _row(
            "Traffic", "requests a second, sized for", "rate", planned["sized_for_per_second"], rate, more_is_off=True
        ),
        Row("Traffic", "requests a second, mean", "rate", planned["mean_per_second"], rate, None),
        _row("Traffic", "prompt tokens", "count", planned["input_tokens"], inputs, more_is_off=True),
        _row("Traffic", "generated tokens", "count", planned["output_tokens"], outputs, more_is_off=True),
        _row("Traffic", "cache hit rate", "percent", planned["hit_rate"], its.minute.hit_rate, more_is_off=False),
    ]


def _sizes(chosen: dict[str, Any], its: Measured) -> list[Row]:
    rows = []
    for role, number in chosen["pools"].items():
        ready = sum(pool.ready_roles.get(role, 0) for pool in its.pools)
        if number or ready:
            rows.append(_row("Sizes", f"{role} workers", "count", number, ready, more_is_off=True, tolerance=0.0))
    ranks = sum(pool.num_ranks for pool in its.pools)
    price = chosen["per_month"] / chosen["num_gpus"] if chosen["num_gpus"] else 0.0
    rows.append(_row("Sizes", "GPUs", "count", chosen["num_gpus"], ranks, more_is_off=True, tolerance=0.0))
    rows.append(
        _row("Sizes", "a month at the plan's price", "money", chosen["per_month"], ranks * price, more_is_off=True)
    )
    return rows


def _service(plan: dict[str, Any], its: Measured) -> list[Row]:
    predicted = plan["chosen"]["predicted"]
    part = attainment(its.window.all_outcomes)
    per_second = its.minute.all_outcomes.met / its.minute.seconds if its.minute.seconds else None
    if "overloaded" in predicted:
        return [Row("Service", "the plan itself is overloaded", "rate", None, per_second, None)]
    return [
        _row("Service", "mean TTFT", "seconds", predicted["ttft_seconds"]["mean"], its.minute.mean_ttft_seconds),
        _row("Service", "median TPOT", "seconds", predicted["tpot_seconds"]["p50"], its.tpot_seconds),
        _row(
            "Service",
            "targets met",
            "percent",
            plan["asked"]["slo"]["attainment"],
            part,
            more_is_off=False,
            tolerance=0.0,
        ),
        Row("Service", "requests a second that met them", "rate", predicted["goodput_per_second"], per_second, None),
    ]


def _row(
    part: str,
    what: str,
    unit: str,
    planned: float | None,
    now: float | None,
    *,
    more_is_off: bool = True,
    tolerance: float = TOLERANCE,
) -> Row:
    off = None
    if planned is not None and now is not None:
        off = now > planned * (1 + tolerance) if more_is_off else now < planned * (1 - tolerance)
    return Row(part, what, unit, planned, now, off)
