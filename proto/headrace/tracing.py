"""Traces as values: W3C traceparent in and out, who is sampled, and spans. Pure; `headrace.otlp` sends them.

    traceparent ─ Sampler.enter ─► TraceContext (drawn when a request comes) ─ … ─ Span (made once all is known)

Spans are made after the fact, of durations that were measured anyway: nothing on a request's path waits for one. Times are
seconds of one process' own clock; a span gets a time of day only as it leaves.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

MAX_TRACEPARENT_CHARACTERS = 256
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place in its trace. `parent_id` 0: it has no parent."""

    trace_id: int
    span_id: int
    sampled: bool
    parent_id: int = 0

    @property
    def trace(self) -> str:
        """The trace's id as it is written."""
        return f"{self.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """For whoever works for this span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def child(self, span_id: int) -> "TraceContext":
        return TraceContext(self.trace_id, span_id, self.sampled, self.span_id)


def parse(traceparent: str) -> TraceContext | None:
    """The caller's span; None where the text is not one by the standard. Later versions may say more at its end."""
    found = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= MAX_TRACEPARENT_CHARACTERS else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))


class Sampler:
    """Which requests are traced: what their caller says of his own, `fraction` of the others. `draw(bits)` gives a random
    number of so many bits."""

    def __init__(self, fraction: float, draw: Callable[[int], int]) -> None:
        self._bound = round(fraction * 2**64)
        self._draw = draw

    def enter(self, traceparent: str) -> TraceContext:
        """The context of the request's own span."""
        parent = parse(traceparent)
        if parent is not None:
            return parent.child(self.new_id(64))
        trace_id = self.new_id(128)
        return TraceContext(trace_id, self.new_id(64), trace_id % 2**64 < self._bound)

    def another(self, context: TraceContext) -> TraceContext:
        """A second span in the same place: one request may be several."""
        return replace(context, span_id=self.new_id(64))

    def new_id(self, bits: int) -> int:
        while not (drawn := self._draw(bits)):
            pass
        return drawn


@dataclass(frozen=True, slots=True)
class Span:
    """`began` and `ended` in seconds of the clock that the exporter was given."""

    name: str
    context: TraceContext
    began: float
    ended: float
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    serves: bool = False
    error: str = ""
