"""When a worker's cache is to be proven, and what a proof showed. Pure.

A new generation of a worker is asked the same new prompt twice. The first finds nothing; then its blocks are in the mirror
by this router's own keys; so the second is promised whole, and the worker finds what was promised. Whoever does not, twice
in a row, is routed by load alone until a later check passes. That the worker was full, slow or away, or Redis was, shows
nothing: it is tried again.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

AT_ONCE = 4
RENEW_SECONDS = 6 * 3600.0  # after which it is seen to that others still find a result
LOOK_AGAIN_SECONDS = 2.0
PATIENCE_SECONDS = 30.0  # for which a busy worker is spared


class Outcome(StrEnum):
    PASSED = "passed"
    UNCACHED = "uncached"
    FAILED = "failed"
    UNDECIDED = "undecided"


class Reason(StrEnum):
    """Why a check failed (the first three), or showed nothing."""

    COLD_HIT = "cold hit"  # of a prompt that nobody ever sent some was cached
    KEYS = "keys"  # the worker announced blocks, and not by the keys that this router has for them
    CACHED_TOKENS = "cached tokens"  # the second prompt found other than the mirror held
    EVICTED = "evicted"
    REFUSED = "refused"
    LOST = "lost"
    LATE = "late"
    UNPUBLISHED = "unpublished"  # it found its blocks, and nobody heard of them
    UNFOLLOWED = "unfollowed"
    SMALL = "small"  # no block and a token more fit


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    reason: Reason | None = None

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason is not None else str(self.outcome)

    @property
    def may_be_chance(self) -> bool:
        """Blocks that were evicted, and came again or never were seen, between two looks of the mirror look the same."""
        return self.outcome is Outcome.FAILED and self.reason in (Reason.KEYS, Reason.CACHED_TOKENS)

    @property
    def over(self) -> bool:
        """Nothing is left to find out of this generation."""
        return self.outcome in (Outcome.PASSED, Outcome.UNCACHED)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What two equal prompts with `num_tokens` tokens in full blocks showed. `shown`: the mirror held these in between;
    `advanced`: it heard of some change of the worker's; `promised` tokens before the second, `held` after it."""

    num_tokens: int
    first_cached: int
    shown: bool
    advanced: bool
    promised: int
    second_cached: int
    held: bool


def judge(evidence: Evidence) -> Verdict:
    if evidence.first_cached:
        return Verdict(Outcome.FAILED, Reason.COLD_HIT)
    if not evidence.shown:
        if evidence.advanced:
            # One that finds none of them itself may have evicted them again before anybody saw them.
            its = (Outcome.FAILED, Reason.KEYS) if evidence.second_cached else (Outcome.UNDECIDED, Reason.EVICTED)
            return Verdict(*its)
        if evidence.second_cached:
            return Verdict(Outcome.UNDECIDED, Reason.UNPUBLISHED)
        return Verdict(Outcome.UNCACHED)  # it keeps nothing, and says so: nothing is promised
    if evidence.second_cached == evidence.promised == evidence.num_tokens:
        return Verdict(Outcome.PASSED)
    if not evidence.held or evidence.promised < evidence.num_tokens:
        return Verdict(Outcome.UNDECIDED, Reason.EVICTED)
    return Verdict(Outcome.FAILED, Reason.CACHED_TOKENS)


@dataclass(frozen=True, slots=True)
class Result:
    """What one router tells the others, and who looks, of a worker: after its `attempt`th check."""

    generation: int
    attempt: int
    verdict: Verdict
    router_id: str = ""


def encode_result(result: Result) -> str:
    verdict = result.verdict
    return json.dumps(
        {
            "generation": result.generation,
            "attempt": result.attempt,
            "outcome": verdict.outcome,
            "reason": verdict.reason,
            "by": result.router_id,
        }
    )


def decode_result(raw: bytes | str | None) -> Result | None:
    """None when there is none, or when it is not what encode_result of this version writes."""
    if raw is None:
        return None
    try:
        data: dict[str, Any] = json.loads(raw)
        reason = Reason(data["reason"]) if data["reason"] is not None else None
        verdict = Verdict(Outcome(data["outcome"]), reason)
        return Result(int(data["generation"]), int(data["attempt"]), verdict, str(data["by"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(slots=True)
class _State:
    generation: int
    due_at: float
    attempt: int = 0  # of the last check that is known of
    running: bool = False
    verdict: Verdict | None = None


class Checks:
    """Owns what one router knows of its workers' checks. After the first of a row that did not pass comes another after
    `retry_seconds`, twice as much after each further one, up to `max_retry_seconds`."""

    def __init__(self, retry_seconds: float = 5.0, max_retry_seconds: float = 600.0) -> None:
        self._retry_seconds = retry_seconds
        self._max_retry_seconds = max_retry_seconds
        self._states: dict[str, _State] = {}

    def met(self, worker: str, generation: int, now: float) -> bool:
        """Whether the worker is to be looked at now: it is new, or it is due and could not be checked before."""
        state = self._states.get(worker)
        if state is None or state.generation != generation:
            self._states[worker] = state = _State(generation, now)
        return not state.running and state.due_at <= now

    def forget(self, worker: str) -> None:
        self._states.pop(worker, None)

    def begin(self, now: float, ready: Callable[[str, bool], bool]) -> Iterator[tuple[str, int, int]]:
        """(worker, generation, attempt) of those to be checked from now on. `ready(worker, patient)`: whether one can be;
        `patient`: it is not yet due for so long that it would have to be now."""
        room = AT_ONCE - sum(state.running for state in self._states.values())
        for worker, state in self._states.items():
            if room <= 0:
                return
            if state.running or state.due_at > now or not ready(worker, now < state.due_at + PATIENCE_SECONDS):
                continue
            state.running = True
            room -= 1
            yield worker, state.generation, state.attempt + 1

    def next_due(self, now: float) -> float | None:
        """When time alone will make one due."""
        return min((s.due_at for s in self._states.values() if not s.running and s.due_at > now), default=None)

    def taken(self, worker: str, generation: int, now: float) -> None:
        """Another router checks it: what came of it is looked for a little later."""
        state = self._at(worker, generation)
        if state is not None:
            state.running, state.due_at = False, now + LOOK_AGAIN_SECONDS

    def news(self, worker: str, result: Result) -> bool:
        """Whether another router's result is of this generation, and later than what is known here."""
        state = self._at(worker, result.generation)
        return state is not None and (result.verdict.over or result.attempt > state.attempt)

    def ended(self, worker: str, result: Result, now: float) -> bool:
        """A check ended, whoever did it. False: of a generation that is over."""
        state = self._at(worker, result.generation)
        if state is None:
            return False
        state.running, state.verdict, state.attempt = False, result.verdict, result.attempt
        if result.verdict.over:
            state.due_at = now + RENEW_SECONDS
        else:
            exponent = min(result.attempt - 1, 32)
            state.due_at = now + min(self._retry_seconds * 2.0**exponent, self._max_retry_seconds)
        return True

    def verdict(self, worker: str) -> Verdict | None:
        """The last one of its generation."""
        state = self._states.get(worker)
        return state.verdict if state is not None else None

    def _at(self, worker: str, generation: int) -> _State | None:
        state = self._states.get(worker)
        return state if state is not None and state.generation == generation else None
