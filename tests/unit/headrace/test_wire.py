from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import wire
from headrace.costmodel import CostModel
from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.leases import lease_fields, parse_lease
from headrace.v1 import transfer_pb2, worker_pb2
from headrace.values import (
    BlockCounts,
    Capacity,
    Compatibility,
    FinishReason,
    Load,
    LoadReport,
    ParallelLayout,
    PrefillTarget,
    Request,
    RequestKey,
    Role,
    SamplingParams,
    SequenceOutput,
    Ticket,
    Timeline,
    TokenLogprobs,
    Usage,
    WorkerInfo,
)

tokens = st.integers(0, 2**31 - 1)
biases = st.integers(-64, 64).map(lambda n: n / 32)  # float32 on the wire

samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 100),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 100),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 2, exclude_min=True),
    logit_bias=st.lists(st.tuples(tokens, biases), max_size=3).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.integers(0, 1),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    num_logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    Request,
    key=st.builds(RequestKey, request_id=st.text(max_size=8), attempt=st.integers(1, 9)),
    prompt_token_ids=st.lists(tokens, min_size=1, max_size=40).map(tuple),
    sampling=samplings,
    n=st.integers(1, 128),
    cache_salt=st.text(max_size=4),
    priority=st.integers(-5, 5),
    seconds_left=st.none() | st.floats(0, 1e6),
    local_prefill_max_tokens=st.integers(0, 100),
    prefill=st.none()
    | st.builds(PrefillTarget, worker_id=st.text(max_size=4), generation=st.just(3), address=st.just("a")),
    offer_held=st.booleans(),
)


@given(requests)
def test_a_request_survives_the_wire(request: Request) -> None:
    sent = worker_pb2.Submit.FromString(wire.request_to_pb(request).SerializeToString())
    assert wire.request_from_pb(sent) == request


blocks = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**63)), max_size=4).map(tuple)


@given(requests, st.integers(0, 9), st.text(max_size=4), blocks)
def test_a_ticket_carries_all_that_first_tokens_depend_on(
    request: Request, held: int, router: str, offered: tuple[tuple[int, int], ...]
) -> None:
    ticket = Ticket(request, held, router, offered)
    got = wire.ticket_from_pb(transfer_pb2.Ticket.FromString(wire.ticket_to_pb(ticket).SerializeToString()))
    assert replace(got, request=request) == ticket
    left_at_home = {"prefill", "local_prefill_max_tokens", "offer_held"}
    for name in {f.name for f in fields(Request)} - left_at_home:
        assert getattr(got.request, name) == getattr(request, name), name


def test_an_offer_whose_blocks_and_epochs_do_not_match_is_refused() -> None:
    pb = wire.ticket_to_pb(Ticket(Request(RequestKey("r"), (1, 2), SamplingParams(max_tokens=1)), 1, "", ((4, 5),)))
    pb.offered_epochs.append(6)
    with pytest.raises(ValueError, match="zip"):
        wire.ticket_from_pb(pb)


OUTPUTS = [
    SequenceOutput(RequestKey("r", 2), 0, (5, 6), 2),
    SequenceOutput(
        RequestKey("r"),
        1,
        (7,),
        3,
        logprobs=(TokenLogprobs(7, -0.5, ((7, -0.5), (9, -1.25))),),
        finish=FinishReason.STOP,
        usage=Usage(10, 3, 4),
        timeline=Timeline(0.5, 0.25, 0.125, 2.0, "p0", 3, 4096, 1),
    ),
]


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_survives_the_wire(output: SequenceOutput) -> None:
    sent = worker_pb2.SequenceOutput.FromString(wire.output_to_pb(output).SerializeToString())
    assert wire.output_from_pb(sent) == output


def plain(number: int, request_id: str = "r") -> SequenceOutput:
    return SequenceOutput(RequestKey(request_id), 0, (100 + number,), number)


def test_plain_tokens_travel_as_numbers_and_all_else_whole() -> None:
    whole = SequenceOutput(RequestKey("b"), 0, (5, 6), 2)
    (step,) = wire.steps_to_pb([(7, plain(3)), (9, whole), (0, plain(1, "unnumbered"))])
    assert (step.samples[:], step.token_ids[:], step.num_generated[:]) == ([7], [103], [3])
    assert [wire.output_from_pb(output) for output in step.outputs] == [whole, plain(1, "unnumbered")]


