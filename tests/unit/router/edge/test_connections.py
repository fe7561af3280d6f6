"""Connections to a real HTTP server, from clients that hold what they do not use."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.clock import ManualClock
from headrace.config import RouterConfig
from headrace.errors import ConfigError, Overloaded
from router.edge import connections, sse
from router.edge.connections import HttpServer, http_config, listen
from router.edge.openai import OpenAi
from router.jobs import Job, Piece
from router.text.vocabulary import Text
from tests.unit.router.scripted import Scripted, make_edge

HEAD = b"GET / HTTP/1.1\r\nhost: router\r\n"


class Endless:
    """An app whose answers do not end by themselves; it notes which began, and which were ended from outside."""

    def __init__(self, chunk: bytes = b"") -> None:
        self.chunk = chunk
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await sse.Answer(self._answer)(scope, receive, send)

    async def _answer(self, send: Send) -> None:
        self.begun.set()
        try:
            await sse.start(send)
            while self.chunk:
                await sse.write(send, self.chunk)
                await asyncio.sleep(0)  # as an answer waits for its tokens
            await asyncio.get_running_loop().create_future()
        finally:
            self.ended.set()


@asynccontextmanager
async def connected(
    app: ASGIApp, keep_alive_seconds: float = 5
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listening = listen("127.0.0.1", 0, "port")
    server: uvicorn.Server = HttpServer(http_config(app, keep_alive_seconds, 2))  # type: ignore[arg-type]
    serving = asyncio.create_task(server.serve([listening]))
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        server.should_exit = True
        await serving
        listening.close()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_a_host_that_is_not_here_is_said_to_be_none(host: str) -> None:
    with pytest.raises(ConfigError, match=f"port: cannot listen on {host}:0: {host} is no address of this machine"):
        listen(host, 0, "port")


async def test_a_head_that_does_not_end_is_refused() -> None:
    async with connected(Endless()) as (reader, writer):
        writer.write(HEAD + b"x-filler: ")
        writer.write(b"a" * connections.MAX_HEAD_BYTES)
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 431 ")


async def test_many_small_headers_are_a_head_that_does_not_end_too() -> None:
    async with connected(Endless()) as (reader, writer):
        writer.write(HEAD)
        line = b"x-filler: yyyy\r\n"
        writer.write(line * (connections.MAX_HEAD_BYTES // len(line) + 1))
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 431 ")


async def test_a_request_that_stops_half_way_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SENDS_NOTHING_SECONDS", 0.05)
    async with connected(Endless()) as (reader, writer):
        writer.write(HEAD)
        assert await until_closed(reader) == b""


async def test_a_connection_on_which_nothing_ever_comes_is_closed() -> None:
    async with connected(Endless(), keep_alive_seconds=0.05) as (reader, _):
        assert await until_closed(reader) == b""


async def test_case_50_an_idle_connection_is_kept_between_requests_for_longer_than_a_request_may_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who closes first must be the client, whose pool may keep it for as long as keep_alive_seconds says."""
    assert http_config(Endless(), 120, 2).timeout_keep_alive == RouterConfig().keep_alive_seconds == 120
    monkeypatch.setattr(connections, "SENDS_NOTHING_SECONDS", 0.05)
    loop, app = asyncio.get_running_loop(), PlainTextResponse("ok")
    async with connected(app) as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            over = loop.time() + 3 * connections.SENDS_NOTHING_SECONDS
            while loop.time() < over:
                assert not reader.at_eof()
                await asyncio.sleep(0)


async def test_a_client_whose_body_we_do_not_read_yet_is_not_taken_for_one_that_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "SENDS_NOTHING_SECONDS", 0.05)
    tried, size = asyncio.Event(), 2**22
    lose_patience = connections.BoundedHttp._lose_patience

    def noted(protocol: connections.BoundedHttp) -> None:
        lose_patience(protocol)
        tried.set()

    monkeypatch.setattr(connections.BoundedHttp, "_lose_patience", noted)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await tried.wait()
        num_bytes = 0
        while (message := await receive())["type"] == "http.request":
            num_bytes += len(message["body"])
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % num_bytes})

    async with connected(slow) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: router\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size)
        writer.write(b"x" * size)
        assert b"%d" % size in await until_closed(reader)


