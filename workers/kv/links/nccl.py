"""A KvLink between two GPUs wherever they are: slabs gathered by one kernel into staging, sent in large messages through a
communicator of the pair's own, and scattered by one kernel.

A communicator holds device memory for as long as it lives (docs/performance.md has what was measured), and the process
knows no default group: each pair forms its own over the control channel, of which the store is a part. NCCL notices no
death: what waits in it ends when the pair closes, by an abort from another thread. A message that is scattered has come
whole: nothing that NCCL may still write is the pool's.

A message goes out behind its own gather and behind the message before it, in the order of the device: this process waits
for neither, so that the link has the next one when it has done one. Each message's room has a stream of its own, for which
NCCL's waits: the stream that computes is in nobody's way. What comes into a room next comes behind its last scatter on that
stream, and what is gathered into it comes when its last message is gone: so all rooms but one hold messages under way, and
the host has the time of two of them to come with the next.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from kernels.tuning import tuning_of
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import KvServer
from workers.kv.links.block_copy import BlockCopy, Slabs
from workers.kv.links.closing import abandonable
from workers.kv.links.endpoint import Endpoint, Place
from workers.kv.links.link import Link
from workers.kv.links.looks import wake_in_time
from workers.kv.links.pair import Pair
from workers.kv.links.server import Answer, LinkServer
from workers.kv.links.staged import SOURCE, Cut, MakeCarrier, StagedSource, StagedTransport
from workers.kv.links.terms import ReadHook
from workers.kv.pool import KvPool

SCHEME = "nccl"
CUT = Cut(message_bytes=64 * 2**20, depth=3)  # shorter first and last ones: measured, slower at 512 MiB
COPY_PROGRAMS = 48  # of a gather or scatter: memory of our own is faster than a link
LOOK_SECONDS = 2e-5
FOR_EVER = timedelta(days=7)  # what takes too long is ended from here, not by NCCL's watchdog

_forming = threading.Lock()


def answer(pool: KvPool, seconds: float, hook: ReadHook | None = None) -> Answer:
    """The source's end of each link. `seconds` bounds the wait for each of a peer's messages."""
    return StagedSource(pool, _carriers(pool, seconds), CUT, hook).answer


def serve(pool: KvPool, host: str, seconds: float, hook: ReadHook | None = None) -> KvServer:
    """Opens `pool` to peers, over NCCL alone."""
    return LinkServer(host, seconds, {SCHEME: answer(pool, seconds, hook)}, Place())


def link(endpoint: str, pool: KvPool, seconds: float) -> Link:
    """Reads into `pool`. `seconds` bounds forming, and the wait for each message of the peer."""
    where, make = Endpoint.parse(endpoint), _carriers(pool, seconds)
    return Link(StagedTransport(SCHEME, where, pool, seconds, make, CUT, dear=True))


def _carriers(pool: KvPool, seconds: float) -> MakeCarrier:
    return lambda pair, me: NcclCarrier(pool, NcclPair(pool.tensor.device, pair, me, seconds), CUT)


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
            abort = partial(_abort, group, self.staging)
            pair.closing.on_close(lambda: threading.Thread(target=abort, name="link-abort", daemon=True).start())
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
        wake_in_time()
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.closing.close(f"a message took more than {self._seconds:g} s")
            if self.closing.closed:
                raise self.closing.error()
            time.sleep(LOOK_SECONDS)
        if self.closing.closed:  # an abort completes it, too
            raise self.closing.error()


class Room:
    """Staging for a message, and what gathers or scatters it, on a stream that NCCL's waits for."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Of `num_bytes`, or of more where a message has one block that is larger."""
        self.copying = BlockCopy(device, replace(tuning_of(device).pull, num_programs=COPY_PROGRAMS))
        self._device = device
        self._num_bytes = num_bytes
        self._memory: Tensor | None = None

    def take(self, num_bytes: int, keep: list[Tensor]) -> Tensor:
        """For the next message: what is launched on the room's stream for it comes behind the last one's scatter, and the
        last one's gather is over, since it has been sent. What is new goes to `keep` too."""
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = torch.empty(max(num_bytes, self._num_bytes), dtype=torch.uint8, device=self._device)
            # A step may have given this memory back before its kernels ran, for which neither this stream nor NCCL's waits.
            torch.cuda.current_stream(self._device).synchronize()
            keep.append(self._memory)
        return self._memory[:num_bytes]


class NcclCarrier:
    """Owns the staging: as many rooms as messages are under way at once, with the one that is gathered or scattered."""

    def __init__(self, pool: KvPool, pair: NcclPair, cut: Cut) -> None:
        self._pool = pool
        self._pair = pair
        self._own = Slabs(pool.tensor.data_ptr(), pool.slab)
        self._rooms = deque(Room(pool.tensor.device, cut.message_bytes) for _ in range(cut.depth))
        self._held: dict[int, Room] = {}  # by the address of its message

    def read(self, blocks: Sequence[int], piece: Piece) -> Tensor:
        content, room = self._next(len(blocks), piece)
        room.copying.start(self._own, self._staged(content, piece), blocks, range(len(blocks)), _from_source(piece))
        return content

    def send(self, content: Tensor) -> Any:
        with torch.cuda.stream(self._held[content.data_ptr()].copying.stream):
            return self._pair.send(content)

    def receive(self, num_blocks: int, piece: Piece) -> tuple[Tensor, Any]:
        content, room = self._next(num_blocks, piece)
        with torch.cuda.stream(room.copying.stream):
            return content, self._pair.receive(content)

    def finish(self, sent: Any) -> None:
        self._pair.finish(sent)

    def write(self, targets: Sequence[int], piece: Piece, content: Tensor) -> None:
        copying = self._held[content.data_ptr()].copying
        copying.start(self._staged(content, piece), self._own, range(len(targets)), targets, _to_target(piece))

    def settle(self) -> None:
        for room in self._rooms:
            room.copying.wait()

    def _next(self, num_blocks: int, piece: Piece) -> tuple[Tensor, Room]:
        """The room whose message is over for longest."""
        room = self._rooms[0]
        self._rooms.rotate(-1)
        content = room.take(num_blocks * piece.num_bytes(self._pool.slab), self._pair.staging)
        self._held[content.data_ptr()] = room
        return content, room

    def _staged(self, content: Tensor, piece: Piece) -> Slabs:
        return Slabs(content.data_ptr(), _slab_of(self._pool.slab, piece))


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
