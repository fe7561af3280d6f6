"""The targets of a request's class in the choice among priced pairs. Pure.

    no targets   cost = price: everyone's seconds, the request's own among them
    targets      cost = price + MISS_SECONDS × how many are expected to miss their targets because of it
                 a request that has more time left than INTERACTIVE_SECONDS counts a second of its own waiting for as much
                 less while it meets its targets: it takes nothing from anybody, and leaves idle workers to who cannot wait

Those who may miss are the request itself and the streams beside which a decode worker would compute its prompt
(`streams`): a prompt that is early there at the price of a stream or two is no gain. A TTFT is safe up to TTFT_SAFE of what
is left of its target and lost at the target, with as much of a miss in between: queues grow between a report and the next,
and what is predicted is a mean. What is lost already still goes where it costs least.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

TTFT_SAFE = 0.5
INTERACTIVE_SECONDS = 3.0
MISS_SECONDS = 3.0


class Priced(Protocol):
    """router.decisions.placement.Pair, as far as this goes."""

    @property
    def ttft_seconds(self) -> float: ...
    @property
    def tpot_seconds(self) -> float: ...
    @property
    def wait_seconds(self) -> float: ...
    @property
    def price_seconds(self) -> float: ...
    @property
    def num_missed(self) -> float: ...


P = TypeVar("P", bound=Priced)
Verdict = Literal["", "met", "missed"]


def costed(pairs: Sequence[P], ttft_seconds: float | None, tpot_seconds: float | None) -> list[tuple[float, P]]:
    """(cost, pair) of each. `ttft_seconds` is what is left of the target: below 0 when it is missed already."""
    if ttft_seconds is None and tpot_seconds is None:
        return [(pair.price_seconds, pair) for pair in pairs]
    saved = 1 - _weight_of_waiting(ttft_seconds)
    costs: list[tuple[float, P]] = []
    for pair in pairs:
        own = _missed(pair, ttft_seconds, tpot_seconds)
        cost = pair.price_seconds + MISS_SECONDS * (own + pair.num_missed)
        if not own:
            cost -= saved * pair.wait_seconds
        costs.append((cost, pair))
    return costs


def expected(pair: Priced, ttft_seconds: float | None, tpot_seconds: float | None) -> Verdict:
    """Whether the pair surely meets the targets; "" without any. The least cost may be of one that does not: another meets
    them at the price of others' streams."""
    if ttft_seconds is None and tpot_seconds is None:
        return ""
    return "missed" if _missed(pair, ttft_seconds, tpot_seconds) else "met"


def _weight_of_waiting(ttft_seconds: float | None) -> float:
    if ttft_seconds is None or ttft_seconds <= INTERACTIVE_SECONDS:
        return 1.0
    return INTERACTIVE_SECONDS / ttft_seconds


def _missed(pair: Priced, ttft_seconds: float | None, tpot_seconds: float | None) -> float:
    """How much of a miss the request's own targets are: from 0, surely met, to 1."""
    if tpot_seconds is not None and pair.tpot_seconds > tpot_seconds:
        return 1.0
    if ttft_seconds is None:
        return 0.0
    if pair.ttft_seconds >= ttft_seconds:
        return 1.0
    return max((pair.ttft_seconds / ttft_seconds - TTFT_SAFE) / (1 - TTFT_SAFE), 0.0)
