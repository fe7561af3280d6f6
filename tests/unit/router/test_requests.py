"""The life of a request before scripted workers, over real gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from prometheus_client import REGISTRY

from headrace import metrics
from headrace.blocks import BlockHasher
from headrace.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InternalError,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    TransferFailed,
    WorkerLost,
)
from headrace.keys import Event, EventKind, Snapshot
from headrace.v1 import worker_pb2
from headrace.values import (
    FinishReason,
    Load,
    Request,
    RequestKey,
    Role,
    SamplingParams,
    Timeline,
    TokenLogprobs,
    Usage,
)
from router.decisions import placement
from router.decisions.placement import Ask, Candidate
from router.decisions.record import Decision
from router.decisions.room import WORKER_BACKLOG
from router.decisions.view import View
from router.explanations import Failure
from router.flight import Flight, Piece
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import Stage, collect, job, stage

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def ids(text: str) -> list[int]:
    return list(map(ord, text))


async def begin(on: Stage, worker: NullWorker, **fields: Any) -> tuple["asyncio.Task[list[Piece]]", Request]:
    """A stream that is collected in the background, and its request as it reached the worker."""
    task = asyncio.create_task(collect(on.requests.stream(job(**fields))))
    return task, await asyncio.wait_for(worker.submits.get(), 10)


def pair() -> tuple[NullWorker, NullWorker]:
    return NullWorker(worker_info("p", Role.PREFILL)), NullWorker(worker_info("d", Role.DECODE))


async def test_tokens_become_pieces_and_the_last_one_carries_usage_and_timeline() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker, max_tokens=3)
        assert request.prompt_token_ids == tuple(range(10))
        worker.emit(request.key, ids("a"), num_generated=1, usage=Usage(10, 1, 4))
        worker.emit(request.key, ids("bc"), num_generated=3, finish=LENGTH, timeline=Timeline(decode_seconds=2.0))
        pieces = await task
        assert "".join(piece.text for piece in pieces) == "abc"
        assert [token for piece in pieces for token in piece.token_ids] == ids("abc")
        assert [piece.finish for piece in pieces][-1] == "length"
        assert pieces[-1].usage == Usage(10, 3, 4)
        assert pieces[-1].timeline is not None
        assert pieces[-1].timeline.worker.decode_seconds == 2.0
        assert pieces[-1].timeline.decode_worker == "null"
        assert on.requests.num_in_flight == 0


def in_flight() -> dict[str, float]:
    states = ("queued", "prefill", "decode")
    values = {state: REGISTRY.get_sample_value(metrics.IN_FLIGHT, {"state": state}) for state in states}
    return {state: value for state, value in values.items() if value}


async def test_a_request_is_counted_where_it_is_until_it_is_over() -> None:
    async with NullWorker(worker_info(max_num_seqs=1)) as worker, stage(worker) as on:
        (first, request), *others = [await begin(on, worker) for _ in range(1 + WORKER_BACKLOG)]
        waiting = asyncio.create_task(collect(on.requests.stream(job())))
        await asyncio.sleep(0)
        assert in_flight() == {"prefill": 1 + WORKER_BACKLOG, "queued": 1}
        worker.emit(request.key, ids("a"), num_generated=1, usage=Usage(10))
        worker.emit(others[0][1].key, ids("b"), num_generated=1, finish=LENGTH, usage=Usage(10))
        await others[0][0]
        assert in_flight()["decode"] == 1
        tasks = [first, waiting, *(task for task, _ in others)]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert in_flight() == {}


async def test_a_token_that_ends_by_its_id_is_counted_but_is_no_text() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker)
        worker.emit(request.key, ids("hi\x02"), num_generated=3, finish=STOP, usage=Usage(10))
        (piece,) = await task
        assert (piece.text, piece.finish, piece.usage) == ("hi", "stop", Usage(10, 3, 0))


async def test_case_41_a_stop_string_over_a_chunk_border_never_leaks_and_cancels_on_the_worker() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker, stop=("own fox",), max_tokens=50)
        worker.emit(request.key, ids("brown"), num_generated=5, usage=Usage(10))
        worker.emit(request.key, ids(" fox jumps"), num_generated=15)
        pieces = await task
        assert "".join(piece.text for piece in pieces) == "br"
        assert pieces[-1].finish == "stop"
        assert pieces[-1].usage == Usage(10, 9, 0)
        assert await asyncio.wait_for(worker.cancels.get(), 10) == request.key


async def test_a_stop_string_that_never_completes_is_flushed_with_the_last_piece() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker, stop=("own fox",))
        worker.emit(request.key, ids("own fo"), num_generated=6, finish=LENGTH, usage=Usage(10))
        assert "".join(piece.text for piece in await task) == "own fo"


async def test_case_24_samples_are_interleaved_each_with_one_finish_and_the_prompt_counted_once() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker, n=3)
        assert request.n == 3
        for index in range(3):
            worker.emit(request.key, ids("x"), num_generated=1, index=index, usage=Usage(10) if index == 0 else None)
        for index in (2, 0, 1):
            worker.emit(request.key, ids(str(index)), num_generated=2, index=index, finish=LENGTH)
        pieces = await task
        for index in range(3):
            mine = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.text for piece in mine) == f"x{index}"
            assert [piece.finish for piece in mine if piece.finish] == ["length"]
        assert [piece.usage for piece in pieces if piece.usage] == [Usage(10, 6, 0)]


async def test_one_sample_stopped_by_a_string_leaves_the_others_running() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker, n=2, stop=("!",))
        worker.emit(request.key, ids("a!"), num_generated=2, index=0, usage=Usage(10))
        worker.emit(request.key, ids("zz"), num_generated=4, index=0)
        worker.emit(request.key, ids("b"), num_generated=1, index=1)
        worker.emit(request.key, ids("z"), num_generated=5, index=0, finish=LENGTH)
        worker.emit(request.key, ids("c"), num_generated=2, index=1, finish=LENGTH)
        pieces = await task
        assert [("".join(p.text for p in pieces if p.index == i)) for i in (0, 1)] == ["a", "bc"]
        assert pieces[-1].usage == Usage(10, 4, 0)
        assert worker.cancels.empty()


async def test_case_41_the_worker_is_told_of_a_sample_that_a_stop_string_ended_and_ends_it_alone() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker, n=2, stop=("!",))
        worker.emit(request.key, ids("a!"), num_generated=2, index=0, usage=Usage(10))
        assert await asyncio.wait_for(worker.stops.get(), 10) == (request.key, 0)
        worker.emit(request.key, [], num_generated=2, index=0, finish=STOP)
        worker.emit(request.key, ids("b"), num_generated=1, index=1)
        worker.emit(request.key, ids("c!"), num_generated=3, index=1)
        pieces = await task
        assert [piece.finish for piece in pieces if piece.finish] == ["stop", "stop"]
        assert pieces[-1].usage == Usage(10, 5, 0)
        assert await asyncio.wait_for(worker.cancels.get(), 10) == request.key, "the last one ends the request"
        assert worker.stops.empty()


async def test_logprobs_follow_their_tokens_also_over_merged_messages_and_a_stop() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker, stop=("c",), sampling=SamplingParams(max_tokens=9, num_logprobs=0))
        for number, token in enumerate(ids("abcd"), 1):
            worker.emit(request.key, [token], num_generated=number, logprobs=(TokenLogprobs(token, -1.0),))
        pieces = await task
        assert [entry.token_id for piece in pieces for entry in piece.logprobs] == ids("abc")


async def test_case_44_closing_the_stream_cancels_on_the_worker_and_frees_the_ledger() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        stream = on.requests.stream(job())
        assert isinstance(stream, AsyncGenerator)
        first = asyncio.ensure_future(anext(stream))
        request = await asyncio.wait_for(worker.submits.get(), 10)
        worker.emit(request.key, ids("a"), num_generated=1, usage=Usage(10))
        await first
        assert on.requests.num_in_flight == 1
        await stream.aclose()
        assert await asyncio.wait_for(worker.cancels.get(), 10) == request.key
        assert on.requests.num_in_flight == 0


async def test_case_44_cancelling_before_the_first_token_cancels_on_the_worker_too() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker)
        task.cancel()
        assert await asyncio.wait_for(worker.cancels.get(), 10) == request.key
        with pytest.raises(asyncio.CancelledError):
            await task
        assert on.requests.num_in_flight == 0


async def test_the_deadline_ends_the_request_and_cancels_on_the_worker() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker, seconds_left=0.2)
        assert request.seconds_left is not None
        assert 0 < request.seconds_left <= 0.2
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            await task
        assert await asyncio.wait_for(worker.cancels.get(), 10) == request.key


async def test_nobody_to_serve_is_a_503_with_a_time_to_come_back() -> None:
    async with stage() as on:
        with pytest.raises(NoWorkers) as caught:
            await collect(on.requests.stream(job()))
        assert caught.value.retry_after_seconds == 2.0


async def test_case_28_what_no_worker_has_the_context_for_is_refused_with_limit_and_count() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        with pytest.raises(ContextLengthExceeded) as caught:
            await collect(on.requests.stream(job(prompt=10, max_tokens=65536 - 9)))
        assert caught.value.numbers["limit"] == "65536"
        assert caught.value.numbers["actual"] == "65537"
        assert worker.submits.empty()
        task, _ = await begin(on, worker, max_tokens=65536 - 10)
        task.cancel()
        await asyncio.wait([task])


async def test_a_pair_prefills_on_the_one_and_decodes_on_the_other() -> None:
    prefill, decode = pair()
    async with prefill, decode, stage(prefill, decode) as on:
        task, request = await begin(on, decode, request_id="mine")
        assert request.prefill is not None
        assert (request.prefill.worker_id, request.prefill.address) == ("p", prefill.address)
        decode.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        await task
        explanation = on.requests.why("mine")
        assert explanation is not None
        assert explanation.outcome == "finished"
        chosen = explanation.whys[0].chosen
        assert chosen is not None
        assert (chosen.decode, chosen.prefill) == ("d", "p")
        assert {(c.worker_id, c.role) for c in explanation.whys[0].candidates} == {("p", "prefill"), ("d", "decode")}


async def test_why_is_worked_out_when_somebody_asks_and_not_at_the_end_of_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    worked_out = placement.all_candidates

    def counted(ask: Ask, view: View, now: float) -> tuple[Candidate, ...]:
        asked.append(ask.num_prompt_tokens)
        return worked_out(ask, view, now)

    monkeypatch.setattr(placement, "all_candidates", counted)
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker, request_id="mine")
        worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        await task
        assert not asked
        explanation = on.requests.why("mine")
        assert explanation is not None
        assert (len(explanation.whys), asked) == (1, [10])


async def test_requests_are_listed_with_why_they_ran_where_they_ran_and_nothing_is_worked_out_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "all_candidates", lambda *_: pytest.fail("a list compares nobody"))
    prefill, decode = pair()
    async with prefill, decode, stage(prefill, decode) as on:
        for name in ("first", "second"):
            task, request = await begin(on, decode, request_id=name)
            decode.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
            await task
        task, _ = await begin(on, decode, request_id="runs")
        listed = list(on.requests.recent(None, 5))
        assert [(one.outline.request_id, one.outline.outcome, one.reasons) for one in listed] == [
            ("runs", "prefill", ("pair",)),
            ("second", "finished", ("pair",)),
            ("first", "finished", ("pair",)),
        ]
        assert [one.seconds_ago is None for one in listed] == [True, False, False]
        assert not list(on.requests.recent("another tenant", 5))
        more, _ = await begin(on, decode, request_id="runs, too")
        monkeypatch.setattr(Flight, "outline", lambda *_: pytest.fail("of thousands that run, a few are asked for"))
        assert [one.outline.request_id for one in on.requests.recent(None, 0)] == ["second", "first"]
        monkeypatch.undo()
        assert next(on.requests.recent(None, 1)).outline.request_id == "runs"
        for running in (task, more):
            running.cancel()
        await asyncio.wait([task, more])


async def test_a_decode_worker_that_waited_too_long_for_another_prefill_worker_is_heard_under_the_old_name() -> None:
    """Its first token was dropped, and those that came by number were not: they did not add up."""
    prefill, decode = pair()
    async with prefill, decode, stage(prefill, decode) as on:
        task, request = await begin(on, decode)
        decode.lose_peer(request.key, "p")
        assert (await asyncio.wait_for(decode.places.get(), 10))[0] == request.key.next_attempt()
        decode.emit(request.key, ids("a"), num_generated=1, usage=Usage(10, 1))
        decode.say(wire_step(1, ord("b"), 2))
        decode.emit(request.key, ids("c"), num_generated=3, finish=LENGTH, usage=Usage(10, 3))
        assert "".join(piece.text for piece in await asyncio.wait_for(task, 10)) == "abc"


def wire_step(number: int, token_id: int, num_generated: int) -> worker_pb2.WorkerMessage:
    step = worker_pb2.StepOutputs(samples=[number], token_ids=[token_id], num_generated=[num_generated])
    return worker_pb2.WorkerMessage(outputs=step)


async def test_a_lost_prefill_worker_is_replaced_under_the_next_attempt() -> None:
    prefill, decode = pair()
    other = NullWorker(worker_info("q", Role.PREFILL))
    async with prefill, other, decode, stage(prefill, other, decode) as on:
        task, request = await begin(on, decode)
        assert request.prefill is not None
        decode.lose_peer(request.key, request.prefill.worker_id)
        key, placed = await asyncio.wait_for(decode.places.get(), 10)
        assert key == RequestKey(request.key.request_id, 2)
        assert {placed, request.prefill.worker_id} == {"p", "q"}
        decode.emit(RequestKey(request.key.request_id, 0), ids("x"), num_generated=1)  # never submitted: dropped
        decode.emit(key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        (piece,) = await task
        assert piece.text == "a"
        assert piece.timeline is not None
        assert piece.timeline.attempts == 2


async def test_a_deadline_that_passed_on_the_prefill_worker_ends_the_request() -> None:
    prefill, decode = pair()
    async with prefill, decode, stage(prefill, decode) as on:
        task, request = await begin(on, decode)
        decode.lose_peer(request.key, "p", DeadlineExceeded("its deadline passed during prefill"))
        with pytest.raises(DeadlineExceeded, match="during prefill"):
            await task
        assert await asyncio.wait_for(decode.cancels.get(), 10) == request.key
        assert decode.places.empty()


async def test_why_tells_which_worker_failed_which_placement_while_the_request_runs_and_after() -> None:
    decisions: list[Decision] = []
    prefill, decode = pair()
    async with (
        prefill,
        decode,
        stage(prefill, decode, note_decision=lambda key, decision: decisions.append(decision())) as on,
    ):
        task, request = await begin(on, decode, request_id="mine")
        decode.lose_peer(request.key, "p", TransferFailed("the link closed"))
        key, _ = await asyncio.wait_for(decode.places.get(), 10)
        running = on.requests.why("mine")
        assert running is not None
        assert (running.outcome, len(running.whys), running.ttft_seconds) == ("prefill", 2, None)
        decode.emit(key, ids("ab"), num_generated=2, finish=LENGTH, usage=Usage(10, 2, 4))
        await task
        ended = on.requests.why("mine")
        assert ended is not None
        assert ended.failures == running.failures == (Failure(0, "p", "TransferFailed", "the link closed"),)
        assert (ended.outcome, ended.usage, ended.timeline.attempts) == ("finished", Usage(10, 2, 4), 2)
        assert ended.ttft_seconds is not None
        assert ended.tpot_seconds is not None
        assert 0 <= ended.ttft_seconds <= ended.ttft_seconds + ended.tpot_seconds <= ended.seconds
        assert [(decision.request_id, decision.key.attempt) for decision in decisions] == [("mine", 1), ("mine", 2)]
        assert tuple(decision.why for decision in decisions) == ended.whys
        assert [decision.again() for decision in decisions] == decisions
        assert [decision.prefill for decision in decisions] == ["p", None]


async def test_without_another_prefill_worker_decode_prefills_alone() -> None:
    prefill, decode = pair()
    async with prefill, decode, stage(prefill, decode) as on:
        task, request = await begin(on, decode)
        decode.lose_peer(request.key, "p")
        key, placed = await asyncio.wait_for(decode.places.get(), 10)
        assert placed is None
        decode.emit(key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        assert (await task)[-1].text == "a"


async def test_a_worker_lost_before_the_first_token_is_invisible() -> None:
    first, second = NullWorker(worker_info("a")), NullWorker(worker_info("b"))
    async with first, second, stage(first, second) as on:
        task = asyncio.create_task(collect(on.requests.stream(job())))
        submits = [asyncio.create_task(worker.submits.get()) for worker in (first, second)]
        (done,), (waits,) = await asyncio.wait(submits, return_when=asyncio.FIRST_COMPLETED)
        dying, living = (first, second) if done is submits[0] else (second, first)
        await dying.die()
        request = await asyncio.wait_for(waits, 10)
        assert request.key.attempt == 2
        living.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        assert (await task)[-1].text == "a"


async def test_case_45_a_worker_lost_after_tokens_is_an_error_and_no_finish() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        pieces: list[Piece] = []

        async def read() -> None:
            async for piece in on.requests.stream(job(max_tokens=50)):
                pieces.append(piece)
                if len(pieces) == 1:
                    await worker.die()

        task = asyncio.create_task(read())
        request = await asyncio.wait_for(worker.submits.get(), 10)
        worker.emit(request.key, ids("a"), num_generated=1, usage=Usage(10))
        with pytest.raises(WorkerLost, match="null"):
            await task
        assert [piece.finish for piece in pieces] == [None]
        assert on.requests.num_in_flight == 0


async def test_tokens_that_came_before_a_failure_reach_the_client_before_it() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        pieces: list[Piece] = []

        async def read() -> None:
            async for piece in on.requests.stream(job(max_tokens=50)):
                pieces.append(piece)  # noqa: PERF401 (kept when the stream raises)

        task = asyncio.create_task(read())
        request = await asyncio.wait_for(worker.submits.get(), 10)
        worker.emit(request.key, ids("ab"), num_generated=2, usage=Usage(10))
        worker.emit(request.key, ids("c"), num_generated=3)
        worker.reject(request.key, InternalError("its step failed"))
        with pytest.raises(InternalError):
            await task
        assert "".join(piece.text for piece in pieces) == "abc"


async def test_a_full_worker_sends_the_request_on_to_another() -> None:
    first, second = NullWorker(worker_info("a")), NullWorker(worker_info("b"))
    async with first, second, stage(first, second) as on:
        task = asyncio.create_task(collect(on.requests.stream(job())))
        submits = [asyncio.create_task(worker.submits.get()) for worker in (first, second)]
        (done,), (waits,) = await asyncio.wait(submits, return_when=asyncio.FIRST_COMPLETED)
        full, other = (first, second) if done is submits[0] else (second, first)
        full.reject(done.result().key, Overloaded("the backlog is full", limit=8))
        request = await asyncio.wait_for(waits, 10)
        other.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        await task


async def test_a_refusal_that_no_retry_can_mend_goes_to_the_client() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker)
        worker.reject(request.key, InvalidRequest.out_of_range("logit_bias", 99999, "a token id"))
        with pytest.raises(InvalidRequest) as caught:
            await task
        assert caught.value.field == "logit_bias"
        assert worker.cancels.empty()


async def test_case_10_client_errors_never_eject_a_worker() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        for _ in range(20):
            task, request = await begin(on, worker)
            worker.reject(request.key, InvalidRequest("too long", field="prompt"))
            with pytest.raises(InvalidRequest):
                await task
        assert on.requests.view().workers[0].ejected_until == 0.0


TRUTH = (metrics.PREDICTED_CACHED_TOKENS, metrics.ACTUAL_CACHED_TOKENS)


def promise(on: Stage, worker: NullWorker, tokens: Sequence[int]) -> None:
    """Lets the index say that the worker holds these."""
    same = worker.info.compatibility
    hasher = BlockHasher(revision=same.revision, kv_format=same.kv_format, block_size=same.block_size)
    held = Event.of(EventKind.STORED, hasher.chain(tokens))
    on.index.load(worker.info.worker_id, Snapshot(1, 1, (held,) if held.num_blocks else ()))


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_a_worker_that_lacks_what_its_index_promises_is_routed_by_load_alone() -> None:
    """And each placement that passes over the index says so in a counter."""
    liar, honest = NullWorker(worker_info("liar", block_size=4)), NullWorker(worker_info("honest", block_size=4))
    async with liar, honest, stage(liar, honest) as on:
        promise(on, liar, range(400))
        promise(on, honest, ())
        before = metric(metrics.INDEX_FALLBACKS, reason="distrusted")

        async def answer(worker: NullWorker) -> None:
            while True:
                request = await worker.submits.get()
                worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(400))

        answering = [asyncio.create_task(answer(worker)) for worker in (liar, honest)]
        for number in range(4):
            await asyncio.wait_for(collect(on.requests.stream(job(f"r{number}", prompt=400))), 10)
        explanations = [on.requests.why(f"r{number}") for number in range(4)]
        for task in answering:
            task.cancel()
        counted_on = [
            {c.worker_id: c.cached_tokens for c in explanation.whys[0].candidates}["liar"]
            for explanation in explanations
            if explanation is not None
        ]
        assert counted_on == [399, 399, 399, 0]
        assert metric(metrics.INDEX_FALLBACKS, reason="distrusted") == before + 1
        assert metric(metrics.INDEX_ERROR, worker="liar") > 0.9


async def test_a_new_generation_of_an_ejected_worker_begins_without_a_record() -> None:
    older, newer = NullWorker(worker_info("w")), NullWorker(worker_info("w", generation=2))
    async with older, newer, stage(older) as on:
        for _ in range(3):
            task, request = await begin(on, older)
            older.reject(request.key, InternalError("it is broken"))
            with pytest.raises(InternalError):
                await task
        assert on.requests.view().workers[0].ejected_until > 0
        on.sessions.seek([newer.address])
        await on.until(lambda: (live := on.sessions.find("w")) is not None and live.info.generation == 2)
        assert on.requests.view().workers[0].ejected_until == 0.0


async def test_no_series_speaks_of_a_worker_that_is_gone() -> None:
    async with NullWorker(worker_info("leaves")) as worker, stage(worker) as on:
        promise(on, worker, range(64))
        task, request = await begin(on, worker, prompt=64)
        worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(64))
        await task
        names = (*TRUTH, metrics.INDEX_ERROR)
        assert None not in [REGISTRY.get_sample_value(name, {"worker": "leaves"}) for name in names]
        on.requests.forget("leaves")
        assert [REGISTRY.get_sample_value(name, {"worker": "leaves"}) for name in names] == [None] * 3


async def test_what_decode_holds_is_offered_to_prefill_and_is_no_news_of_the_index() -> None:
    prefill = NullWorker(worker_info("p", Role.PREFILL, block_size=4))
    decode = NullWorker(worker_info("d", Role.DECODE, block_size=4))
    async with prefill, decode, stage(prefill, decode) as on:
        promise(on, prefill, ())
        promise(on, decode, range(200))
        task, request = await begin(on, decode, prompt=400)
        assert (request.prefill, request.offer_held) == (None, False), "an idle decode worker does the rest alone"
        decode.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(400, 1, 200))
        await task
        decode.report(Load(num_running=20, context_tokens=400))
        await on.until(lambda: on.sessions.find("d").report is not None)  # type: ignore[union-attr]
        before = [metric(name, worker="p") for name in TRUTH]
        task, request = await begin(on, decode, prompt=400)
        assert request.prefill is not None
        assert request.offer_held
        decode.emit(
            request.key,
            ids("a"),
            num_generated=1,
            finish=LENGTH,
            usage=Usage(400, 1, 200),
            timeline=Timeline(prefill_worker="p"),
        )
        await task
        assert [metric(name, worker="p") for name in TRUTH] == before


async def test_an_equal_prompt_follows_one_that_is_computed_before_its_blocks_are_known() -> None:
    one, other = NullWorker(worker_info("one", block_size=4)), NullWorker(worker_info("other", block_size=4))
    async with one, other, stage(one, other) as on:
        got = [asyncio.create_task(worker.submits.get()) for worker in (one, other)]
        first = on.requests.stream(job("first", prompt=400))
        begun = asyncio.ensure_future(anext(first))
        (done,), (waiting,) = await asyncio.wait(got, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        chosen = (one, other)[got.index(done)]
        chosen.emit(done.result().key, ids("a"), num_generated=1, usage=Usage(400))
        await begun
        second, request = await begin(on, chosen, request_id="second", prompt=400)
        chosen.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(400))
        await second
        await first.aclose()


async def test_case_11_a_failing_worker_with_the_hottest_prefix_is_ejected() -> None:
    broken, sound = NullWorker(worker_info("a", block_size=4)), NullWorker(worker_info("b", block_size=4))
    async with broken, sound, stage(broken, sound) as on:
        promise(on, broken, range(400))

        async def fail() -> None:
            while True:
                request = await broken.submits.get()
                broken.reject(request.key, InternalError("it always fails"))

        async def answer() -> None:
            while True:
                request = await sound.submits.get()
                sound.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(400))

        workers = [asyncio.create_task(fail()), asyncio.create_task(answer())]
        failures = []
        for number in range(8):
            try:
                await asyncio.wait_for(collect(on.requests.stream(job(prompt=400))), 10)
            except InternalError:
                failures.append(number)
        for task in workers:
            task.cancel()
        assert failures == [0, 1, 2]
        assert {w.worker_id: w.ejected_until > 0 for w in on.requests.view().workers} == {"a": True, "b": False}


async def test_case_54_beyond_the_queue_requests_are_refused_with_a_time_to_come_back() -> None:
    info = worker_info(max_num_seqs=1)
    async with NullWorker(info) as worker, stage(worker, max_queue=2) as on:
        tasks = [asyncio.create_task(collect(on.requests.stream(job(f"r{i}")))) for i in range(11)]
        requests = [await asyncio.wait_for(worker.submits.get(), 10) for _ in range(9)]
        assert on.requests.num_queued == 2
        with pytest.raises(Overloaded) as caught:
            await collect(on.requests.stream(job("late")))
        assert caught.value.retry_after_seconds is not None
        assert caught.value.retry_after_seconds >= 1
        for request in requests:
            worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        for _ in range(2):
            request = await asyncio.wait_for(worker.submits.get(), 10)
            worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        await asyncio.gather(*tasks)
        assert (on.requests.num_queued, on.requests.num_in_flight) == (0, 0)


async def test_clients_that_leave_at_once_give_their_turns_to_those_behind_them() -> None:
    """One's end makes room for the next in the queue, whose client left in the same moment."""
    info = worker_info(max_num_seqs=1)
    async with NullWorker(info) as worker, stage(worker, max_queue=4) as on:
        running = [asyncio.create_task(collect(on.requests.stream(job(f"r{i}")))) for i in range(9)]
        requests = [await asyncio.wait_for(worker.submits.get(), 10) for _ in range(9)]
        leaving = asyncio.create_task(collect(on.requests.stream(job("leaving"))))
        behind = asyncio.create_task(collect(on.requests.stream(job("behind"))))
        await asyncio.sleep(0)
        assert on.requests.num_queued == 2
        running[0].cancel()
        leaving.cancel()
        last = await asyncio.wait_for(worker.submits.get(), 10)
        for request in (*requests[1:], last):
            worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        await asyncio.wait_for(asyncio.gather(*running[1:], behind), 10)
        await asyncio.wait([running[0], leaving])
        assert (running[0].cancelled(), leaving.cancelled()) == (True, True)
        assert (on.requests.num_queued, on.requests.num_in_flight) == (0, 0)


