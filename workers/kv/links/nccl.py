"""A KvLink between two GPUs wherever they are: slabs gathered by one kernel into staging, sent in large messages through a
communicator of the pair's own, and scattered by one kernel.

A communicator holds device memory for as long as it lives (docs/performance.md has what was measured), and the process
knows no default group: each pair forms its own over the control channel, of which the store is a part. NCCL notices no
death: what waits in it ends when the pair closes, by an abort from another thread. A message that is scattered has come
whole: nothing that NCCL may still write is the pool's.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import KvServer
from workers.kv.links.block_copy import BlockCopy, Slabs
from workers.kv.links.closing import abandonable
from workers.kv.links.endpoint import Endpoint, Place
from workers.kv.links.link import Link
from workers.kv.links.pair import Pair
from workers.kv.links.server import Answer, LinkServer
from workers.kv.links.staged import SOURCE, MakeCarrier, StagedSource, StagedTransport
from workers.kv.links.terms import ReadHook
from workers.kv.pool import KvPool

SCHEME = "nccl"
MESSAGE_BYTES = 64 * 2**20
DEPTH = 1
LOOK_SECONDS = 2e-5
FOR_EVER = timedelta(days=7)  # what takes too long is ended from here, not by NCCL's watchdog

_forming = threading.Lock()


def answer(pool: KvPool, seconds: float, hook: ReadHook | None = None) -> Answer:
    """The source's end of each link. `seconds` bounds the wait for each of a peer's messages."""
    return StagedSource(pool, _carriers(pool, seconds), MESSAGE_BYTES, hook).answer


def serve(pool: KvPool, host: str, seconds: float, hook: ReadHook | None = None) -> KvServer:
    """Opens `pool` to peers, over NCCL alone."""
    return LinkServer(host, seconds, {SCHEME: answer(pool, seconds, hook)}, Place())


def link(endpoint: str, pool: KvPool, seconds: float) -> Link:
    """Reads into `pool`. `seconds` bounds forming, and the wait for each message of the peer."""
    where, make = Endpoint.parse(endpoint), _carriers(pool, seconds)
    return Link(StagedTransport(SCHEME, where, pool, seconds, make, MESSAGE_BYTES, dear=True))


def _carriers(pool: KvPool, seconds: float) -> MakeCarrier:
    return lambda pair, me: NcclCarrier(pool, NcclPair(pool.tensor.device, pair, me, seconds))


class NcclPair:
    """A communicator of two; formed anew for every pair, and aborted with it. One thread uses it."""

    def __init__(self, device: torch.device, pair: Pair, me: int, seconds: float) -> None:
        """Blocks until the peer is there. LinkClosed at once when the pair closes."""
        self.closing = pair.closing
        self.staging: list[Tensor] = []  # what NCCL may write until the abort is over: nobody else is given it before
        self._peer = 1 - me
        self._seconds = seconds

        def form() -> Any:
            torch.cuda.set_device(device)  # of this thread
            with _forming, _as_we_need():
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = FOR_EVER
                group: Any = dist.ProcessGroupNCCL(pair.store, me, 2, options)
            pair.closing.on_close(
                lambda: threading.Thread(target=_abort, args=(group, self.staging), daemon=True).start()
            )
            # NCCL forms a communicator with its first message, on which both ends wait.
            word = torch.zeros(1, dtype=torch.int32, device=device)
            first = group.send if me == SOURCE else group.recv
            first([word], 1 - me, 0)
            return group

        try:
            self._group = abandonable(form, pair.closing)
        except RuntimeError as error:
            pair.closing.close(f"nccl: {error}")
            raise pair.closing.error() from error
        torch.cuda.set_device(device)

    def send(self, content: Tensor) -> Any:
        return self._group.send([content], self._peer, 0)

    def receive(self, content: Tensor) -> Any:
        return self._group.recv([content], self._peer, 0)

    def finish(self, work: Any) -> None:
        """Looks, and never waits inside NCCL: what waits there ends with nobody's timeout."""
        deadline = time.monotonic() + self._seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.closing.close(f"a message took more than {self._seconds:g} s")
            if self.closing.closed:
                raise self.closing.error()
            time.sleep(LOOK_SECONDS)
        if self.closing.closed:  # an abort completes it, too
            raise self.closing.error()


