"""Where the time to a request's first token went, by stage. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.metrics import Stage
from headrace.values import Timeline


@dataclass(slots=True)
class Marks:
    """When a request came to what, by the router's clock; mutable, owned by its flight. `arrived`: the edge had the whole
    of it; `began`: it was validated; `submitted`: the first decode worker was given it, `resubmitted`: the last one."""

    arrived: float
    began: float
    submitted: float | None = None
    resubmitted: float = 0.0
    first_token: float | None = None

    def submit(self, now: float) -> None:
        if self.submitted is None:
            self.submitted = now
        self.resubmitted = now


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """The worker's timeline and the router's own part. `ttft_stages` sum to the TTFT; empty before a first token.
    `revision`: whose workers these were, while there is a canary."""

    worker: Timeline
    router_queue_seconds: float
    decode_worker: str
    attempts: int
    ttft_stages: Mapping[str, float] = field(default_factory=dict)
    revision: str = ""


def ttft_stages(marks: Marks, queue_seconds: float, worker: Timeline) -> Mapping[Stage, float]:
    """They sum to the TTFT, whatever the worker says: durations of others are taken, never their times, and the rest is
    what no process had the request for. Stages that took no time at all are absent."""
    if marks.first_token is None or marks.submitted is None:
        return {}
    handed_off = worker.prefill_worker != ""
    known = {
        Stage.EDGE: marks.began - marks.arrived,
        Stage.QUEUE: queue_seconds,
        Stage.PLACEMENT: marks.submitted - marks.began - queue_seconds,
        Stage.RETRY: marks.resubmitted - marks.submitted + worker.retry_seconds,
        Stage.WORKER_QUEUE: worker.claim_seconds if handed_off else worker.queue_seconds,
        Stage.TICKET_WAIT: worker.queue_seconds if handed_off else 0.0,
        Stage.PREFILL: worker.prefill_seconds,
        Stage.TRANSFER: worker.transfer_exposed_seconds,
        Stage.JOIN: worker.join_seconds,
    }
    rest = marks.first_token - marks.resubmitted - worker.ttft_seconds
    return {stage: seconds for stage, seconds in known.items() if seconds} | {Stage.FIRST_TOKEN: rest}
