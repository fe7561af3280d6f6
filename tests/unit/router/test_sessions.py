"""Sessions to null workers over real gRPC: hello, fan-out, silence, replacement, return."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest

from headrace.clock import ManualClock
from headrace.errors import Draining, HeadraceError, Overloaded, TransferFailed, WorkerLost
from headrace.v1 import worker_pb2
from headrace.values import FinishReason, Load, Request, RequestKey, SamplingParams, SequenceOutput, WorkerInfo
from router.mailbox import GivenUp, Mailbox, Pacer, PeerFailed
from router.sessions import Sessions
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.stage import Stage, stage

HEARTBEAT = 0.02


def submit(on: Stage, worker: str, request_id: str = "r") -> tuple[Mailbox[list[SequenceOutput]], Request]:
    request = Request(RequestKey(request_id), (1, 2, 3), SamplingParams(max_tokens=4))
    mailbox = Mailbox(request.key, Pacer(0.0, asyncio.get_running_loop()), lambda outputs: outputs)
    session = on.sessions.find(worker)
    assert session is not None
    session.submit(request, mailbox)
    return mailbox, request


async def test_one_message_of_a_step_reaches_each_of_its_requests() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        boxes = [submit(on, "null", f"r{number}")[0] for number in range(3)]
        for _ in boxes:
            await asyncio.wait_for(worker.submits.get(), 10)
        step = [worker_pb2.SequenceOutput(key=_key(f"r{n}"), token_ids=[n], num_generated=1) for n in range(3)]
        worker.say(worker_pb2.WorkerMessage(outputs=worker_pb2.StepOutputs(outputs=step)))
        for number, mailbox in enumerate(boxes):
            (said,) = await asyncio.wait_for(mailbox.take(), 10)  # type: ignore[misc]
            assert said.token_ids == (number,)


async def test_plain_tokens_find_their_sample_by_its_number_and_those_of_one_that_left_find_nobody() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        boxes = [submit(on, "null", f"r{number}")[0] for number in range(2)]
        session = on.sessions.find("null")
        assert session is not None
        session.cancel(RequestKey("r0"))
        step = worker_pb2.StepOutputs(samples=[1, 2, 99], token_ids=[10, 11, 12], num_generated=[1, 1, 1])
        worker.say(worker_pb2.WorkerMessage(outputs=step))
        assert await asyncio.wait_for(boxes[1].take(), 10) == [SequenceOutput(RequestKey("r1"), 0, (11,), 1)]
        late = asyncio.create_task(boxes[0].take())
        await asyncio.sleep(0)
        assert not late.done()
        late.cancel()


async def test_numbers_and_tokens_that_do_not_pair_are_malformed() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        mailbox, _ = submit(on, "null")
        worker.say(worker_pb2.WorkerMessage(outputs=worker_pb2.StepOutputs(samples=[1, 1], token_ids=[10])))
        said: object = await asyncio.wait_for(mailbox.take(), 10)
        if isinstance(said, list):  # what came before the fault
            said = await asyncio.wait_for(mailbox.take(), 10)
        assert isinstance(said, GivenUp)
        assert "malformed" in said.error.message


def _key(request_id: str, attempt: int = 1) -> worker_pb2.RequestKey:
    return worker_pb2.RequestKey(request_id=request_id, attempt=attempt)


async def test_what_is_said_of_an_older_attempt_or_of_nobody_is_dropped() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        mailbox, request = submit(on, "null")
        mailbox.key = request.key.next_attempt()
        worker.emit(RequestKey(request.key.request_id, request.key.attempt - 1), [1], num_generated=1)
        worker.emit(RequestKey("nobody"), [1], num_generated=1)
        worker.lose_peer(request.key, "p")
        worker.emit(mailbox.key, [2], num_generated=1, finish=FinishReason.STOP)
        (said,) = await asyncio.wait_for(mailbox.take(), 10)  # type: ignore[misc]
        assert said.token_ids == (2,)


@pytest.mark.parametrize("error", [TransferFailed("it hung", seconds=3), Overloaded("full"), Draining("leaving")])
async def test_a_lost_peer_is_told_with_its_name_and_what_it_failed_with(error: HeadraceError) -> None:
    async with NullWorker() as worker, stage(worker) as on:
        mailbox, request = submit(on, "null")
        worker.lose_peer(request.key, "p", error)
        said = await asyncio.wait_for(mailbox.take(), 10)
        assert isinstance(said, PeerFailed)
        assert (said.worker_id, type(said.error)) == ("p", type(error))
        assert (said.error.message, said.error.numbers) == (error.message, error.numbers)


async def test_when_a_worker_dies_each_of_its_requests_hears_so_once() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        boxes = [submit(on, "null", f"r{number}")[0] for number in range(3)]
        await worker.die()
        for mailbox in boxes:
            said = await asyncio.wait_for(mailbox.take(), 10)
            assert isinstance(said, GivenUp)
            assert isinstance(said.error, WorkerLost)
        assert on.sessions.find("null") is None


async def test_case_59_a_silent_worker_is_out_though_its_connection_stands() -> None:
    clock = ManualClock()
    async with (
        NullWorker() as worker,
        stage(worker, clock=clock, heartbeat_seconds=HEARTBEAT, silent_seconds=0.2) as on,
    ):
        mailbox, _ = submit(on, "null")
        worker.muted = True
        on.sessions.seek([])
        taking = asyncio.create_task(mailbox.take())
        while not taking.done():
            clock.advance(HEARTBEAT)  # every round is punctual
            await asyncio.wait([taking], timeout=HEARTBEAT)
        said = taking.result()
        assert isinstance(said, GivenUp)
        assert "silent" in said.error.message
        assert clock.now() > 0.2
        assert on.sessions.find("null") is None


async def test_a_router_that_was_itself_held_up_blames_nobody() -> None:
    clock = ManualClock()
    async with NullWorker() as worker, stage(worker, clock=clock, heartbeat_seconds=HEARTBEAT) as on:
        clock.advance(60.0)
        reported = asyncio.Event()
        on.sessions.listen(lambda worker_id: reported.set())
        worker.report(Load())
        await asyncio.wait_for(reported.wait(), 10)
        session = on.sessions.find("null")
        assert session is not None
        assert session.lost is None


async def test_pings_keep_an_idle_session_alive() -> None:
    clock = ManualClock()
    async with (
        NullWorker() as worker,
        stage(worker, clock=clock, heartbeat_seconds=HEARTBEAT, silent_seconds=0.2) as on,
    ):
        for _ in range(15):
            clock.advance(HEARTBEAT)
            await asyncio.wait_for(worker.pings.get(), 10)
        session = on.sessions.find("null")
        assert session is not None
        assert session.lost is None


async def test_a_worker_that_comes_back_is_found_again_under_its_new_generation() -> None:
    async with NullWorker() as first, stage(first) as on:
        await first.die()
        await on.until(lambda: on.sessions.find("null") is None)
        again = replace(first.info, generation=2)
        async with NullWorker(again):
            await on.until(lambda: on.sessions.find("null") is not None)
            session = on.sessions.find("null")
            assert session is not None
            assert session.info.generation == 2


async def test_a_session_that_is_lost_is_found_by_nobody_before_its_requests_hear_of_it() -> None:
    clock = ManualClock()
    async with (
        NullWorker() as worker,
        stage(worker, clock=clock, heartbeat_seconds=HEARTBEAT, silent_seconds=0.2) as on,
    ):
        mailbox, _ = submit(on, "null")
        session = on.sessions.find("null")
        worker.muted = True
        on.sessions.seek([])
        taking = asyncio.create_task(mailbox.take())
        told = list[tuple[bool, bool]]()
        on.sessions.listen(lambda name: told.append((on.sessions.find(name) is None, "requests=1" in repr(session))))
        while not taking.done():
            clock.advance(HEARTBEAT)
            await asyncio.wait([taking], timeout=HEARTBEAT)
        assert told[0] == (True, True)


async def test_what_a_worker_said_before_it_left_is_heard_and_then_the_session_is_over() -> None:
    num_tokens = 200
    async with NullWorker() as worker, stage(worker) as on:
        mailbox, request = submit(on, "null")
        await asyncio.wait_for(worker.submits.get(), 10)
        on.sessions.seek([])
        for number in range(num_tokens):
            worker.emit(request.key, [number], num_generated=number + 1)
        worker.leave()
        heard = list[int]()
        while not isinstance(said := await asyncio.wait_for(mailbox.take(), 10), GivenUp):
            assert isinstance(said, list)
            heard += [token for output in said for token in output.token_ids]
        assert heard == list(range(num_tokens))
        assert "the worker left" in said.error.message
        assert on.sessions.find("null") is None


async def test_a_newer_generation_elsewhere_takes_the_place_of_the_older() -> None:
    async with NullWorker() as first, NullWorker(worker_info(generation=2)) as second, stage(first) as on:
        mailbox, _ = submit(on, "null")
        on.sessions.seek([second.address])
        said = await asyncio.wait_for(mailbox.take(), 10)
        assert isinstance(said, GivenUp)
        session = on.sessions.find("null")
        assert session is not None
        assert session.info.generation == 2


@asynccontextmanager
async def keeping(sessions: Sessions) -> AsyncIterator[None]:
    task = asyncio.create_task(sessions.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@contextmanager
def logged(name: str) -> Iterator["asyncio.Queue[str]"]:
    """What a logger says meanwhile, to be awaited."""
    messages: asyncio.Queue[str] = asyncio.Queue()
    handler = logging.Handler()
    handler.emit = lambda record: messages.put_nowait(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize(("field", "value"), [("hash_version", 99), ("protocol_version", 99), ("protocol_version", 1)])
async def test_case_31_a_worker_that_hashes_or_speaks_otherwise_is_refused_with_the_field_named(
    field: str, value: int
) -> None:
    info = worker_info()
    info = replace(info, compatibility=replace(info.compatibility, **{field: value}))
    async with NullWorker(info) as worker, stage() as on:
        with logged("router.sessions") as messages:
            on.sessions.seek([worker.address])
            assert f"{field} is {value} there" in await asyncio.wait_for(messages.get(), 10)
        assert on.sessions.find("null") is None


async def test_a_router_may_refuse_a_worker_for_reasons_of_its_own() -> None:
    def refuse(info: WorkerInfo) -> str | None:
        return "another tokenizer" if info.compatibility.tokenizer == "t1" else None

    sessions = Sessions("t", ManualClock(), heartbeat_seconds=1, silent_seconds=5, refuse=refuse)
    async with NullWorker() as worker, keeping(sessions):
        with logged("router.sessions") as messages:
            sessions.seek([worker.address])
            assert "another tokenizer" in await asyncio.wait_for(messages.get(), 10)


async def test_a_worker_that_never_says_hello_is_given_up_in_bounded_time() -> None:
    async with NullWorker() as worker, stage(silent_seconds=0.2) as on:
        worker.muted = True
        with logged("router.sessions") as messages:
            on.sessions.seek([worker.address])
            assert "no hello within 0.2 s" in await asyncio.wait_for(messages.get(), 10)


async def test_an_address_where_nobody_listens_disturbs_no_one() -> None:
    async with NullWorker() as worker, stage(worker) as on:
        on.sessions.seek([worker.address, "127.0.0.1:1"])
        mailbox, request = submit(on, "null")
        worker.emit(request.key, [1], num_generated=1)
        assert await asyncio.wait_for(mailbox.take(), 10)


async def test_a_malformed_message_ends_that_session_and_nothing_else() -> None:
    async with NullWorker() as worker, NullWorker(worker_info("other")) as other, stage(worker, other) as on:
        mailbox, _ = submit(on, "null")
        worker.say(worker_pb2.WorkerMessage(load=worker_pb2.LoadReport(role="no such role")))
        said = await asyncio.wait_for(mailbox.take(), 10)
        assert isinstance(said, GivenUp)
        assert "malformed" in said.error.message
        assert on.sessions.find("other") is not None