@pytest.mark.parametrize("whole", OUTPUTS)
def test_an_output_that_is_more_than_a_token_never_overtakes_its_samples_tokens(whole: SequenceOutput) -> None:
    first, second = wire.steps_to_pb([(7, plain(1)), (7, plain(2)), (7, whole), (8, plain(1, "b"))])
    assert (first.samples[:], len(first.outputs)) == ([7, 7], 0)
    assert (second.samples[:], len(second.outputs)) == ([8], 1)


class Counted(int):
    """A sample's number that counts how often it is compared."""

    num_compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return int(self) == other


def test_what_waited_for_a_router_that_stood_still_costs_its_length_and_not_its_square() -> None:
    """16,000 plain tokens and as many with logprobs kept a worker's event loop for 12 s."""
    scored = replace(plain(1, "scored"), logprobs=(TokenLogprobs(101, -1.0),))
    waiting = [(Counted(7), plain(1)), (Counted(9), scored)] * 500
    (step,) = wire.steps_to_pb(waiting)
    assert (len(step.samples), len(step.outputs)) == (500, 500)
    assert Counted.num_compared <= 2 * len(waiting)


WORKER = WorkerInfo(
    worker_id="d0",
    generation=7,
    role=Role.DECODE,
    address="127.0.0.1:5",
    compatibility=Compatibility("m", "r", "t", "c", "float32", "float32", block_size=16),
    layout=ParallelLayout(2, 1),
    capacity=Capacity(100, 4096, 8, 512, 64, 1000),
    model_path="models/m",
    node="n",
    cost=CostModel(prefill_base_seconds=0.5),
    probe=bytes(range(16)),
)


def test_a_worker_survives_the_wire_and_its_lease() -> None:
    sent = worker_pb2.WorkerInfo.FromString(wire.worker_to_pb(WORKER).SerializeToString())
    assert wire.worker_from_pb(sent) == WORKER
    stored = {key.encode(): value.encode() for key, value in lease_fields(WORKER, draining=True).items()}
    assert parse_lease(stored) == WORKER


def test_a_lease_that_is_gone_or_foreign_is_told_apart() -> None:
    assert parse_lease({}) is None
    stored = {key.encode(): value.encode() for key, value in lease_fields(WORKER).items()}
    broken: list[dict[bytes, Any]] = [
        {b"generation": b"1"},
        {**stored, b"role": b"chef"},
        {**stored, b"capacity": b"[]"},
        {**stored, b"layout": b'{"tp": 0}'},
        {**stored, b"compatibility": b'{"unknown": 1}'},
    ]
    for fields_of_another in broken:
        with pytest.raises(ValueError):
            parse_lease(fields_of_another)


def test_a_load_report_survives_the_wire() -> None:
    report = LoadReport(Load(1, 2, 3, 4, 5, 6, 7), Load(1, 1, 1, 1, 1, 1, 1), CostModel(), Role.UNIFIED, 9, True)
    sent = worker_pb2.LoadReport.FromString(wire.report_to_pb(report).SerializeToString())
    assert wire.report_from_pb(sent) == report


def test_block_counts_survive_the_wire() -> None:
    counts = BlockCounts(1, 2, 3, 4, 5, 6)
    assert wire.counts_from_pb(wire.counts_to_pb(counts)) == counts


def test_an_error_arrives_as_its_own_class_with_its_numbers() -> None:
    error = ContextLengthExceeded("too long", field="prompt", limit=10, actual=11)
    got = wire.error_from_pb(worker_pb2.ErrorInfo.FromString(wire.error_to_pb(error).SerializeToString()))
    assert type(got) is ContextLengthExceeded
    assert got.numbers == {"field": "prompt", "limit": "10", "actual": "11"}


def test_what_arrives_malformed_is_refused() -> None:
    submit = wire.request_to_pb(Request(RequestKey("r"), (1, 2), SamplingParams(max_tokens=1)))
    cut = worker_pb2.Submit.FromString(submit.SerializeToString())
    cut.prompt_token_ids = b"\x01\x00\x00"
    with pytest.raises(ValueError):
        wire.request_from_pb(cut)
    submit.sampling.max_tokens = 0
    with pytest.raises(InvalidRequest, match="max_tokens"):
        wire.request_from_pb(submit)
