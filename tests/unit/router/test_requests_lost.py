"""Requests whose workers fail, refuse or are lost: who computes them instead, and what is held against whom."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from headrace.errors import (
    DeadlineExceeded,
    Draining,
    HeadraceError,
    IncompatiblePeer,
    InternalError,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    WorkerLost,
)
from headrace.v1 import worker_pb2
from headrace.values import Request, RequestKey, Role, Usage
from router.decisions.record import Decision
from router.decisions.retry import MAX_ATTEMPTS
from router.explanations import Failure
from router.jobs import Piece
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import LENGTH, begin, collect, ids, job, pair, promise, stage


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


async def test_when_attempts_run_out_decode_prefills_alone_though_others_could() -> None:
    """What fails with each of them may never end otherwise, and that needs nobody else."""
    prefills = [NullWorker(worker_info(f"p{number}", Role.PREFILL)) for number in range(MAX_ATTEMPTS + 1)]
    decode = NullWorker(worker_info("d", Role.DECODE))
    async with AsyncExitStack() as stack:
        for worker in (*prefills, decode):
            await stack.enter_async_context(worker)
        on = await stack.enter_async_context(stage(*prefills, decode))
        task, request = await begin(on, decode)
        assert request.prefill is not None
        key, asked = request.key, [request.prefill.worker_id]
        while asked[-1] is not None:
            decode.lose_peer(key, asked[-1], Overloaded("it is full"))
            key, placed = await asyncio.wait_for(decode.places.get(), 10)
            asked.append(placed)
        assert key.attempt == MAX_ATTEMPTS
        assert len(set(asked)) == MAX_ATTEMPTS, "nobody is asked twice"
        decode.emit(key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        assert (await task)[-1].text == "a"


async def test_two_that_refuse_each_other_are_not_paired_again_and_neither_has_failed() -> None:
    prefill, decode = pair()
    async with prefill, decode, stage(prefill, decode) as on:
        for whom in ("p", None):
            task, request = await begin(on, decode)
            assert (request.prefill and request.prefill.worker_id) == whom
            key = request.key
            if whom is not None:
                decode.lose_peer(key, whom, IncompatiblePeer("revision differs", field="revision"))
                key, _ = await asyncio.wait_for(decode.places.get(), 10)
            decode.emit(key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
            await task
        assert [worker.ejected_until for worker in on.requests.view().workers] == [0.0, 0.0]


async def test_where_nobody_is_left_a_client_hears_why_the_first_gave_it_up() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        task, request = await begin(on, worker)
        worker.reject(request.key, Overloaded("the backlog is full", limit=8))
        with pytest.raises(Overloaded, match="the backlog is full"):
            await task


async def test_without_another_prefill_worker_decode_prefills_alone() -> None:
    prefill, decode = pair()
    async with prefill, decode, stage(prefill, decode) as on:
        task, request = await begin(on, decode)
        decode.lose_peer(request.key, "p")
        key, placed = await asyncio.wait_for(decode.places.get(), 10)
        assert placed is None
        decode.emit(key, ids("a"), num_generated=1, finish=LENGTH, usage=Usage(10))
        assert (await task)[-1].text == "a"


async def asked_of(first: NullWorker, second: NullWorker) -> tuple[NullWorker, Request, NullWorker]:
    """Which of the two got the request, the request, and the other one."""
    submits = [asyncio.create_task(worker.submits.get()) for worker in (first, second)]
    (done,), (waits,) = await asyncio.wait(submits, return_when=asyncio.FIRST_COMPLETED)
    waits.cancel()
    asked, other = (first, second) if done is submits[0] else (second, first)
    return asked, done.result(), other


async def test_a_worker_lost_before_the_first_token_is_invisible() -> None:
    first, second = NullWorker(worker_info("a")), NullWorker(worker_info("b"))
    async with first, second, stage(first, second) as on:
        task = asyncio.create_task(collect(on.requests.stream(job())))
        dying, _, living = await asked_of(first, second)
        await dying.die()
        request = await asyncio.wait_for(living.submits.get(), 10)
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
        full, refused, other = await asked_of(first, second)
        full.reject(refused.key, Overloaded("the backlog is full", limit=8))
        request = await asyncio.wait_for(other.submits.get(), 10)
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
