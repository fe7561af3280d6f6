"""A KvLink for pools in host memory: messages over a gloo group of the pair."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.kv.layout import Piece
from workers.kv.links.base import KvServer
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.group import PairGroup, Work
from workers.kv.links.link import Link
from workers.kv.links.pair import Pair
from workers.kv.links.server import Answer, LinkServer
from workers.kv.links.staged import Cut, MakeCarrier, StagedSource, StagedTransport
from workers.kv.links.terms import ReadHook
from workers.kv.pool import KvPool

SCHEME = "gloo"
CUT = Cut(message_bytes=16 * 2**20, depth=3)


def answer(pool: KvPool, seconds: float, hook: ReadHook | None = None) -> Answer:
    """The source's end of each link. `seconds` bounds the wait for each of a peer's messages."""
    return StagedSource(pool, _carriers(pool, seconds), CUT, hook).answer


def serve(pool: KvPool, host: str, seconds: float, hook: ReadHook | None = None) -> KvServer:
    """Opens `pool` to peers, over gloo alone."""
    return LinkServer(host, seconds, {SCHEME: answer(pool, seconds, hook)})


def link(endpoint: str, pool: KvPool, seconds: float) -> Link:
    """Reads into `pool`. `seconds` bounds forming, and the wait for each message of the peer."""
    where, make = Endpoint.parse(endpoint), _carriers(pool, seconds)
    return Link(StagedTransport(SCHEME, where, pool, seconds, make, CUT))


def _carriers(pool: KvPool, seconds: float) -> MakeCarrier:
    return lambda pair, me: GlooCarrier(pool, pair, me, seconds)


class GlooCarrier:
    """Every message is memory of its own: gloo may still write into it when the link has closed."""

    def __init__(self, pool: KvPool, pair: Pair, me: int, seconds: float) -> None:
        self._pool = pool
        self._group = PairGroup(pair, me, seconds)

    def begin(self, blocks: Sequence[int], piece: Piece) -> None:
        self._blocks, self._piece = blocks, piece

    def read(self, part: slice) -> Tensor:
        return self._pool.read(self._blocks[part], self._piece)

    def send(self, content: Tensor) -> Work:
        return self._group.send(content)

    def receive(self, part: slice) -> tuple[Tensor, Work]:
        slab, piece = self._pool.slab, self._piece
        shape = (part.stop - part.start, piece.num_heads, piece.num_layers, 2, slab.block_size, slab.head_dim)
        content = torch.empty(shape, dtype=self._pool.tensor.dtype)
        return content, self._group.receive(content)

    def finish(self, sent: Work) -> None:
        self._group.finish(sent)

    def write(self, part: slice, content: Tensor) -> None:
        self._pool.write(self._blocks[part], self._piece, content)

    def settle(self) -> None:
        """Reads and writes are done when they return."""