async def test_an_answer_that_nobody_reads_to_its_end_outlives_no_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given in one piece, so nobody waits for the client; closing would wait for it."""
    lost = asyncio.Event()
    connection_lost = connections.BoundedHttp.connection_lost

    def noted(protocol: connections.BoundedHttp, exc: Exception | None) -> None:
        connection_lost(protocol, exc)
        lost.set()

    monkeypatch.setattr(connections.BoundedHttp, "connection_lost", noted)

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 2**25})

    async with connected(large, keep_alive_seconds=0.05) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD + b"\r\n")
        await asyncio.wait_for(lost.wait(), 10)


async def test_a_client_that_sends_byte_by_byte_is_served() -> None:
    app = Endless()
    async with connected(app) as (reader, writer):
        for byte in HEAD + b"\r\n":
            writer.write(bytes((byte,)))
            await writer.drain()
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200 ")


async def test_an_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READS_NOTHING_SECONDS", 0.05)
    app = Endless(b"x" * 65536)
    async with connected(app) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD + b"\r\n")
        await asyncio.wait_for(app.ended.wait(), 10)


async def test_case_44_a_client_that_hangs_up_with_a_second_request_under_way_ends_the_first() -> None:
    app = Endless()
    async with connected(app) as (_, writer):
        writer.write((HEAD + b"\r\n") * 2)
        await asyncio.wait_for(app.begun.wait(), 10)
        writer.transport.abort()
        await asyncio.wait_for(app.ended.wait(), 10)


class Waiting(Scripted):
    """Its first token waits for the gate too, as that of a request in the queue."""

    async def stream(self, job: Job) -> AsyncGenerator[Piece]:
        assert self.gate is not None
        await self.gate.acquire()
        async for piece in super().stream(job):
            yield piece


async def post(writer: asyncio.StreamWriter, path: bytes, body: dict[str, object]) -> None:
    raw = json.dumps(body).encode()
    writer.write(b"POST %s HTTP/1.1\r\nhost: router\r\ncontent-length: %d\r\n\r\n" % (path, len(raw)) + raw)


async def test_a_stream_that_waits_says_comments_and_then_its_answer(tiny: Text, clock: ManualClock) -> None:
    """Before its first token and between two."""
    core = Waiting(tiny, gate=asyncio.Semaphore(0))
    async with connected(OpenAi(make_edge(tiny, core, clock=clock), 10_000, lambda: 0.0, 0.01).app()) as (
        reader,
        writer,
    ):
        await post(writer, b"/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True})
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            for _ in range(2):
                await reader.readuntil(sse.COMMENT)
            core.gate.release()
            assert b"data: " in await reader.readuntil(sse.COMMENT)
            for _ in range(100):
                core.gate.release()
            said = await reader.readuntil(b"data: [DONE]")
    text = b"".join(line for line in said.splitlines() if line.startswith(b"data: {"))
    assert text.count(b'"finish_reason":"stop"') + text.count(b'"finish_reason":"length"') == 1


async def test_what_fails_after_a_comment_is_an_event_and_no_end(tiny: Text, clock: ManualClock) -> None:
    core = Waiting(tiny, gate=asyncio.Semaphore(0), error=Overloaded("the queue is full"))
    async with connected(OpenAi(make_edge(tiny, core, clock=clock), 10_000, lambda: 0.0, 0.01).app()) as (
        reader,
        writer,
    ):
        await post(writer, b"/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True})
        async with asyncio.timeout(10):
            await reader.readuntil(sse.COMMENT)
            core.gate.release()
            await reader.readuntil(b'data: {"error":')
            said = await reader.readuntil(b"\r\n0\r\n")
    assert b"the queue is full" in said
    assert b"[DONE]" not in said


async def test_a_client_that_hangs_up_before_its_request_is_whole_is_no_failure(
    tiny: Text, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    app = OpenAi(make_edge(tiny, Scripted(tiny), clock=clock), 10_000, lambda: 0.0).app()
    ended = asyncio.Event()

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            ended.set()

    async with connected(watched) as (reader, writer):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: router\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
        )
        assert b"100 Continue" in await asyncio.wait_for(reader.readline(), 10)
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 10)
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
