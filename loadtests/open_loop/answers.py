"""What is asked and what came back of it: the values between traffic, clients and measures. No clock, no chance here."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.traces import Prompts, TraceRow


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, `due` seconds after the traffic's begin. The answer is to be as long as `max_tokens` says."""

    number: int
    due: float
    prompt: tuple[int, ...]
    max_tokens: int


def asks(rows: Iterable[TraceRow], prompts: Prompts) -> Iterator[Ask]:
    """A prompt is made when its request is next, so that a long trace of long prompts takes no memory."""
    for number, row in enumerate(rows):
        yield Ask(number, row.seconds, prompts.of(row), row.output_tokens)


class Outcome(StrEnum):
    """How a request ended. All but `finished` count against goodput."""

    FINISHED = "finished"
    SHED = "shed"  # the server refused it for load: 429, RESOURCE_EXHAUSTED
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(slots=True)
class Answer:
    """What is heard of one request; its client writes, until `outcome` is set. Seconds count from the traffic's begin,
    latencies from `due` (when it should have gone out), never from `sent`: a generator that is late hides no wait."""

    number: int
    due: float
    now: Callable[[], float] = field(repr=False)
    sent: float = float("nan")
    times: "array[float]" = field(default_factory=lambda: array("d"), repr=False)
    num_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended: float = float("nan")
    outcome: Outcome | None = None
    error: str = ""
    asked_tokens: int = 0

    def hear(self, num_tokens: int) -> None:
        """New tokens, now."""
        self.times.append(self.now())
        self.num_tokens += num_tokens

    def count(self, prompt_tokens: int, num_tokens: int, cached_tokens: int) -> None:
        """The server's own counts, which win: an event may bring several tokens and not say so."""
        self.prompt_tokens, self.num_tokens, self.cached_tokens = prompt_tokens, num_tokens, cached_tokens

    def end(self, outcome: Outcome, error: str = "") -> None:
        self.ended, self.outcome, self.error = self.now(), outcome, error

    @property
    def ttft_seconds(self) -> float | None:
        return self.times[0] - self.due if self.times else None

    @property
    def tpot_seconds(self) -> float | None:
        """None: there was at most one token."""
        if self.num_tokens < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def cut_short(self) -> bool:
        """The server ended it before it was as long as was asked, as one does that knows no ignore_eos."""
        return self.outcome is Outcome.FINISHED and self.num_tokens < self.asked_tokens

    @property
    def e2e_seconds(self) -> float:
        return self.ended - self.due


@dataclass(frozen=True, slots=True)
class Effort:
    """What the run cost the generator itself. `lateness_seconds`: of each send, behind its due time; `lag_seconds`: how
    long events waited for the loop, sampled; `cpu_share`: of one core, its threads included."""

    lateness_seconds: Sequence[float]
    lag_seconds: Sequence[float]
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Run:
    """All answers in the order of their due times, and the generator's effort. `seconds`: to the last due time."""

    answers: Sequence[Answer]
    seconds: float
    peak_in_flight: int
    effort: Effort
