"""Moments of simulated days again, request by request: what the fluid said of them against production's router and
schedulers on the same arrivals and as many workers.

Sizes stay as they are for the while of a moment. It begins with empty workers, WARM_SECONDS before it counts: what had
piled up until then is not there.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from cluster.planning import traffic as planned
from cluster.planning.asked import TokensAsked, TrafficAsked
from cluster.simulation import cards
from cluster.simulation.fleet import Fleet, Simulation
from cluster.simulation.fluid import HIT_RATE, INPUT_TOKENS, LENGTH_CV, OUTPUT_TOKENS
from cluster.simulation.results import Tally, met
from cluster.simulation.week import DAY, Outcome, Traffic
from headrace.goodput import Slo
from headrace.traces import TraceRow

WARM_SECONDS = 10
SPAN_SECONDS = 25
LATER_SECONDS = 300
BEFORE_BURST_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Spot:
    """`fluid` and `simulated`: the share of those who came in it that kept both targets. `deviation` of the latter, by how
    few they were."""

    name: str
    second: int
    prefill: int
    decode: int
    requests: int
    fluid: float
    simulated: float
    deviation: float


def spots(card_name: str, slo: Slo, traffic: Traffic, outcome: Outcome, seed: int) -> list[Spot]:
    """A handful of moments, in the order of the week."""
    found = []
    for name, second, sizes in sorted(_moments(traffic, outcome), key=lambda one: one[1]):
        rows = _rows(traffic.arrivals[second - WARM_SECONDS : second + SPAN_SECONDS], seed)
        fleet = Fleet(cards.load(card_name), prefill=sizes[0], decode=sizes[1])
        tally = Tally(fleet.roles)
        Simulation(fleet, "ours", tally, seed=seed).run(rows)
        counted = [met(slo, one) for one in tally.served if one.arrived_at >= WARM_SECONDS]
        share, number = sum(counted) / len(counted), len(counted)
        inside = slice(second, second + SPAN_SECONDS)
        fluid = float(np.average(outcome.kept[inside], weights=traffic.arrivals[inside]))
        deviation = math.sqrt(max(share * (1 - share), 1 / number) / number)
        found.append(Spot(name, second, *sizes, number, fluid, share, deviation))
    return found


def _moments(traffic: Traffic, outcome: Outcome) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """(name, second, serving workers). Where sizes change meanwhile, the same a little later; of bursts the highest in
    which they stay."""
    last = len(traffic.arrivals) - SPAN_SECONDS
    day = min(DAY, max(last - DAY, 0))
    highest = np.argsort(-traffic.arrivals[WARM_SECONDS + BEFORE_BURST_SECONDS : last], kind="stable") + WARM_SECONDS
    wanted: list[tuple[str, Iterable[int]]] = [
        ("night", range(day, last, LATER_SECONDS)),
        ("morning", range(day + DAY // 4, last, LATER_SECONDS)),
        ("midday", range(day + DAY // 2, last, LATER_SECONDS)),
        ("surge", range(max(int(traffic.rates.argmax()), WARM_SECONDS), last, LATER_SECONDS)),
        ("burst", highest.tolist()),
    ]
    wanted += [
        (f"after a {kind}", [at + 1 for at, what in outcome.moves if kind in what and day < at < last])
        for kind in ("shrink", "flip")
    ]
    for name, seconds in wanted:
        for second in seconds:
            if (sizes := outcome.sizes_within(second, second + SPAN_SECONDS)) is not None:
                yield name, second, sizes
                break


def _rows(arrivals: np.ndarray, seed: int) -> list[TraceRow]:
    """As many in each second as came, anywhere in it; lengths and hits as the fluid takes them."""
    asked = TrafficAsked(
        requests_per_second=1.0,
        input_tokens=TokensAsked(mean=INPUT_TOKENS, cv=LENGTH_CV),
        output_tokens=TokensAsked(mean=OUTPUT_TOKENS, cv=LENGTH_CV),
        hit_rate=HIT_RATE,
    )
    random = Random(seed)
    times = sorted(second + random.random() for second, number in enumerate(arrivals.tolist()) for _ in range(number))
    made = planned.of(asked, max_context_tokens=131_072, num_rows=2 * len(times), seed=seed)
    return [replace(row, seconds=at) for row, at in zip(made.rows, times, strict=False)]