async def test_what_the_worker_has_ended_takes_no_place_though_its_client_does_not_read() -> None:
    n = WORKER_BACKLOG + 1
    async with NullWorker(worker_info(max_num_seqs=n)) as worker, stage(worker, max_queue=4) as on:
        unread = on.requests.stream(job("unread", n=n))
        first = asyncio.create_task(anext(unread))
        request = await asyncio.wait_for(worker.submits.get(), 10)
        worker.emit(request.key, ids("a"), num_generated=1)
        assert (await asyncio.wait_for(first, 10)).text == "a"
        behind = asyncio.create_task(collect(on.requests.stream(job("behind", n=n))))
        for index in range(n):
            worker.emit(request.key, ids("b"), num_generated=1 + (index == 0), index=index, finish=LENGTH)
        other = await asyncio.wait_for(worker.submits.get(), 10)
        assert worker.cancels.empty()
        for index in range(n):
            worker.emit(other.key, ids("c"), num_generated=1, index=index, finish=LENGTH, usage=Usage(10))
        await asyncio.wait_for(behind, 10)
        rest = await collect(unread)
        assert "".join(piece.text for piece in rest) == "b" * n


async def test_a_deadline_frees_the_place_of_a_request_whose_client_does_not_read() -> None:
    n = WORKER_BACKLOG + 1
    async with NullWorker(worker_info(max_num_seqs=n)) as worker, stage(worker, max_queue=4) as on:
        unread = on.requests.stream(job("unread", n=n, seconds_left=0.2))
        first = asyncio.create_task(anext(unread))
        request = await asyncio.wait_for(worker.submits.get(), 10)
        worker.emit(request.key, ids("a"), num_generated=1)
        await asyncio.wait_for(first, 10)
        behind = asyncio.create_task(collect(on.requests.stream(job("behind", n=n))))
        assert await asyncio.wait_for(worker.cancels.get(), 10) == request.key
        other = await asyncio.wait_for(worker.submits.get(), 10)
        for index in range(n):
            worker.emit(other.key, ids("c"), num_generated=1, index=index, finish=LENGTH, usage=Usage(10))
        await asyncio.wait_for(behind, 10)
        with pytest.raises(DeadlineExceeded):
            await collect(unread)
        assert (on.requests.num_queued, on.requests.num_in_flight) == (0, 0)


