"""HTTP connections whose other end may not hold what it does not use: a head is bounded in bytes, and so is the time in
which nothing comes of a request, or nothing is read of an answer.

The server below bounds none of these, and forgets the running request of a client that hangs up with another one
already on its way (pipelined).
"""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.errors import ConfigError

MAX_HEAD_BYTES = 64 * 2**10
SENDS_NOTHING_SECONDS = 60.0
READS_NOTHING_SECONDS = 60.0

CERTIFICATE_SHOWN = "headrace.certificate"  # in the scope of a request: its client showed one, and it is right

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """One connection. Bytes that bring a request no further (a head that does not end, trailers) are counted, and the
    time since it last came further is kept; while it is idle the keep-alive time is the bound."""

    _num_quiet_bytes = 0
    _came_further = False
    _is_under_way = False
    _patience: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _running: Any = None
    _certificate_shown = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        ssl_object = transport.get_extra_info("ssl_object")
        self._certificate_shown = bool(ssl_object is not None and ssl_object.getpeercert())
        self._patience = self.loop.call_later(self.timeout_keep_alive, self._lose_patience)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_patience()
        self._forget_unread()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    # -- what comes

    def data_received(self, data: bytes) -> None:
        self._came_further = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._came_further:
            self._num_quiet_bytes = 0
            self._be_patient()
        elif self._is_under_way:
            self._num_quiet_bytes += len(data)
            if self._num_quiet_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CERTIFICATE_SHOWN] = self._certificate_shown
        self._is_under_way = True
        self._be_patient()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._came_further = True

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._came_further = True

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._came_further = True
        self._is_under_way = False

    def _be_patient(self) -> None:
        self._forget_patience()
        if self._is_under_way:
            self._patience = self.loop.call_later(SENDS_NOTHING_SECONDS, self._lose_patience)

    def _lose_patience(self) -> None:
        if self.flow.read_paused:  # it is not the client who keeps us waiting
            self._be_patient()
        else:
            self.transport.abort()

    def _forget_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    # -- what goes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(READS_NOTHING_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def timeout_keep_alive_handler(self) -> None:
        """What waits to be read would keep a closing connection open."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)


class HttpServer(uvicorn.Server):
    """Leaves the signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, key: str) -> socket.socket:
    """ConfigError, which names `key`, when the port is taken, or `host` is no address of this machine; 0 takes any free
    port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # A name that nobody knows has one of getaddrinfo's numbers, below 0; what it raised is not a gaierror any more.
        elsewhere = error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0
        why = f"{host} is no address of this machine" if elsewhere else os.strerror(error.errno or 0)
        raise ConfigError(f"{key}: cannot listen on {host}:{port}: {why}", key=key, value=port) from error


def http_config(
    app: ASGIApp, keep_alive_seconds: int, close_seconds: int, context: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """Of a server on the loop that runs. Idle connections are to be kept longer than clients keep them: whoever closes
    first must be the client."""
    return uvicorn.Config(
        app,
        loop="none",
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=keep_alive_seconds,
        timeout_graceful_shutdown=close_seconds,
        ssl_context_factory=None if context is None else lambda *_: context,
    )
