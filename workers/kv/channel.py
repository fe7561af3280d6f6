"""An authenticated, ordered stream of byte frames between two processes that share a secret, over TCP.

Used between the ranks of one worker, and between the ranks of a pair of workers that share KV. The death of a process
is the end of its streams, so that its peers notice at once; keep-alive finds a host that is gone. A host that begins with
"@" names an abstract Unix socket instead: of this machine and network namespace alone, gone with its process, and able to
carry open files.
"""

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from headrace.errors import Unauthenticated

MAX_FRAME_BYTES = 2**28
NONCE_BYTES = 32
HANDSHAKE_SECONDS = 5.0
UNIX = "@"

_LENGTH = struct.Struct("<I")


class ChannelClosed(ConnectionError):
    """The other end is gone, or this one was closed."""


class Channel:
    """One end of a stream. Any thread may send and close; one thread receives. Closing wakes them all."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
                if option := getattr(socket, name, None):
                    stream.setsockopt(socket.IPPROTO_TCP, option, value)
        self.local_host = str(stream.getsockname()[0]) if stream.family != socket.AF_UNIX else ""

    def send(self, frame: bytes) -> None:
        """The whole frame, or ChannelClosed. May block while the other end does not read."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame must be at most {MAX_FRAME_BYTES} bytes, got {len(frame)}")
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
        """The next frame, or ChannelClosed."""
        try:
            with self._receiving:
                (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
                if length > max_bytes:
                    raise ChannelClosed(f"a frame must be at most {max_bytes} bytes, got {length}")
                return self._exactly(length)
        except OSError as error:
            raise error if isinstance(error, ChannelClosed) else ChannelClosed(str(error)) from error

    def send_descriptors(self, frame: bytes, descriptors: Sequence[int]) -> None:
        """A frame and open files with it, of which the other end gets its own; over a Unix socket alone."""
        try:
            with self._sending:
                socket.send_fds(self._socket, [_LENGTH.pack(len(frame)) + frame], descriptors)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive_descriptors(self, count: int, seconds: float) -> tuple[bytes, list[int]]:
        """What send_descriptors sent: the caller closes the descriptors. ChannelClosed when it is something else, or
        nothing within `seconds`."""
        descriptors: list[int] = []
        try:
            with self._receiving:
                self._socket.settimeout(seconds)
                length, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, count)
                if len(length) != _LENGTH.size or len(descriptors) != count:
                    raise ChannelClosed(f"wanted a frame and {count} descriptors, got {len(descriptors)}")
                frame = self._exactly(min(*_LENGTH.unpack(length), MAX_FRAME_BYTES))
                self._socket.settimeout(None)
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise error if isinstance(error, ChannelClosed) else ChannelClosed(str(error)) from error
        return frame, descriptors

    def _exactly(self, length: int) -> bytes:
        frame = bytearray(length)
        view = memoryview(frame)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise ChannelClosed("the other end closed")
            view = view[count:]
        return bytes(frame)

    def close(self) -> None:
        """Idempotent. Whoever sends or receives, on either end, gets ChannelClosed."""
        with contextlib.suppress(OSError):  # already shut down, or the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        # Nobody is inside a system call on the descriptor when its number becomes free for others.
        with self._sending, self._receiving:
            self._socket.close()

    def authenticate(self, token: str, *, accepting: bool, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Both ends prove that they know the token, without sending it. Unauthenticated when the other does not;
        ChannelClosed when it is silent for `seconds`."""
        deadline = time.monotonic() + seconds
        mine = secrets.token_bytes(NONCE_BYTES)
        self.send(mine)
        theirs = self._before(deadline, NONCE_BYTES)
        self.send(_proof(token, accepting, mine, theirs))
        if not hmac.compare_digest(self._before(deadline, NONCE_BYTES), _proof(token, not accepting, theirs, mine)):
            raise Unauthenticated("the other end of the channel does not know the token")
        self._socket.settimeout(None)

    def _before(self, deadline: float, max_bytes: int) -> bytes:
        self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        return self.receive(max_bytes)


def _proof(token: str, accepting: bool, own_nonce: bytes, other_nonce: bytes) -> bytes:
    side = b"accept" if accepting else b"connect"
    return hmac.digest(token.encode(), side + own_nonce + other_nonce, "sha256")


def connect(host: str, port: int, token: str, seconds: float = HANDSHAKE_SECONDS) -> Channel:
    """A channel to a Listener; ChannelClosed or Unauthenticated, within about 2 × `seconds`."""
    try:
        channel = Channel(_reach(host, port, seconds))
    except OSError as error:
        raise ChannelClosed(f"cannot reach {host}:{port}: {error}") from error
    try:
        channel.authenticate(token, accepting=False, seconds=seconds)
    except (ChannelClosed, Unauthenticated):
        channel.close()
        raise
    return channel


def _reach(host: str, port: int, seconds: float) -> socket.socket:
    if not host.startswith(UNIX):
        return socket.create_connection((host, port), timeout=seconds)
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.settimeout(seconds)
        stream.connect(_abstract(host))
    except OSError:
        stream.close()
        raise
    return stream


def _listen(host: str) -> socket.socket:
    if not host.startswith(UNIX):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=64)
    stream = socket.socket(socket.AF_UNIX)
    stream.bind(_abstract(host))
    stream.listen(64)
    return stream


def _abstract(host: str) -> str:
    return "\0" + host.removeprefix(UNIX)


class Listener:
    """Accepts channels of those who know the token. Each is given to `serve` on a thread of its own, which owns it.

    The accepting thread is the listener's; close() ends it, and no channel.
    """

    def __init__(self, host: str, token: str, serve: Callable[[Channel], None]) -> None:
        if not token:
            raise ValueError("a listener's token must not be empty")
        self._socket = _listen(host)
        self._wake, self._stop = socket.socketpair()
        self.host = host
        self.port = 0 if host.startswith(UNIX) else int(self._socket.getsockname()[1])
        self._token = token
        self._serve = serve
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name=f"accept:{self.port}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with self._socket, self._wake:
            while self._wake not in wait([self._socket, self._wake]):
                try:
                    stream, _ = self._socket.accept()
                except OSError:
                    continue  # the caller gave up between knocking and being let in
                threading.Thread(target=self._admit, args=(stream,), name=f"serve:{self.port}", daemon=True).start()

    def _admit(self, stream: socket.socket) -> None:
        channel = Channel(stream)
        try:
            channel.authenticate(self._token, accepting=True)
        except (ChannelClosed, Unauthenticated):
            channel.close()
            return
        self._serve(channel)

    def close(self) -> None:
        """Idempotent."""
        with self._closing:
            self._stop.close()
            self._thread.join()
