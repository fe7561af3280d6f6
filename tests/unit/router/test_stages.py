"""Where the time to a first token went: always the whole of it."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.metrics import SPAN_DECODE, SPAN_REQUEST, Stage, span_of
from headrace.tracing import TraceContext
from headrace.values import FinishReason, RequestKey, SequenceOutput, Timeline, Usage
from router.flight import Flight
from router.spans import log_end, spans_of
from router.stages import Marks, ttft_stages
from tests.unit.router.stage import job, open_text

SECONDS = st.floats(0, 100, allow_nan=False)
KEY = RequestKey("r")
HANDED = Timeline(0.25, 0.5, 0.125, 9.0, "p", claim_seconds=0.0625, join_seconds=0.03125, retry_seconds=1.0)


@given(
    steps=st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS),
    worker=st.builds(
        Timeline,
        queue_seconds=SECONDS,
        prefill_seconds=SECONDS,
        transfer_exposed_seconds=SECONDS,
        prefill_worker=st.just("p"),
        claim_seconds=SECONDS,
        join_seconds=SECONDS,
        retry_seconds=SECONDS,
    ),
)
def test_whatever_the_worker_says_they_sum_to_the_ttft(steps: tuple[float, ...], worker: Timeline) -> None:
    edge, queue, placement, retry, rest = steps
    marks = Marks(3.0, 3.0 + edge)
    marks.submit(marks.began + queue + placement)
    marks.submit(marks.resubmitted + retry)
    marks.first_token = marks.resubmitted + rest
    assert sum(ttft_stages(marks, queue, worker).values()) == pytest.approx(marks.first_token - 3.0, abs=1e-9)


def test_each_has_its_own() -> None:
    marks = Marks(1.0, 1.5)
    marks.submit(3.0)
    marks.submit(4.0)
    marks.first_token = 8.0
    assert ttft_stages(marks, 1.0, HANDED) == {
        Stage.EDGE: 0.5,
        Stage.QUEUE: 1.0,
        Stage.PLACEMENT: 0.5,
        Stage.RETRY: 2.0,
        Stage.WORKER_QUEUE: 0.0625,
        Stage.TICKET_WAIT: 0.25,
        Stage.PREFILL: 0.5,
        Stage.TRANSFER: 0.125,
        Stage.JOIN: 0.03125,
        Stage.FIRST_TOKEN: 4.0 - HANDED.ttft_seconds,
    }
    alone = Timeline(queue_seconds=0.5, prefill_seconds=2.0)
    assert ttft_stages(marks, 1.0, alone)[Stage.WORKER_QUEUE] == 0.5
    assert Stage.TRANSFER not in ttft_stages(marks, 1.0, alone)


def test_before_a_first_token_there_are_none() -> None:
    assert ttft_stages(Marks(0.0, 0.0), 0.0, Timeline()) == {}


def told(trace: TraceContext | None = None) -> Flight:
    """A request that was handed over, and ended with its first token."""
    request = job(max_tokens=1, arrived_at=1.0, trace=trace)
    flight = Flight(request, KEY, lambda: open_text(request), 1.5)
    flight.marks.submit(2.0)
    flight.marks.first_token = 5.0
    first = SequenceOutput(KEY, 0, (97,), 1, finish=FinishReason.LENGTH, usage=Usage(10, 1, 0), timeline=HANDED)
    (piece,) = flight.relay([first])
    assert piece.timeline is not None
    assert sum(piece.timeline.ttft_stages.values()) == pytest.approx(4.0)
    flight.outcome = "finished"
    return flight


def test_a_routers_spans_are_its_own_stages_below_the_requests() -> None:
    context = TraceContext(1, 2, sampled=True, parent_id=9)
    ids = iter(range(10, 99))
    spans = spans_of(told(context), 6.0, lambda: next(ids))
    assert [span.name for span in spans] == [
        SPAN_REQUEST,
        *map(span_of, (Stage.EDGE, Stage.PLACEMENT, Stage.FIRST_TOKEN)),
        SPAN_DECODE,
    ]
    assert (spans[0].began, spans[0].ended, spans[0].context) == (1.0, 6.0, context)
    assert {span.context.parent_id for span in spans[1:]} == {2}
    assert spans[0].attributes["headrace.ttft_seconds"] == 4.0
    own = sum(span.ended - span.began for span in spans[1:-1])
    assert own + HANDED.ttft_seconds == pytest.approx(4.0)


@pytest.mark.parametrize("context", [None, TraceContext(1, 2, sampled=False)])
def test_who_is_not_sampled_has_no_spans(context: TraceContext | None) -> None:
    assert spans_of(told(context), 6.0, lambda: 1) == []


def test_a_request_that_ended_is_a_line_with_its_id_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="router.spans"):
        log_end(told(TraceContext(1, 2, sampled=True)), 6.0)
    (record,) = caplog.records
    said = vars(record)
    assert (said["request_id"], said["trace_id"]) == ("r", f"{1:032x}")
    assert said["fields"]["ttft_seconds"] == 4.0
    assert (said["fields"]["prefill_worker"], said["fields"]["completion_tokens"]) == ("p", 1)
    assert "a" not in said["fields"].values()
