"""A request that ended, as the router's spans of its trace, and as a line in its log. Workers add spans of their own, below
the same parent."""

import logging
from collections.abc import Callable, Iterator

from headrace.metrics import SPAN_DECODE, SPAN_REQUEST, Stage, span_of
from headrace.otlp import Spans
from headrace.tracing import Span
from router.flight import Flight

log = logging.getLogger(__name__)

OWN = (Stage.EDGE, Stage.QUEUE, Stage.PLACEMENT, Stage.RETRY)


def spans_of(flight: Flight, now: float, draw_id: Callable[[], int]) -> list[Span]:
    """None where the request is not sampled. What a worker measured is its own span to send; the rest of the time until
    the first token is said here, as it ended."""
    context, marks = flight.job.trace, flight.marks
    if context is None or not context.sampled:
        return []

    def parts() -> Iterator[tuple[str, float, float]]:
        at = marks.arrived
        for stage in OWN:
            seconds = flight.stages.get(stage, 0.0)
            if stage is Stage.RETRY:  # a decode worker that tried twice says so itself
                seconds = marks.resubmitted - (marks.submitted or marks.resubmitted)
            if seconds:
                yield span_of(stage), at, at + seconds
                at += seconds
        if marks.first_token is not None:
            yield span_of(Stage.FIRST_TOKEN), marks.first_token - flight.stages[Stage.FIRST_TOKEN], marks.first_token
            yield SPAN_DECODE, marks.first_token, now

    job, timeline = flight.job, flight.timeline()
    attributes: dict[str, str | int | float | bool] = {
        "headrace.request_id": job.request_id,
        "headrace.model": job.model,
        "headrace.tenant": job.tenant,
        "headrace.outcome": flight.outcome,
        "headrace.decode_worker": timeline.decode_worker,
        "headrace.prefill_worker": timeline.worker.prefill_worker,
        "headrace.attempts": timeline.attempts,
        "headrace.prompt_tokens": len(job.prompt_token_ids),
        "headrace.cached_tokens": flight.cached_tokens,
        "headrace.generated_tokens": flight.num_generated,
    }
    if flight.ttft_seconds is not None:
        attributes["headrace.ttft_seconds"] = flight.ttft_seconds
    error = "" if flight.outcome in ("finished", "cancelled") else flight.outcome
    whole = Span(SPAN_REQUEST, context, marks.arrived, now, attributes, serves=True, error=error)
    return [whole, *(Span(name, context.child(draw_id()), began, ended) for name, began, ended in parts())]


def recorder(spans: Spans | None, draw_id: Callable[[], int], *, with_log: bool) -> Callable[[Flight, float], None]:
    """What becomes of a request that ended. It must not fail, and does not wait."""

    def record(flight: Flight, now: float) -> None:
        if spans is not None and (made := spans_of(flight, now, draw_id)):
            spans.export(made)
        if with_log:
            log_end(flight, now)

    return record


def log_end(flight: Flight, now: float) -> None:
    """Numbers and names alone; nothing of its text."""
    job, usage, ttft = flight.job, flight.usage(), flight.ttft_seconds
    fields: dict[str, object] = {
        "outcome": flight.outcome,
        "model": job.model,
        "tenant": job.tenant,
        "seconds": round(now - flight.marks.arrived, 6),
        "ttft_seconds": None if ttft is None else round(ttft, 6),
        "stages": {stage: round(seconds, 6) for stage, seconds in flight.stages.items()},
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "decode_worker": flight.decode,
        "prefill_worker": flight.timeline().worker.prefill_worker,
        "worker_name": flight.key.request_id,
    }
    trace = job.trace.trace if job.trace is not None else ""
    extra = {"request_id": job.request_id, "trace_id": trace, "fields": fields}
    log.info("request %s %s in %.3f s", job.request_id, flight.outcome, now - flight.marks.arrived, extra=extra)
