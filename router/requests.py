"""The life of a request in the router, top to bottom. Contract between the edges (openai, grpc_api) and the core."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace.values import SamplingParams, Timeline, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request as an edge hands it over. `sampling.seed` is drawn already; sample i differs by its index.

    `logprobs` are asked for through `sampling.num_logprobs`. `seconds_left` None: the configured limit.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    seconds_left: float | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """The worker's timeline and the router's own part."""

    worker: Timeline
    router_queue_seconds: float
    decode_worker: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of sample `index`. `text` may lag `token_ids` by what may still become a stop string; the last piece of
    a sample flushes it and carries `finish` ("stop" or "length"). The last piece of the request carries usage and
    timeline. Usage counts, for a stop string, the tokens up to the one that completed it."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None
    usage: Usage | None = None
    timeline: RequestTimeline | None = None


class Requests:
    """Admission, placement, submission, relay, retry. One per router."""

    def stream(self, job: Job) -> AsyncIterator[Piece]:
        """The pieces of all samples, interleaved as they come. Raises a HeadraceError (before the first piece when it
        was refused). Closing the iterator early cancels the request on its workers; every way out releases it."""
        raise NotImplementedError