async def test_a_queued_request_whose_client_goes_away_or_whose_time_is_over_leaves_the_queue() -> None:
    info = worker_info(max_num_seqs=1)
    async with NullWorker(info) as worker, stage(worker, max_queue=4) as on:
        running = [asyncio.create_task(collect(on.requests.stream(job(f"r{i}")))) for i in range(9)]
        for _ in range(9):
            await asyncio.wait_for(worker.submits.get(), 10)
        gone = asyncio.create_task(collect(on.requests.stream(job("gone"))))
        late = asyncio.create_task(collect(on.requests.stream(job("late", seconds_left=0.1))))
        with pytest.raises(DeadlineExceeded):
            await late
        assert on.requests.num_queued == 1
        gone.cancel()
        await asyncio.wait([gone])
        assert on.requests.num_queued == 0
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert on.requests.num_in_flight == 0
        task, _ = await begin(on, worker)
        task.cancel()
        await asyncio.wait([task])


async def test_tokens_that_do_not_add_up_are_an_error_and_never_a_silent_gap() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker)
        worker.emit(request.key, ids("a"), num_generated=2, usage=Usage(10))
        with pytest.raises(InternalError, match="do not add up"):
            await task


async def test_two_requests_of_one_client_id_do_not_meet() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        one, first = await begin(on, worker, request_id="same")
        two, second = await begin(on, worker, request_id="same")
        assert first.key.request_id != second.key.request_id
        worker.emit(second.key, ids("b"), num_generated=1, finish=LENGTH, usage=Usage(10))
        worker.emit(first.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        assert ((await one)[0].text, (await two)[0].text) == ("a", "b")


async def test_a_worker_that_streams_by_itself_is_relayed_whole() -> None:
    async with NullWorker(auto=True, first_token=0x100) as worker, stage(worker, coalesce_seconds=0.05) as on:
        streams = [on.requests.stream(job(f"r{i}", max_tokens=200, n=1 + i % 2)) for i in range(16)]
        for number, pieces in enumerate(await asyncio.gather(*map(collect, streams))):
            for index in range(1 + number % 2):
                tokens = [token for piece in pieces if piece.index == index for token in piece.token_ids]
                assert tokens == [0x101 + at for at in range(200)]


async def test_reports_net_out_what_is_ours() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker)
        worker.report(Load(num_waiting=3, waiting_prefill_tokens=110), Load(num_waiting=1, waiting_prefill_tokens=10))
        await on.until(lambda: on.sessions.find("null").report is not None)  # type: ignore[union-attr]
        load = on.requests.view().workers[0].load
        assert (load.num_waiting, load.waiting_prefill_tokens) == (3, 110)
        worker.emit(request.key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        await task
        assert on.requests.view().workers[0].load.num_waiting == 2


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        (TransferFailed("x"), True),
        (InternalError("x"), True),
        (Overloaded("x"), False),
        (Draining("x"), False),
        (InvalidRequest("x"), False),
    ],
)
async def test_what_a_prefill_worker_fails_is_held_against_it_and_what_it_may_refuse_is_not(
    error: HeadraceError, is_failure: bool
) -> None:
    prefill, decode = pair()
    other = NullWorker(worker_info("q", Role.PREFILL))
    async with prefill, other, decode, stage(prefill, other, decode) as on:
        for _ in range(12):
            task, request = await begin(on, decode)
            assert request.prefill is not None
            key = request.key
            if request.prefill.worker_id == "p":
                decode.lose_peer(key, "p", error)
                key, placed = await asyncio.wait_for(decode.places.get(), 10)
                assert placed == "q"
            decode.emit(key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
            await task
        ejected = {worker.worker_id: worker.ejected_until > 0 for worker in on.requests.view().workers}
        assert ejected == {"p": is_failure, "q": False, "d": False}
