"""The targets of a request's class in the choice among priced pairs: meet them at the least cost, else hurt least. Pure.

    no targets    cost = price: everyone's seconds, the request's own among them
    all met       cost = price; a request that has more time left than INTERACTIVE_SECONDS counts a second of its own
                  waiting for as much less: it takes nothing from anybody, and leaves idle workers to who cannot wait
    none is met   cost = seconds beyond the targets, over as much of the answer as is expected, and the stall of others

A TTFT counts as met with a margin: queues grow between a report and the next, and what is predicted is a mean. By
simulation (docs/routing.md) half of what is left is better than more; and where nobody is patient, waiting that counts less
than other time makes the queues uneven and loses goodput.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

TTFT_MARGIN = 0.5
INTERACTIVE_SECONDS = 3.0


class Priced(Protocol):
    """router.decisions.placement.Pair, as far as this goes."""

    @property
    def ttft_seconds(self) -> float: ...
    @property
    def tpot_seconds(self) -> float: ...
    @property
    def wait_seconds(self) -> float: ...
    @property
    def stall_seconds(self) -> float: ...
    @property
    def price_seconds(self) -> float: ...


P = TypeVar("P", bound=Priced)
Verdict = Literal["", "met", "missed"]


def costed(
    pairs: Sequence[P], ttft_seconds: float | None, tpot_seconds: float | None, output_tokens: int
) -> tuple[list[tuple[float, P]], Verdict]:
    """(cost, pair) of those that may be chosen, and whether they are expected to meet the targets; "" without any.
    `ttft_seconds` is what is left of the target: below 0 when it is missed already."""
    if ttft_seconds is None and tpot_seconds is None:
        return [(pair.price_seconds, pair) for pair in pairs], ""
    met = [pair for pair in pairs if _meets(pair, ttft_seconds, tpot_seconds)]
    if met:
        saved = 1 - _weight_of_waiting(ttft_seconds)
        return [(pair.price_seconds - saved * pair.wait_seconds, pair) for pair in met], "met"
    return [(_hurt(pair, ttft_seconds, tpot_seconds, output_tokens), pair) for pair in pairs], "missed"


def _weight_of_waiting(ttft_seconds: float | None) -> float:
    if ttft_seconds is None or ttft_seconds <= INTERACTIVE_SECONDS:
        return 1.0
    return INTERACTIVE_SECONDS / ttft_seconds


def _meets(pair: Priced, ttft_seconds: float | None, tpot_seconds: float | None) -> bool:
    return (ttft_seconds is None or pair.ttft_seconds <= TTFT_MARGIN * ttft_seconds) and (
        tpot_seconds is None or pair.tpot_seconds <= tpot_seconds
    )


def _hurt(pair: Priced, ttft_seconds: float | None, tpot_seconds: float | None, output_tokens: int) -> float:
    late = 0.0 if ttft_seconds is None else max(pair.ttft_seconds - TTFT_MARGIN * ttft_seconds, 0.0)
    slow = 0.0 if tpot_seconds is None else max(pair.tpot_seconds - tpot_seconds, 0.0) * output_tokens
    return late + slow + pair.stall_seconds
