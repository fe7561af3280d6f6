"""Links whose source takes part: requests and epochs over a pair's control channel, blocks in messages that something else
carries, gathered at the source and scattered at the target.

The target asks for a piece of some blocks at the epochs it was told. The source says at which they are and, when these
are what was asked for, gathers and sends the blocks in messages of bounded size, and then says at which they are now. The
target, which alone writes its pool, checks for itself. All messages come, even where a block changed hands meanwhile: both
ends know how many there are, and say nothing between them.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor

from headrace.errors import IncompatiblePeer
from workers.kv.layout import Piece
from workers.kv.links.base import BlockPull
from workers.kv.links.closing import Closing
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.pair import Message, Pair, reach
from workers.kv.links.terms import ReadHook, Terms, check_epochs, check_read
from workers.kv.pool import KvPool

SOURCE, TARGET = 0, 1

Sent = Any  # what a carrier knows a message by that is under way


class Carrier(Protocol):
    """Moves the messages of one link at one of its ends, `depth` of them at once; formed and used by one thread. What it
    does not finish raises LinkClosed, at once when the pair closes. Reads and writes may be under way when the call
    returns."""

    @property
    def depth(self) -> int: ...

    def read(self, blocks: Sequence[int], piece: Piece) -> Tensor:
        """The source's part of a message, to be sent: it stays as it is until `depth` + 1 more are read."""
        ...

    def send(self, content: Tensor) -> Sent:
        """Once it has been read."""
        ...

    def receive(self, num_blocks: int, piece: Piece) -> tuple[Tensor, Sent]:
        """Room for a message, and its coming. It stays as it is until `depth` + 1 more are received."""
        ...

    def finish(self, sent: Sent) -> None:
        """Returns when the message is there, or is gone."""
        ...

    def write(self, targets: Sequence[int], piece: Piece, content: Tensor) -> None:
        """Into the pool."""
        ...

    def settle(self) -> None:
        """Returns when nothing is read from the pool or written into it any more."""
        ...


# Given the pair and which end this is; blocks until the other end is there.
MakeCarrier = Callable[[Pair, int], Carrier]


def parts(num_blocks: int, block_bytes: int, message_bytes: int) -> Iterator[slice]:
    """The blocks of each message; both ends cut alike."""
    step = max(1, message_bytes // block_bytes)
    return (slice(first, min(first + step, num_blocks)) for first in range(0, num_blocks, step))


class StagedSource:
    """What the source's end of a link does; shared by all links that read `pool`."""

    def __init__(self, pool: KvPool, make: MakeCarrier, message_bytes: int, hook: ReadHook | None) -> None:
        self._pool = pool
        self._make = make
        self._message_bytes = message_bytes
        self._hook = hook

    def answer(self, pair: Pair, first: Message) -> None:
        terms = Terms.of(self._pool)
        pair.send(asdict(terms))
        terms.check(first)
        carrier = self._make(pair, SOURCE)
        while True:
            self._read(pair, carrier, pair.next(None))

    def _read(self, pair: Pair, carrier: Carrier, request: Message) -> None:
        piece = Piece(**request["piece"])
        blocks: list[int] = request["blocks"]
        asked: list[int] = request["epochs"]
        check_read(self._pool.slab, self._pool.num_blocks, piece, blocks)
        epochs = self._epochs(blocks)
        pair.send({"epochs": epochs})
        if epochs != asked:
            return
        sending: deque[Sent] = deque()
        with contextlib.ExitStack() as settled:
            settled.callback(carrier.settle)
            for part in parts(len(blocks), piece.num_bytes(self._pool.slab), self._message_bytes):
                content = carrier.read(blocks[part], piece)
                if self._hook is not None:
                    carrier.settle()
                    for index in range(part.start, part.stop):
                        self._hook(index)
                if len(sending) == carrier.depth:
                    carrier.finish(sending.popleft())
                sending.append(carrier.send(content))
        pair.send({"epochs": self._epochs(blocks)})
        while sending:
            carrier.finish(sending.popleft())

    def _epochs(self, blocks: Sequence[int]) -> list[int]:
        found: list[int] = self._pool.epochs[blocks].tolist()
        return found


class StagedTransport:
    """The target's end."""

    def __init__(
        self,
        scheme: str,
        where: Endpoint,
        pool: KvPool,
        seconds: float,
        make: MakeCarrier,
        message_bytes: int,
        *,
        dear: bool = False,
    ) -> None:
        """`dear`: to keep; such a link closes when nobody pulls over it."""
        self.dear = dear
        self._scheme = scheme
        self._where = where
        self._pool = pool
        self._seconds = seconds
        self._make = make
        self._message_bytes = message_bytes
        self._carrier: Carrier | None = None

    def form(self, closing: Closing) -> None:
        where, terms = self._where, Terms.of(self._pool)
        self._pair = Pair(reach(where.host, where.port, where.token, self._seconds, closing), closing)
        self._pair.send({"scheme": self._scheme, **asdict(terms)})
        terms.check(self._pair.next(self._seconds))
        self._carrier = self._make(self._pair, TARGET)

    def await_step(self, step: int) -> None:
        raise IncompatiblePeer(f"{self._scheme} awaits no steps, was asked for plan {step}", field="after_step")

    def transfer(self, blocks: Sequence[BlockPull], piece: Piece) -> int:
        asked = [block.epoch for block in blocks]
        targets = [block.target for block in blocks]
        self._pair.send({"piece": asdict(piece), "blocks": [block.source for block in blocks], "epochs": asked})
        assert self._carrier is not None
        carrier, block_bytes = self._carrier, piece.num_bytes(self._pool.slab)
        check_epochs(blocks, self._pair.next(self._seconds)["epochs"])
        coming: deque[tuple[slice, Tensor, Sent]] = deque()

        def take() -> None:
            part, content, sent = coming.popleft()
            carrier.finish(sent)
            carrier.write(targets[part], piece, content)

        with contextlib.ExitStack() as settled:
            settled.callback(carrier.settle)
            for part in parts(len(blocks), block_bytes, self._message_bytes):
                if len(coming) == carrier.depth:  # written while the next one is on its way
                    take()
                coming.append((part, *carrier.receive(part.stop - part.start, piece)))
            while coming:
                take()
        check_epochs(blocks, self._pair.next(self._seconds)["epochs"])
        return block_bytes * len(blocks)

    def release(self) -> None:
        """The pair closes with the link. Staging goes here: the link itself may be kept until somebody pulls again."""
        self._carrier = None