class NcclCarrier:
    """Owns the staging: as many messages as are on their way at once, and one that is gathered or scattered meanwhile."""

    depth = DEPTH

    def __init__(self, pool: KvPool, pair: NcclPair) -> None:
        self._pool = pool
        self._pair = pair
        self._copying = BlockCopy(pool.tensor.device)
        self._slots: list[Tensor | None] = [None] * (DEPTH + 1)
        self._turn = 0
        self._own = Slabs(pool.tensor.data_ptr(), pool.slab)

    def read(self, blocks: Sequence[int], piece: Piece) -> Tensor:
        content, staged = self._room(len(blocks), piece)
        self._copying.run(self._own, staged, blocks, range(len(blocks)), _from_source(piece))
        return content

    def send(self, content: Tensor) -> Any:
        return self._pair.send(content)

    def receive(self, num_blocks: int, piece: Piece) -> tuple[Tensor, Any]:
        content, _ = self._room(num_blocks, piece)
        return content, self._pair.receive(content)

    def finish(self, sent: Any) -> None:
        self._pair.finish(sent)

    def write(self, targets: Sequence[int], piece: Piece, content: Tensor) -> None:
        staged = Slabs(content.data_ptr(), _slab_of(self._pool.slab, piece))
        self._copying.run(staged, self._own, range(len(targets)), targets, _to_target(piece))

    def _room(self, num_blocks: int, piece: Piece) -> tuple[Tensor, Slabs]:
        num_bytes = num_blocks * piece.num_bytes(self._pool.slab)
        at, self._turn = self._turn, (self._turn + 1) % (DEPTH + 1)
        slot = self._slots[at]
        if slot is None or slot.numel() < num_bytes:
            room = max(num_bytes, MESSAGE_BYTES)
            slot = self._slots[at] = torch.empty(room, dtype=torch.uint8, device=self._pool.tensor.device)
            self._pair.staging.append(slot)
        return slot[:num_bytes], Slabs(slot.data_ptr(), _slab_of(self._pool.slab, piece))


def try_out(pool: KvPool, source: int, target: int) -> None:
    """One block through staging within the pool. A GPU is no peer of its own, so NCCL itself is tried by its first link."""
    slab = pool.slab
    whole = Piece(0, 0, 0, 0, slab.num_kv_heads, 0, 0, slab.num_layers)
    staging = torch.empty(slab.block_bytes, dtype=torch.uint8, device=pool.tensor.device)
    own, staged, copying = (
        Slabs(pool.tensor.data_ptr(), slab),
        Slabs(staging.data_ptr(), slab),
        BlockCopy(staging.device),
    )
    copying.run(own, staged, [source], [0], whole)
    copying.run(staged, own, [0], [target], whole)


def _slab_of(slab: SlabLayout, piece: Piece) -> SlabLayout:
    """How a message holds a piece: as a pool would that has these heads and layers alone."""
    return SlabLayout(piece.num_heads, piece.num_layers, slab.block_size, slab.head_dim, slab.element_bytes)


def _from_source(piece: Piece) -> Piece:
    return Piece(0, 0, piece.source_head, 0, piece.num_heads, piece.source_layer, 0, piece.num_layers)


def _to_target(piece: Piece) -> Piece:
    return Piece(0, 0, 0, piece.target_head, piece.num_heads, 0, piece.target_layer, piece.num_layers)


def _abort(group: Any, staging: list[Tensor]) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
    staging.clear()


@contextlib.contextmanager
def _as_we_need() -> Iterator[None]:
    """What a group reads from the environment when it is made. Its watchdog ends the process over a peer's death, and a
    monitor does over a watchdog that stands still: here a link ends, and nothing else. NCCL itself reads later, with the
    first message, so what it is to find stays."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast that goes wrong takes the host's GPUs with it
    wanted = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
