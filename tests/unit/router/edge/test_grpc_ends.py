"""How a call of the gRPC edge ends: closed, not read, overdue, or in a drain."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import AsyncGeneratorType

import grpc
import pytest

from headrace.client import AsyncClient
from headrace.clock import SystemClock
from headrace.errors import DeadlineExceeded, RequestCancelled
from headrace.v1 import inference_pb2, inference_pb2_grpc
from router.edge import common, grpc_api
from router.edge.grpc_api import add_services, open_server
from router.jobs import Job, Piece
from router.text.vocabulary import Text
from tests.unit.router.edge.edges import ANSWER, collected, serving
from tests.unit.router.scripted import Scripted, make_edge


async def test_case_44_closing_the_stream_cancels_the_request(tiny: Text) -> None:
    core = Scripted(tiny, ANSWER, gate=asyncio.Semaphore(0))
    async with serving(core) as address, AsyncClient(address) as client:
        parts = client.generate("hi", request_id="r1")
        await anext(parts)
        await parts.aclose()
        await core.ended.wait()
    assert core.cancelled == ["r1"]


class Talking(Scripted):
    """Says more than any window between router and client holds, without an end."""

    async def stream(self, job: Job) -> AsyncGenerator[Piece]:
        self.jobs.append(job)
        try:
            while True:
                yield Piece(0, "x" * 2**16)
                await asyncio.sleep(0)
        finally:
            self.ended.set()


async def test_case_60_a_client_that_does_not_read_holds_up_no_drain(
    tiny: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "UNREAD_SECONDS", 0.1)
    core = Talking(tiny)
    server, port = open_server("127.0.0.1", 0, 2**20)
    edge = make_edge(tiny, core, clock=SystemClock())
    add_services(server, edge)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(model="tiny", text="hi")
            )
            await asyncio.wait_for(call.read(), 10)
            await asyncio.wait_for(edge.drain(), 10)
            call.cancel()
    finally:
        await server.stop(None)


async def test_a_client_that_reads_nothing_loses_its_call_and_hears_why_when_it_reads_again(
    tiny: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held its tenant's slot for as long as it kept its connection."""
    monkeypatch.setattr(grpc_api, "READS_NOTHING_SECONDS", 0.05)
    core = Talking(tiny)
    async with serving(core) as address, AsyncClient(address) as client:
        parts = client.generate("hi")
        await asyncio.wait_for(anext(parts), 10)
        await asyncio.wait_for(core.ended.wait(), 10)
        with pytest.raises(RequestCancelled, match="the client read nothing"):
            await asyncio.wait_for(collected(parts), 10)


async def test_a_client_that_waits_for_its_next_token_keeps_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[[], None]] = []

    def call_later(seconds: float, look: Callable[..., None], *args: object) -> asyncio.Handle:
        looks.append(lambda: look(*args))
        return asyncio.Handle(look, args, asyncio.get_running_loop())

    async def pieces() -> AsyncGenerator[Piece]:
        yield Piece(0, "x")
        await asyncio.Event().wait()

    relay = common.Relay(pieces())
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    async with relay.bounded(60.0):
        await anext(relay.pieces)
        relay.num_taken += 1
        waiting = asyncio.ensure_future(anext(relay.pieces))
        for _ in range(3):
            await asyncio.sleep(0)
            looks.pop()()
        waiting.cancel()
        await asyncio.wait([waiting])
    assert len(looks) == 1


async def test_case_60_a_drain_waits_for_a_stream_whose_next_token_is_long_in_coming(
    tiny: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has taken all there is: that is no client who does not read."""
    monkeypatch.setattr(common, "UNREAD_SECONDS", 0.01)
    looks = asyncio.Semaphore(0)

    def looked(relay: common.Relay) -> bool:
        looks.release()
        return isinstance(relay.pieces, AsyncGeneratorType) and not relay.pieces.ag_running

    monkeypatch.setattr(common.Relay, "waits_for_client", property(looked))
    core = Scripted(tiny, ANSWER, gate=asyncio.Semaphore(0))
    server, port = open_server("127.0.0.1", 0, 2**20)
    edge = make_edge(tiny, core, clock=SystemClock())
    add_services(server, edge)
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client, asyncio.timeout(10):
            parts = client.generate("hi", max_tokens=3)
            await anext(parts)
            drained = asyncio.create_task(edge.drain())
            for _ in range(5):
                await looks.acquire()
            assert not drained.done()
            assert core.gate is not None
            for _ in range(3):
                core.gate.release()
            assert [part.finish_reason async for part in parts][-1] == "length"
            await drained
    finally:
        await server.stop(None)


async def test_a_deadline_travels_as_time_left(tiny: Text) -> None:
    core = Scripted(tiny, ANSWER, gate=asyncio.Semaphore(0))
    async with serving(core) as address, AsyncClient(address) as client:
        with pytest.raises(DeadlineExceeded):
            assert [part async for part in client.generate("hi", timeout=0.2)]
        await core.ended.wait()
    seconds_left = core.jobs[0].seconds_left
    assert seconds_left is not None
    assert 0 < seconds_left < 0.25  # gRPC counts a deadline up to its next tick
