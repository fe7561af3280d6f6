"""Requests that wait for their turn, and those that give it back."""

import asyncio

import pytest

from headrace.errors import (
    DeadlineExceeded,
    Overloaded,
)
from headrace.values import (
    Usage,
)
from router.decisions.room import WORKER_BACKLOG
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import LENGTH, begin, collect, ids, job, stage


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
