"""The HTTP client: events cut anywhere, and real sockets to servers that behave and that do not."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import (
    ConfigError,
    HeadraceError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from headrace.traces import Prompts, TraceRow
from loadtests.open_loop.answers import Answer, Ask, Outcome, asks
from loadtests.open_loop.client import OwnLimit, Unreachable
from loadtests.open_loop.http_client import Events, HttpClient, http_client
from loadtests.open_loop.loop import run
from loadtests.paced_server import Pace, Stream

BODY = (
    b": a comment\n\n"
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    b'data: {"choices":[{"index":0,"text":""}]}\r\n\r\n'
    b'event: message\ndata:{"choices":[{"index":0,"text":"b\\n\\nc","finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":'
    b'{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
    b"data: [DONE]\n\n"
)
ASK = Ask(0, 0.0, (1, 2, 3), 4)


def answer() -> Answer:
    return Answer(0, 0.0, lambda: 1.0)


@given(st.lists(st.integers(0, len(BODY)), max_size=12))
def test_events_are_the_same_wherever_the_wire_cuts_them(cuts: list[int]) -> None:
    heard = answer()
    events = Events(heard)
    ends = [0, *sorted(cuts), len(BODY)]
    for start, end in pairwise(ends):
        events.feed(BODY[start:end])
    assert events.done
    assert len(heard.times) == 3, "the last has a reason and no token"
    assert (heard.num_tokens, heard.prompt_tokens, heard.cached_tokens) == (4, 9, 2)


@pytest.mark.parametrize(
    ("event", "message"),
    [(b'{"error":{"message":"worker lost"}}', "worker lost"), (b"<html>", "sent what is no JSON: b'<html>'")],
)
def test_an_error_in_a_stream_is_raised(event: bytes, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        Events(answer()).feed(b"data: " + event + b"\n\n")


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http:///v1"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url: must be http://HOST:PORT"):
        HttpClient(url)


@asynccontextmanager
async def paced() -> AsyncIterator[str]:
    pace = Pace(token_seconds=0.002)
    server = await asyncio.get_running_loop().create_server(lambda: Stream(pace), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def saying(
    reply: bytes, then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
) -> AsyncIterator[str]:
    """A server that answers everything with these bytes, and closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: " in head:
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def reply(status: int, body: object, kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d x\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        kind.encode(),
        len(data),
        data,
    )


async def test_many_streams_are_heard_whole_and_connections_are_used_again() -> None:
    rows = [TraceRow(0, at * 0.001, 5, 6) for at in range(60)]
    async with paced() as url, http_client(url) as client:
        served = await client.served()
        found = await run(asks(rows, Prompts(400)), client)
        num_connections = len(client._idle)
        await client.prepare(ASK)(answer())
        assert len(client._idle) == num_connections <= 60
    assert (served.model, served.max_context_tokens) == ("paced", 1 << 20)
    assert [(one.outcome, one.num_tokens, len(one.times), one.prompt_tokens) for one in found.answers] == [
        (Outcome.FINISHED, 6, 6, 5)
    ] * 60
    assert all(one.due <= one.sent <= one.times[0] <= one.times[-1] <= one.ended for one in found.answers)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (reply(429, {"error": {"message": "the queue is full"}}), Overloaded, "HTTP 429: the queue is full"),
        (reply(503, {"detail": "no workers"}), Unavailable, "HTTP 503: no workers"),
        (reply(400, {"message": "max_tokens is too large"}), InvalidRequest, "max_tokens is too large"),
        (reply(502, b"<html>bad gateway", "text/html"), InternalError, "HTTP 502: <html>bad gateway"),
        (reply(200, b"data: {}\n\n", "text/event-stream"), InternalError, "ended without"),
        (b"220 mail.example ESMTP\r\n", InternalError, "does not speak HTTP"),
        (b"", Unreachable, "the connection broke"),
    ],
)
async def test_what_a_server_says_is_the_error(said: bytes, error: type[HeadraceError], message: str) -> None:
    async with saying(said) as url, http_client(url, model="m") as client:
        with pytest.raises(error, match=message) as caught:
            await client.prepare(ASK)(answer())
    assert type(caught.value) is error


async def test_a_model_that_is_not_served_is_named() -> None:
    async with paced() as url, http_client(url, model="other") as client:
        with pytest.raises(ModelNotFound, match="model must be one of paced, got 'other'"):
            await client.served()


async def test_nobody_there_is_said_with_the_address(unused_tcp_port: int) -> None:
    async with http_client(f"http://127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(Unreachable, match=f"no server answers at 127.0.0.1:{unused_tcp_port}"):
            await client.served()


async def test_this_machines_own_limit_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would else be counted against the server, request by request."""

    async def no_more(*arguments: object, **named: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with paced() as url, http_client(url) as client:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", no_more)
        with pytest.raises(OwnLimit, match=r"open no more connections: .*Too many open files, at [123] streams"):
            await run(asks([TraceRow(0, 0.0, 5, 6)] * 3, Prompts(400)), client)


async def test_a_request_given_up_closes_its_connection() -> None:
    async with paced() as url, http_client(url) as client:
        found = await run([Ask(0, 0.0, (1,), 10_000)], client, timeout_seconds=0.05)
        assert client._idle == []
    assert found.answers[0].outcome is Outcome.TIMED_OUT
