"""A KvLink for pools in host memory: requests and epochs over a pair's control channel, blocks over a gloo group.

The target asks for a piece of some blocks at the epochs it was told. The source answers in parts of bounded size: it
reads the epochs, gathers the part into one message, reads the epochs again, sends both readings, and, when they are
what was asked for, the message. The target, which alone writes its pool, checks for itself.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import torch

from headrace.errors import IncompatiblePeer, LinkClosed, StaleBlocks, Unauthenticated
from workers.kv.channel import Channel, ChannelClosed, Listener, connect
from workers.kv.layout import Piece
from workers.kv.links.base import BlockPull, PullReceipt
from workers.kv.links.closing import Closing, abandonable
from workers.kv.links.group import SOURCE, TARGET, PairGroup, Work
from workers.kv.links.pair import Message, Pair
from workers.kv.pool import KvPool

log = logging.getLogger(__name__)

SCHEME = "gloo"
MAX_MESSAGE_BYTES = 16 * 2**20

# Called with the index (in the pull) of each block, after it was gathered and before its epoch is read again. What it
# raises fails the read. For faults in test builds.
ReadHook = Callable[[int], None]


def parts(num_blocks: int, block_bytes: int) -> Iterator[slice]:
    """The blocks of each message; both ends cut alike."""
    step = max(1, MAX_MESSAGE_BYTES // block_bytes)
    return (slice(first, min(first + step, num_blocks)) for first in range(0, num_blocks, step))


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends must agree on before a byte moves."""

    block_size: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, pool: KvPool) -> "Terms":
        return cls(pool.slab.block_size, pool.slab.head_dim, str(pool.tensor.dtype))

    def check(self, theirs: Message) -> None:
        for field, mine in asdict(self).items():
            if theirs.get(field) != mine:
                raise IncompatiblePeer(
                    f"{field} must be {mine} as it is here, got {theirs.get(field)}",
                    field=field,
                    value=theirs.get(field),
                )


class GlooServer:
    """Lets peers read `pool`. Owns its listener and the serving ends of all links; a thread serves each link.

    The endpoint holds the secret that a reader must know: show it only to peers.
    """

    def __init__(self, pool: KvPool, host: str, seconds: float, hook: ReadHook | None = None) -> None:
        self._pool = pool
        self._seconds = seconds
        self._hook = hook
        self._closing = Closing()
        token = secrets.token_urlsafe(16)
        self._listener = Listener(host, token, self._serve)
        self._closing.on_close(self._listener.close)
        shown = f"[{host}]" if ":" in host else host
        self._endpoint = f"{SCHEME}://{token}@{shown}:{self._listener.port}"

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def close(self) -> None:
        self._closing.close("the server closed")

    def _serve(self, channel: Channel) -> None:
        link = Closing()
        pair = Pair(channel, link)
        forget = self._closing.on_close(lambda: link.close("the server closed"))
        try:
            self._answer(pair)
        except LinkClosed:
            pass  # the way every link ends; its target knows the reason
        except Exception as error:  # a request that makes no sense, or a hook: the target is told, and the link ends
            log.warning("a read from here failed", exc_info=error)
            _tell(pair, error)
        finally:
            link.close("the link ended")
            forget()

    def _answer(self, pair: Pair) -> None:
        terms = Terms.of(self._pool)
        theirs = pair.next(self._seconds)
        pair.send(asdict(terms))
        terms.check(theirs)
        group = PairGroup(pair, SOURCE, self._seconds)
        while True:
            self._read(pair, group, pair.next(None))

    def _read(self, pair: Pair, group: PairGroup, request: Message) -> None:
        piece = Piece(**request["piece"])
        blocks: list[int] = request["blocks"]
        asked: list[int] = request["epochs"]
        self._check(piece, blocks, asked)
        sending: Work | None = None
        for part in parts(len(blocks), piece.num_bytes(self._pool.slab)):
            before = self._pool.epochs[blocks[part]].tolist()
            content = self._pool.read(blocks[part], piece)
            if self._hook is not None:
                for index in range(part.start, part.stop):
                    self._hook(index)
            after = self._pool.epochs[blocks[part]].tolist()
            if sending is not None:
                group.finish(sending)
                sending = None
            pair.send({"before": before, "after": after})
            if not before == after == asked[part]:
                return
            sending = group.send(content)
        if sending is not None:
            group.finish(sending)

    def _check(self, piece: Piece, blocks: list[int], asked: list[int]) -> None:
        slab = self._pool.slab
        if not (
            0 <= piece.source_head < piece.source_head + piece.num_heads <= slab.num_kv_heads
            and 0 <= piece.source_layer < piece.source_layer + piece.num_layers <= slab.num_layers
        ):
            raise IncompatiblePeer(
                f"a piece must lie within {slab.num_kv_heads} heads and {slab.num_layers} layers, got {piece}"
            )
        if len(asked) != len(blocks) or not all(0 <= block < self._pool.num_blocks for block in blocks):
            raise IncompatiblePeer(f"blocks must be from 0 to {self._pool.num_blocks - 1}, each with its epoch")


