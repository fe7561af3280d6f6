"""Any server that speaks OpenAI's completions with server-sent events: a connection a stream, idle ones used again.

httpx costs 0.1 ms an event; a parser in C on a bare transport holds thousands of streams on one core.
"""

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from headrace.errors import (
    ConfigError,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from headrace.tls import ClientTls
from loadtests.open_loop.answers import Answer, Ask
from loadtests.open_loop.client import Call, OwnLimit, Served, Unreachable, chosen

CONNECT_SECONDS = 10.0
KEEP_SECONDS = 2.0  # servers close idle connections after 5 s and more; one that is about to be closed is not used
OWN_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
BY_STATUS: dict[int, type[HeadraceError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    403: Unauthenticated,
    404: ModelNotFound,
    408: DeadlineExceeded,
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}


class Events:
    """The body of one answer as it comes; tells an Answer of its tokens. Touches no wire."""

    def __init__(self, answer: Answer) -> None:
        self.done = False
        self._answer = answer
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """HeadraceError where the server says that it fails."""
        rest = self._rest + data if self._rest else data
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *events, self._rest = rest.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._take(line[5:].strip())

    def _take(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            said: dict[str, Any] = json.loads(payload)
        except ValueError:
            raise InternalError(f"the server sent what is no JSON: {payload[:80]!r}") from None
        if said.get("error"):
            raise InternalError(_message(said))
        if choices := said.get("choices"):
            (choice, *_) = choices
            # The last event of some servers has a reason and no token; a token in the middle may have no text yet.
            if choice.get("text") or not choice.get("finish_reason"):
                self._answer.hear(1)
        if usage := said.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self._answer.count(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, cached)


class Connection(asyncio.Protocol):
    """One connection; it owns the answer that is under way on it, and takes the next when that is over."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._events: Events | None = None
        self._ended: asyncio.Future[bytes] | None = None
        self._plain: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._free_at = 0.0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def fresh(self) -> bool:
        return self.open and asyncio.get_running_loop().time() - self._free_at < KEEP_SECONDS

    async def exchange(self, request: bytes, events: Events | None) -> tuple[int, bytes]:
        """(status, the body where it was not given to `events`). Left early, it closes the connection."""
        assert self._transport is not None
        self._events, self._plain = events, []
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            body = await self._ended
            return int(self._parser.get_status_code()), body
        except BaseException:
            self.close()
            raise
        finally:
            self._events = self._ended = None
            self._free_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's and the parser's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._fail(
                cause if isinstance(cause, HeadraceError) else InternalError(f"an answer that breaks: {cause!r}")
            )
        except httptools.HttpParserError as error:
            self._fail(InternalError(f"the server does not speak HTTP: {error}"))

    def on_body(self, data: bytes) -> None:
        if self._events is not None and self._parser.get_status_code() == 200:
            self._events.feed(data)
        else:
            self._plain.append(data)

    def on_message_complete(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(b"".join(self._plain))
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(Unreachable(f"the connection broke{f': {exc}' if exc else ''}"))

    def _fail(self, error: HeadraceError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


class HttpClient:
    """Owns its connections. `url` is the server's, with or without /v1."""

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, tls: ClientTls | None = None
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError.out_of_range("url", url, "http://HOST:PORT or https://HOST")
        tls = tls or ClientTls()
        self._tls = tls.context() if parts.scheme == "https" else None
        self._server_name = tls.server_name if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n" + (
            f"authorization: Bearer {api_key}\r\n" if api_key else ""
        )
        self._model = model
        self._idle: list[Connection] = []

    async def served(self) -> Served:
        head = f"GET {self._prefix}/models HTTP/1.1\r\n{self._headers}\r\n"
        status, body = await self._exchange(head.encode(), None)
        models = _parsed(status, body).get("data") or []
        found = chosen([Served(str(model.get("id")), model.get("max_model_len") or 0) for model in models], self._model)
        self._model = found.model
        return found

    def prepare(self, ask: Ask) -> Call:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": ask.prompt,
                "max_tokens": ask.max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            separators=(",", ":"),
        ).encode()
        head = f"POST {self._prefix}/completions HTTP/1.1\r\n{self._headers}content-type: application/json\r\n"
        return partial(self._stream, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _stream(self, request: bytes, answer: Answer) -> None:
        events = Events(answer)
        status, body = await self._exchange(request, events)
        if status != 200:
            _parsed(status, body)
        if not events.done:
            raise InternalError(f"the answer ended without [DONE], after {answer.num_tokens} tokens")

    async def _exchange(self, request: bytes, events: Events | None) -> tuple[int, bytes]:
        connection = await self._connection()
        found = await connection.exchange(request, events)
        if connection.open:
            self._idle.append(connection)
        return found

    async def _connection(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).fresh:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=self._tls, server_hostname=self._server_name
                )
        except (OSError, TimeoutError) as error:
            if isinstance(error, OSError) and error.errno in OWN_ERRNOS:
                raise OwnLimit(f"this machine lets the load generator open no more connections: {error}") from error
            reason = str(error) or f"not within {CONNECT_SECONDS:g} s"
            raise Unreachable(f"no server answers at {self._host}:{self._port}: {reason}") from error
        return connection


@asynccontextmanager
async def http_client(
    url: str, *, model: str | None = None, api_key: str | None = None, tls: ClientTls | None = None
) -> AsyncIterator[HttpClient]:
    client = HttpClient(url, model, api_key, tls)
    try:
        yield client
    finally:
        client.close()


def _parsed(status: int, body: bytes) -> dict[str, Any]:
    """The body as JSON; for a status other than 200 the error that it means."""
    try:
        found = json.loads(body)
    except ValueError:
        found = {"error": {"message": body[:200].decode(errors="replace")}}
    if not isinstance(found, dict):
        raise InternalError(f"HTTP {status}: {str(found)[:200]}")
    if status != 200:
        raise BY_STATUS.get(status, InternalError)(f"HTTP {status}: {_message(found)}")
    return found


def _message(said: dict[str, Any]) -> str:
    """Servers differ in where they put it."""
    error = said.get("error") or said.get("detail") or said
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
