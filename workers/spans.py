"""A worker's part of a request: counted, and said as spans of its trace. Once it is over, of durations measured anyway."""

import secrets
from collections.abc import Sequence

from headrace.clock import Clock
from headrace.metrics import Stage, span_of
from headrace.otlp import Spans
from headrace.tracing import Span, parse
from headrace.values import Request, SequenceOutput
from workers.meters import Meters
from workers.scheduling.scheduler import ChunkDone


class Parts:
    """Hears of every request's part here. What another process measured is that one's to send. `spans` None: none."""

    def __init__(self, meters: Meters, spans: Spans | None, clock: Clock) -> None:
        self._meters = meters
        self._spans = spans
        self._clock = clock

    def first_token(self, request: Request, output: SequenceOutput) -> None:
        """The decode worker has just said a first token."""
        timeline, usage = output.timeline, output.usage
        if timeline is None or usage is None:
            return
        self._meters.first_token(timeline, usage)
        if timeline.prefill_worker:
            elsewhere = timeline.queue_seconds + timeline.prefill_seconds
            here = (
                (Stage.WORKER_QUEUE, timeline.claim_seconds),
                (None, elsewhere),
                (Stage.TRANSFER, timeline.transfer_exposed_seconds),
                (Stage.JOIN, timeline.join_seconds),
            )
            self._send(request, ((Stage.RETRY, timeline.retry_seconds), *here))
        else:
            alone = ((Stage.WORKER_QUEUE, timeline.queue_seconds), (Stage.PREFILL, timeline.prefill_seconds))
            self._send(request, ((Stage.RETRY, timeline.retry_seconds), *alone))

    def prefilled(self, request: Request, last: ChunkDone) -> None:
        """The prefill worker has just computed a ticket's prompt."""
        self._meters.prefilled(last.queue_seconds, request.num_prompt_tokens, last.cached_tokens)
        self._send(request, ((Stage.TICKET_WAIT, last.queue_seconds), (Stage.PREFILL, last.prefill_seconds)))

    async def close(self) -> None:
        if self._spans is not None:
            await self._spans.close()

    def _send(self, request: Request, stages: Sequence[tuple[Stage | None, float]]) -> None:
        """Ending now, one after the other."""
        parent = parse(request.traceparent) if self._spans is not None else None
        if self._spans is None or parent is None or not parent.sampled:
            return
        at = self._clock.now() - sum(seconds for _, seconds in stages)
        attributes: dict[str, str | int | float | bool] = {
            "headrace.worker_name": request.key.request_id,
            "headrace.attempt": request.key.attempt,
        }
        made = []
        for stage, seconds in stages:
            if stage is not None and seconds:
                context = parent.child(secrets.randbits(64) | 1)  # an id is never 0
                made.append(Span(span_of(stage), context, at, at + seconds, attributes))
            at += seconds
        self._spans.export(made)
