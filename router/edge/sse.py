"""Answers that end when their client goes away (Starlette watches for that in streams alone; here every answer does), and
streams of events that are never silent for long."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive, Scope, Send

Work = Callable[[Send], Awaitable[None]]

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"
COMMENT = b": the answer goes on\n\n"


class Answer:
    """An ASGI response that `work` writes. When the client disconnects first, `work` is cancelled, and has released
    what it held by the time the call returns."""

    def __init__(self, work: Work) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()


class Events:
    """The events of one answer, begun with its first. Owned by the answer's task; what says nothing for `quiet_seconds` (0:
    however long) says a comment, so that nothing between router and client takes the connection for dead.

    One thing at a time is under way to the client: what is said waits for a comment, and no comment begins beside it. A
    client that stops reading would otherwise be told a comment ahead of the head of its answer, or have it cut."""

    def __init__(self, send: Send, quiet_seconds: float) -> None:
        self._send = send
        self._quiet_seconds = quiet_seconds
        self._loop = asyncio.get_running_loop()
        self._said_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self._saying = False
        self.begun = False

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """What fails inside leaves a comment that is under way to itself: end() waits for it. Who is cancelled has nobody
        left to say it to."""
        if self._quiet_seconds:
            self._timer = self._loop.call_later(self._quiet_seconds, self._look)
        try:
            yield
        except asyncio.CancelledError:
            if self._comment is not None:
                self._comment.cancel()
            raise
        finally:
            self._let_be()

    async def begin(self) -> None:
        """Before the first event, where no comment has begun the answer."""
        self.begun = self._saying = True
        await start(self._send)
        self._saying = False

    async def say(self, data: bytes) -> None:
        self._saying = True
        if self._comment is not None:
            await self._commented()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._said_at = self._loop.time()
        self._saying = False

    async def end(self, data: bytes) -> None:
        self._let_be()
        await self._commented()
        await end(self._send, data)

    def _look(self) -> None:
        left = self._said_at + self._quiet_seconds - self._loop.time()
        if left <= 0:
            left = self._quiet_seconds
            if not self._saying and (self._comment is None or self._comment.done()):
                self._comment = asyncio.ensure_future(self._say_nothing(with_head=not self.begun))
                self.begun = True
        self._timer = self._loop.call_later(left, self._look)

    async def _say_nothing(self, *, with_head: bool) -> None:
        if with_head:
            await start(self._send)
        await write(self._send, COMMENT)

    async def _commented(self) -> None:
        """Nothing is said in the middle of a comment, nor after an end."""
        comment, self._comment = self._comment, None
        if comment is not None:
            await comment

    def _let_be(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def start(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})


async def write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
