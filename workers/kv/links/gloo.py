"""A KvLink for pools in host memory: requests and epochs over a pair's control channel, blocks over a gloo group.

The target asks for a piece of some blocks at the epochs it was told. The source answers in parts of bounded size: it
reads the epochs, gathers the part into one message, reads the epochs again, sends both readings, and, when they are
what was asked for, the message. The target, which alone writes its pool, checks for itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from headrace.errors import IncompatiblePeer
from workers.kv.layout import Piece
from workers.kv.links.base import BlockPull, KvServer
from workers.kv.links.closing import Closing
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.group import SOURCE, TARGET, PairGroup, Work
from workers.kv.links.link import Link
from workers.kv.links.pair import Message, Pair, reach
from workers.kv.links.server import LinkServer
from workers.kv.links.terms import ReadHook, Terms, check_epochs, check_read
from workers.kv.pool import KvPool

SCHEME = "gloo"
MAX_MESSAGE_BYTES = 16 * 2**20


def parts(num_blocks: int, block_bytes: int) -> Iterator[slice]:
    """The blocks of each message; both ends cut alike."""
    step = max(1, MAX_MESSAGE_BYTES // block_bytes)
    return (slice(first, min(first + step, num_blocks)) for first in range(0, num_blocks, step))


def serve(pool: KvPool, host: str, seconds: float, hook: ReadHook | None = None) -> KvServer:
    """Opens `pool` to peers. `seconds` bounds the wait for each of a peer's messages."""
    return LinkServer(host, seconds, {SCHEME: GlooSource(pool, seconds, hook).answer})


class GlooSource:
    """What the source's end of a link does; shared by all links that read `pool`."""

    def __init__(self, pool: KvPool, seconds: float, hook: ReadHook | None) -> None:
        self._pool = pool
        self._seconds = seconds
        self._hook = hook

    def answer(self, pair: Pair, first: Message) -> None:
        terms = Terms.of(self._pool)
        pair.send(asdict(terms))
        terms.check(first)
        group = PairGroup(pair, SOURCE, self._seconds)
        while True:
            self._read(pair, group, pair.next(None))

    def _read(self, pair: Pair, group: PairGroup, request: Message) -> None:
        piece = Piece(**request["piece"])
        blocks: list[int] = request["blocks"]
        asked: list[int] = request["epochs"]
        check_read(self._pool.slab, self._pool.num_blocks, piece, blocks)
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


def link(endpoint: str, pool: KvPool, seconds: float) -> Link:
    """Reads into `pool`. `seconds` bounds forming, and the wait for each message of the peer."""
    return Link(GlooTransport(Endpoint.parse(endpoint), pool, seconds))


class GlooTransport:
    """The target's end."""

    def __init__(self, where: Endpoint, pool: KvPool, seconds: float) -> None:
        self._where = where
        self._pool = pool
        self._seconds = seconds

    def form(self, closing: Closing) -> None:
        where, terms = self._where, Terms.of(self._pool)
        self._pair = Pair(reach(where.host, where.port, where.token, self._seconds, closing), closing)
        self._pair.send({"scheme": SCHEME, **asdict(terms)})
        terms.check(self._pair.next(self._seconds))
        self._group = PairGroup(self._pair, TARGET, self._seconds)

    def await_step(self, step: int) -> None:
        raise IncompatiblePeer(f"gloo awaits no steps, was asked for what plan {step} writes", field="after_step")

    def transfer(self, blocks: Sequence[BlockPull], piece: Piece) -> int:
        asked = [block.epoch for block in blocks]
        targets = [block.target for block in blocks]
        self._pair.send({"piece": asdict(piece), "blocks": [block.source for block in blocks], "epochs": asked})
        block_bytes = piece.num_bytes(self._pool.slab)
        arrived: tuple[slice, torch.Tensor] | None = None
        for part in parts(len(blocks), block_bytes):
            header = self._pair.next(self._seconds)
            check_epochs(blocks[part], header["after"])
            check_epochs(blocks[part], header["before"])
            content = self._room(part.stop - part.start, piece)
            work = self._group.receive(content)
            if arrived is not None:  # written while the next message is on its way
                self._pool.write(targets[arrived[0]], piece, arrived[1])
            self._group.finish(work)
            arrived = (part, content)
        if arrived is not None:
            self._pool.write(targets[arrived[0]], piece, arrived[1])
        return block_bytes * len(blocks)

    def release(self) -> None:
        """The pair and the group close with the link."""

    def _room(self, num_blocks: int, piece: Piece) -> torch.Tensor:
        slab = self._pool.slab
        shape = (num_blocks, piece.num_heads, piece.num_layers, 2, slab.block_size, slab.head_dim)
        return torch.empty(shape, dtype=self._pool.tensor.dtype)
