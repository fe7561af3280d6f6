"""What edges hand to the core, and what they get of it: requests that are checked, and pieces of their answers. Pure."""

from dataclasses import dataclass

from headrace.tracing import TraceContext
from headrace.values import DEFAULT_TENANT, SamplingParams, TokenLogprobs, Usage
from router.decisions.tenants import NO_CLASS, NO_TARGETS, Targets
from router.stages import RequestTimeline


@dataclass(slots=True)
class Served:
    """What an edge says beside an answer; written by the request's stream before its first piece. `revision` is "" while
    there is no canary."""

    revision: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request as an edge hands it over. `sampling.seed` is drawn already; sample i differs by its index.

    `logprobs` are asked for through `sampling.num_logprobs`. `seconds_left` None: the configured limit; a queue longer
    than `turn_seconds_left` is not entered, whatever the limit. `continues`: the answer goes on from the prompt's own text,
    so that its first space belongs to it. `cache_salt` holds the tenant's domain already. `repeatable`: asked again, it may
    be answered with the same tokens (greedy, or with the client's own seed). `arrived_at`: when its edge had the whole of
    it, by the router's clock; None: as it is streamed. `trace`: its span. `conversation`: requests of one go to one
    revision; "": each goes by itself. `served` is filled in as it runs.
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
    turn_seconds_left: float | None = None
    traceparent: str = ""
    continues: bool = False
    tenant: str = DEFAULT_TENANT
    service_class: str = NO_CLASS
    targets: Targets = NO_TARGETS
    repeatable: bool = False
    arrived_at: float | None = None
    trace: TraceContext | None = None
    conversation: str = ""
    served: Served | None = None


@dataclass(slots=True)
class Piece:
    """New output of sample `index`. `text` may lag `token_ids` by what may still become a stop string; the last piece of
    a sample flushes it and carries `finish` ("stop" or "length"). The last piece of the request carries usage and
    timeline. Usage counts, for a stop string, the tokens up to the one that completed it. `cached_tokens` of the prompt
    are known from the first piece on.

    Nobody changes one; as with SequenceOutput, one is made for every token."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None
    usage: Usage | None = None
    timeline: RequestTimeline | None = None
    cached_tokens: int = 0