def _tell(pair: Pair, error: Exception) -> None:
    with contextlib.suppress(LinkClosed):  # nobody is left to be told
        pair.send({"error": f"{type(error).__name__}: {error}"})


class GlooLink:
    """The reading end. Formed by its first pull; nothing blocks before that."""

    def __init__(self, endpoint: str, pool: KvPool, seconds: float) -> None:
        """`seconds` bounds forming, and the wait for each message of the peer."""
        self._endpoint = endpoint
        self._pool = pool
        self._seconds = seconds
        self._turn = threading.Lock()
        self._closing = Closing()
        self._formed: tuple[Pair, PairGroup] | None = None

    @property
    def closed(self) -> bool:
        return self._closing.closed

    def close(self) -> None:
        self._closing.close("closed from this side")

    def pull(self, blocks: Sequence[BlockPull], piece: Piece) -> PullReceipt:
        with self._turn:
            began = time.perf_counter()
            try:
                if self._closing.closed:
                    raise self._closing.error()
                if self._formed is None:
                    self._formed = self._form()
                num_bytes = self._transfer(*self._formed, blocks, piece)
            except StaleBlocks:
                raise
            except BaseException as error:
                self._closing.close(f"{type(error).__name__}: {error}")
                raise
            return PullReceipt(len(blocks), num_bytes, time.perf_counter() - began)

    def _form(self) -> tuple[Pair, PairGroup]:
        where = urlsplit(self._endpoint)
        if where.scheme != SCHEME or not where.hostname or not where.port or not where.username:
            raise IncompatiblePeer(f"an endpoint must be {SCHEME}://token@host:port", field="endpoint")
        host, port, token = where.hostname, where.port, where.username

        def reach() -> Channel:
            channel = connect(host, port, token, self._seconds)
            self._closing.on_close(channel.close)
            return channel

        try:
            pair = Pair(abandonable(reach, self._closing), self._closing)
        except (ChannelClosed, Unauthenticated) as error:
            self._closing.close(str(error))
            raise self._closing.error() from error
        terms = Terms.of(self._pool)
        pair.send(asdict(terms))
        terms.check(pair.next(self._seconds))
        return pair, PairGroup(pair, TARGET, self._seconds)

    def _transfer(self, pair: Pair, group: PairGroup, blocks: Sequence[BlockPull], piece: Piece) -> int:
        asked = [block.epoch for block in blocks]
        targets = [block.target for block in blocks]
        pair.send({"piece": asdict(piece), "blocks": [block.source for block in blocks], "epochs": asked})
        block_bytes = piece.num_bytes(self._pool.slab)
        arrived: tuple[slice, torch.Tensor] | None = None
        for part in parts(len(blocks), block_bytes):
            header = pair.next(self._seconds)
            if not header["before"] == header["after"] == asked[part]:
                raise _stale(blocks[part], header["before"], header["after"])
            content = self._room(part.stop - part.start, piece)
            work = group.receive(content)
            if arrived is not None:  # written while the next message is on its way
                self._pool.write(targets[arrived[0]], piece, arrived[1])
            group.finish(work)
            arrived = (part, content)
        if arrived is not None:
            self._pool.write(targets[arrived[0]], piece, arrived[1])
        return block_bytes * len(blocks)

    def _room(self, num_blocks: int, piece: Piece) -> torch.Tensor:
        slab = self._pool.slab
        shape = (num_blocks, piece.num_heads, piece.num_layers, 2, slab.block_size, slab.head_dim)
        return torch.empty(shape, dtype=self._pool.tensor.dtype)


def _stale(blocks: Sequence[BlockPull], before: list[int], after: list[int]) -> StaleBlocks:
    for block, first, second in zip(blocks, before, after, strict=True):
        if not first == second == block.epoch:
            return StaleBlocks(
                f"block {block.source} is at epoch {second}, was asked for at {block.epoch}",
                block=block.source,
                epoch=second,
                asked=block.epoch,
            )
    raise AssertionError("no block is stale")
