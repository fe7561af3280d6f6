"""What follows a failure: place again, another prefill worker, prefill alone, or an end. Pure.

A request that has given no token yet can begin anew on any worker, and its client never learns of it. One whose client
has seen tokens ends with the error: its sampling state lives where it ran, and a finish is never made up.
"""

from dataclasses import dataclass, replace

from headrace.errors import ContextLengthExceeded, DeadlineExceeded, HeadraceError, NoWorkers, meaning
from headrace.values import RequestKey
from router.decisions.placement import Decided, Placed

MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request came. `excluded`: workers that failed it before."""

    key: RequestKey
    decode: str
    num_tokens: int
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PlaceAgain:
    """The whole request, on workers outside `excluded`, as `key`."""

    key: RequestKey
    excluded: frozenset[str]


@dataclass(frozen=True, slots=True)
class PrefillAgain:
    """The decode worker keeps the request and gets another prefill worker, or none, as `key`."""

    key: RequestKey
    excluded: frozenset[str]


@dataclass(frozen=True, slots=True)
class End:
    error: HeadraceError


def nobody(reason: str, decided: Decided) -> HeadraceError:
    """What a client is told whose request no worker can take."""
    if reason != "context":
        return NoWorkers(f"nobody can serve the request: {reason}", reason=reason)
    limit = max(worker.max_context_tokens for worker in decided.view.workers if worker.decodes)
    actual = decided.ask.num_prompt_tokens + decided.ask.max_tokens
    message = f"prompt and max_tokens must be at most {limit} tokens together, got {actual}"
    return ContextLengthExceeded(message, field="max_tokens", limit=limit, actual=actual)


def after_rejection(progress: Progress, error: HeadraceError) -> PlaceAgain | End:
    """The decode worker did not take the request, gave it up, or is lost: it holds nothing of it any more."""
    if not meaning(error).retryable or progress.num_tokens or progress.key.attempt >= MAX_ATTEMPTS:
        return End(error)
    return PlaceAgain(progress.key.next_attempt(), progress.excluded | {progress.decode})


def after_peer_lost(progress: Progress, prefill: str, error: HeadraceError) -> PrefillAgain | End:
    """The decode worker reports that the prefill worker failed or refused it; the decode worker itself is well.

    Whatever the prefill worker cannot do another may, or the decode worker itself; only time is up everywhere."""
    if isinstance(error, DeadlineExceeded) or progress.key.attempt >= 2 * MAX_ATTEMPTS:
        return End(error)
    return PrefillAgain(progress.key.next_attempt(), progress.excluded | {prefill})


def with_last_resort(placed: Placed, attempt: int) -> Placed:
    """When attempts run out the decode worker prefills alone: that needs nobody else, so it can always be answered."""
    return placed if attempt < MAX_ATTEMPTS else replace(placed, prefill=None)
