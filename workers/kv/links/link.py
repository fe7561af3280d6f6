"""What all links are, whatever moves their bytes: formed by the first pull, one pull at a time, closed once for good."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from headrace.errors import HeadraceError, StaleBlocks
from workers.kv.layout import Piece
from workers.kv.links.base import BlockPull, PullReceipt
from workers.kv.links.closing import Closing


class Transport(Protocol):
    """How the bytes of one link come here. All of it is called by one thread at a time. `dear`: a formed one holds memory
    that is missed elsewhere."""

    @property
    def dear(self) -> bool: ...

    def form(self, closing: Closing) -> None:
        """Once, before the first transfer. Ends at once when `closing` closes; IncompatiblePeer, LinkClosed."""
        ...

    def await_step(self, step: int) -> None:
        """Returns when the source has written all that its plan `step` writes. As transfer."""
        ...

    def begin(self, blocks: Sequence[BlockPull], piece: Piece) -> Callable[[], int]:
        """Starts what waits for nothing. The function returned is called next, by the same thread, and ends it: the bytes
        moved. As KvLink.begin; any other error closes the link."""
        ...

    def release(self) -> None:
        """Once, after form was called, when the link is closed and neither form nor transfer is under way."""
        ...


class Link:
    """A KvLink over a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._turn = threading.Lock()  # whoever holds it may use the transport
        self._closing = Closing()
        self._closing.on_close(self._release)
        self._formed = False

    @property
    def closed(self) -> bool:
        return self._closing.closed

    def close(self) -> None:
        self._closing.close("closed from this side")

    def rest(self) -> None:
        if self._transport.dear and self._formed:
            self._closing.close("nobody pulled for a while")

    def pull(self, blocks: Sequence[BlockPull], piece: Piece, after_step: int = 0) -> PullReceipt:
        return self.begin(blocks, piece, after_step)()

    def begin(self, blocks: Sequence[BlockPull], piece: Piece, after_step: int = 0) -> Callable[[], PullReceipt]:
        self._turn.acquire()
        try:
            with self._closed_by_failure():
                began, rest = self._begin(blocks, piece, after_step)
        except BaseException:
            self._end_turn()
            raise

        def end() -> PullReceipt:
            try:
                with self._closed_by_failure():
                    num_bytes = rest()
            finally:
                self._end_turn()
            if self._closing.closed:
                raise self._closing.error()
            return PullReceipt(len(blocks), num_bytes, time.perf_counter() - began)

        return end

    def _begin(self, blocks: Sequence[BlockPull], piece: Piece, after_step: int) -> tuple[float, Callable[[], int]]:
        began = time.perf_counter()
        if self._closing.closed:
            raise self._closing.error()
        if not self._formed:
            self._formed = True
            self._transport.form(self._closing)
        if after_step:
            self._transport.await_step(after_step)
            began = time.perf_counter()
        return began, self._transport.begin(blocks, piece)

    @contextlib.contextmanager
    def _closed_by_failure(self) -> Iterator[None]:
        """Stale blocks are none."""
        try:
            yield
        except StaleBlocks:
            raise
        except HeadraceError as error:
            self._closing.close(str(error))
            raise
        except Exception as error:
            self._closing.close(f"{type(error).__name__}: {error}")
            raise self._closing.error() from error

    def _end_turn(self) -> None:
        self._turn.release()
        if self._closing.closed:
            self._release()

    def _release(self) -> None:
        """On whichever thread finds the link closed and the transport unused: the one that closes, or the one that
        pulled meanwhile, which looks after it has given its turn back."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            formed, self._formed = self._formed, False
            if formed:
                self._transport.release()
        finally:
            self._turn.release()
