"""Links whose source takes part: requests and epochs over a pair's control channel, blocks in messages that something else
carries, gathered at the source and scattered at the target.

The target asks for a piece of some blocks at the epochs it was told, and awaits the first messages at once. The source
says at which epochs they are, gathers and sends the blocks in messages of bounded size, and then says at which they are
now. The target, which alone writes its pool, checks for itself, and writes nothing before it knows the first. Where
these are not what was asked for, only those messages come that are awaited already, and are dropped. Where a block
changes hands later all come: both ends know how many there are, and say nothing between them.
"""

import contextlib
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn, Protocol

from torch import Tensor

from headrace.errors import IncompatiblePeer, StaleBlocks
from workers.kv.layout import Piece
from workers.kv.links.base import BlockPull
from workers.kv.links.closing import Closing
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.pair import Message, Pair, Taken, reach
from workers.kv.links.terms import ReadHook, Terms, check_epochs, check_read
from workers.kv.pool import KvPool

SOURCE, TARGET = 0, 1

Sent = Any  # what a carrier knows a message by that is under way


@dataclass(frozen=True, slots=True)
class Cut:
    """How a read is cut into messages, on both ends alike, and how many of them are under way at once."""

    message_bytes: int
    depth: int

    def parts(self, num_blocks: int, block_bytes: int) -> list[slice]:
        """The blocks of each message. A message has one block at least."""
        step = max(1, self.message_bytes // block_bytes)
        return [slice(first, min(first + step, num_blocks)) for first in range(0, num_blocks, step)]

    @property
    def told(self) -> Message:
        """With how a request holds its numbers: ends that hold them otherwise refuse each other before there is one."""
        return {**asdict(self), "numbers": "packed"}

    def check(self, theirs: Message) -> None:
        if theirs.get("cut") != self.told:
            raise IncompatiblePeer(f"cut must be {self.told} as it is here, got {theirs.get('cut')}", field="cut")


class Carrier(Protocol):
    """Moves the messages of one link at one of its ends, `depth` of its cut at once; used by one thread at a time. What it
    does not finish raises LinkClosed, at once when the pair closes; nothing else waits for the peer. Reads and writes may
    be under way when the call returns."""

    def begin(self, blocks: Sequence[int], piece: Piece) -> None:
        """The blocks at this end of what is moved next, of which parts are asked for; the last read has settled."""
        ...

    def read(self, part: slice) -> Tensor:
        """The source's part of a message, to be sent: it stays as it is until `depth` more are read, before the last of
        which it has been finished."""
        ...

    def send(self, content: Tensor) -> Sent:
        """Once it has been read."""
        ...

    def receive(self, part: slice) -> tuple[Tensor, Sent]:
        """Room for a message, and its coming. It stays as it is until `depth` more are received, before the last of which
        it has been finished, and written where it is to be."""
        ...

    def finish(self, sent: Sent) -> None:
        """Returns when the message is there, or is gone."""
        ...

    def write(self, part: slice, content: Tensor) -> None:
        """Into the pool."""
        ...

    def settle(self) -> None:
        """Returns when nothing is read from the pool or written into it any more."""
        ...


# Given the pair and which end this is; blocks until the other end is there.
MakeCarrier = Callable[[Pair, int], Carrier]


class StagedSource:
    """What the source's end of a link does; shared by all links that read `pool`."""

    def __init__(self, pool: KvPool, make: MakeCarrier, cut: Cut, hook: ReadHook | None) -> None:
        self._pool = pool
        self._make = make
        self._cut = cut
        self._hook = hook

    def answer(self, pair: Pair, first: Message) -> None:
        """Requests begin on the thread that reads them: another one would be woken at the cost of a third of a message.
        A peer that has several open, which ours never has, is answered in their order."""
        terms = Terms.of(self._pool)
        pair.send({"cut": self._cut.told, **asdict(terms)})
        terms.check(first)
        self._cut.check(first)
        carrier: Carrier | None = None
        counting, num_open = threading.Lock(), 0  # requests that have come and are not over

        def begun(request: Message) -> Taken:
            nonlocal num_open
            with counting:
                num_open += 1
                alone = num_open == 1
            # While one is open the carrier is the serving thread's, which begins the others behind it, in their order.
            if not alone or carrier is None or self._hook is not None:
                return request
            try:
                rest = self._begin(pair, carrier, request)
            except Exception as error:  # of the thread that serves
                return partial(_fail, error)
            if pair.closing.closed:  # nobody may be left to do the rest
                carrier.settle()
            return rest

        pair.take_with(begun)
        carrier = self._make(pair, SOURCE)
        try:
            while True:
                taken = pair.take(None)
                (self._begin(pair, carrier, taken) if isinstance(taken, dict) else taken)()
                with counting:
                    num_open -= 1
        finally:
            carrier.settle()

    def _begin(self, pair: Pair, carrier: Carrier, request: Message) -> Callable[[], None]:
        """What waits for nothing: the first messages are on their way. The function returned does the rest."""
        piece = Piece(**request["piece"])
        blocks, asked = _unpacked(request["blocks"]), _unpacked(request["epochs"])
        check_read(self._pool.slab, self._pool.num_blocks, piece, blocks)
        epochs, depth = self._epochs(blocks), self._cut.depth
        parts = self._cut.parts(len(blocks), piece.num_bytes(self._pool.slab))
        parts = parts if epochs == asked else parts[:depth]
        sending: deque[Sent] = deque()

        def send(part: slice) -> None:
            content = carrier.read(part)
            if self._hook is not None:
                carrier.settle()
                for index in range(part.start, part.stop):
                    self._hook(index)
            sending.append(carrier.send(content))
            if part.start == 0:  # said while the first message is on its way
                pair.send({"epochs": _packed(epochs)})

        def rest() -> None:
            with contextlib.ExitStack() as settled:
                settled.callback(carrier.settle)
                for part in parts[depth:]:
                    carrier.finish(sending.popleft())
                    send(part)
            pair.send({"epochs": _packed(self._epochs(blocks))})
            while sending:
                carrier.finish(sending.popleft())

        with settled_if_it_fails(carrier):
            carrier.begin(blocks, piece)
            for part in parts[:depth]:
                send(part)
        return rest

    def _epochs(self, blocks: Sequence[int]) -> list[int]:
        found: list[int] = self._pool.epochs.numpy()[blocks].tolist()  # a quarter of what it costs through torch
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
        cut: Cut,
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
        self._cut = cut
        self._carrier: Carrier | None = None

    def form(self, closing: Closing) -> None:
        where, terms = self._where, Terms.of(self._pool)
        self._pair = Pair(reach(where.host, where.port, where.token, self._seconds, closing), closing)
        self._pair.send({"scheme": self._scheme, "cut": self._cut.told, **asdict(terms)})
        theirs = self._pair.next(self._seconds)
        terms.check(theirs)
        self._cut.check(theirs)
        self._carrier = self._make(self._pair, TARGET)

    def await_step(self, step: int) -> None:
        raise IncompatiblePeer(f"{self._scheme} awaits no steps, was asked for plan {step}", field="after_step")

    def begin(self, blocks: Sequence[BlockPull], piece: Piece) -> Callable[[], int]:
        """The request, and the first messages awaited."""
        if not blocks:
            return int
        sources, asked, targets, _ = zip(*blocks, strict=True)
        self._pair.send({"piece": _told(piece), "blocks": _packed(sources), "epochs": _packed(asked)})
        assert self._carrier is not None
        carrier, block_bytes, depth = self._carrier, piece.num_bytes(self._pool.slab), self._cut.depth
        parts = self._cut.parts(len(blocks), block_bytes)
        coming: deque[tuple[slice, Tensor, Sent]] = deque()

        def await_one(part: slice) -> None:
            coming.append((part, *carrier.receive(part)))

        def take() -> None:
            part, content, sent = coming.popleft()
            carrier.finish(sent)
            carrier.write(part, content)

        def end() -> int:
            with contextlib.ExitStack() as settled:
                settled.callback(carrier.settle)
                try:
                    self._check_epochs(blocks)
                except StaleBlocks:
                    for *_, sent in coming:
                        carrier.finish(sent)
                    self._pair.next(self._seconds)  # the source's last word on a read that is none
                    raise
                for part in parts[depth:]:
                    take()
                    await_one(part)
                while coming:
                    take()
            self._check_epochs(blocks)
            return block_bytes * len(blocks)

        with settled_if_it_fails(carrier):
            carrier.begin(targets, piece)
            for part in parts[:depth]:
                await_one(part)
        return end

    def _check_epochs(self, blocks: Sequence[BlockPull]) -> None:
        """Against what the source says next."""
        check_epochs(blocks, _unpacked(self._pair.next(self._seconds)["epochs"]))

    def release(self) -> None:
        """The pair closes with the link. Staging goes here: the link itself may be kept until somebody pulls again."""
        self._carrier = None


@contextlib.contextmanager
def settled_if_it_fails(carrier: Carrier) -> Iterator[None]:
    """For the beginning of a read, whose end settles it otherwise."""
    try:
        yield
    except BaseException:
        carrier.settle()
        raise


def _fail(error: Exception) -> NoReturn:
    raise error


@lru_cache(maxsize=64)
def _told(piece: Piece) -> Message:
    return asdict(piece)


def _packed(numbers: Iterable[int]) -> str:
    """As a message holds them: a list would take as long to write and to read as a kernel to launch."""
    return array("q", numbers).tobytes().hex()


def _unpacked(text: str) -> list[int]:
    numbers = array("q")
    numbers.frombytes(bytes.fromhex(text))
    return numbers.tolist()
