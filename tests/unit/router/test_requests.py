"""The life of a request before scripted workers, over real gRPC."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from prometheus_client import REGISTRY

from headrace import metrics
from headrace.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    NoWorkers,
)
from headrace.values import (
    Load,
    SamplingParams,
    Timeline,
    TokenLogprobs,
    Usage,
)
from router.decisions import placement
from router.decisions.placement import Ask, Candidate
from router.decisions.room import WORKER_BACKLOG
from router.decisions.view import View
from router.flight import Flight
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import LENGTH, STOP, begin, collect, ids, job, pair, stage


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
