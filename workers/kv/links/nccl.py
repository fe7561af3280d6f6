"""A KvLink between two GPUs wherever they are: slabs gathered by one kernel into staging, sent in large messages through a
communicator of the pair's own, and scattered by one kernel.

A communicator holds device memory for as long as it lives (docs/performance.md has what was measured), and the process
knows no default group: each pair forms its own over the control channel, of which the store is a part. NCCL notices no
death: what waits in it ends when the pair closes, by an abort from another thread. A message that is scattered has come
whole: nothing that NCCL may still write is the pool's.

A message goes out behind its own gather and behind the message before it, in the order of the device: this process waits
for neither, so that the link has the next one when it has done one. Gathers or scatters have a stream of their own, for
which NCCL's waits: the stream that computes is in nobody's way. What comes into a room next comes behind its last scatter
on that stream, and what is gathered into it comes when its last message is gone: so all rooms but one hold messages under
way, and the host has the time of two of them to come with the next. All block numbers of a read go to the device at once:
a message costs the host one launch of ours and one of NCCL's.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
LOOK_SECONDS = 2e-5
FOR_EVER = timedelta(days=7)  # what takes too long is ended from here, not by NCCL's watchdog

_forming = threading.Lock()


CUT = Cut(message_bytes=64 * 2**20, depth=3)  # shorter first and last messages: measured, slower at 512 MiB


@dataclass(frozen=True, slots=True)
class Settings:
    """How a link moves its messages, alike on both ends; `loadtests.bench_link --sweep` finds what is best on a host."""

    cut: Cut = CUT
    copy_programs: int = 48  # of a gather or scatter: memory of our own is faster than a link
    thread_blocks: int | None = None  # of a send or receive; None: as NCCL thinks best


SETTINGS = Settings()


def answer(pool: KvPool, seconds: float, hook: ReadHook | None = None, settings: Settings = SETTINGS) -> Answer:
    """The source's end of each link. `seconds` bounds the wait for each of a peer's messages."""
    return StagedSource(pool, _carriers(pool, seconds, settings), settings.cut, hook).answer


def serve(
    pool: KvPool, host: str, seconds: float, hook: ReadHook | None = None, settings: Settings = SETTINGS
) -> KvServer:
    """Opens `pool` to peers, over NCCL alone."""
    return LinkServer(host, seconds, {SCHEME: answer(pool, seconds, hook, settings)}, Place())


def link(endpoint: str, pool: KvPool, seconds: float, settings: Settings = SETTINGS) -> Link:
    """Reads into `pool`. `seconds` bounds forming, and the wait for each message of the peer."""
    where, make = Endpoint.parse(endpoint), _carriers(pool, seconds, settings)
    return Link(StagedTransport(SCHEME, where, pool, seconds, make, settings.cut, dear=True))


def _carriers(pool: KvPool, seconds: float, settings: Settings) -> MakeCarrier:
    def make(pair: Pair, me: int) -> NcclCarrier:
        group = NcclPair(pool.tensor.device, pair, me, seconds, settings.thread_blocks)
        return NcclCarrier(pool, group, me, settings)

    return make


class NcclPair:
    """A communicator of two; formed anew for every pair, and aborted with it. One thread at a time uses it."""

    def __init__(
        self, device: torch.device, pair: Pair, me: int, seconds: float, thread_blocks: int | None = None
    ) -> None:
        """Blocks until the peer is there. LinkClosed at once when the pair closes."""
        self.closing = pair.closing
        self.staging: list[Tensor] = []  # what NCCL may write until the abort is over: nobody else is given it before
        self._peer = 1 - me
        self._seconds = seconds

        def form() -> Any:
            torch.cuda.set_device(device)  # of this thread
            with _forming, _as_we_need():
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # as the copies' own is
                options._timeout = FOR_EVER
                if thread_blocks is not None:
                    options.config.min_ctas = options.config.max_ctas = thread_blocks
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


class NcclCarrier:
    """Owns the staging: as many rooms as messages are under way at once, with the one that is gathered or scattered."""

    def __init__(self, pool: KvPool, pair: NcclPair, me: int, settings: Settings) -> None:
        self._pool = pool
        self._pair = pair
        self._me = me
        self._cut = settings.cut
        self._own = Slabs(pool.tensor.data_ptr(), pool.slab)
        device = pool.tensor.device
        self._copying = BlockCopy(device, replace(tuning_of(device).pull, num_programs=settings.copy_programs))
        self._rooms = deque[Tensor | None]([None] * settings.cut.depth)

    def begin(self, blocks: Sequence[int], piece: Piece) -> None:
        """In a message blocks follow each other from its first on. On whichever thread this is."""
        slab = self._pool.slab
        torch.cuda.set_device(self._pool.tensor.device)
        self._piece, self._block_bytes = piece, piece.num_bytes(slab)
        self._staged = SlabLayout(piece.num_heads, piece.num_layers, slab.block_size, slab.head_dim, slab.element_bytes)
        parts = self._cut.parts(len(blocks), self._block_bytes)
        places = [place for part in parts for place in range(part.stop - part.start)]
        self._copying.number(*((blocks, places) if self._me == SOURCE else (places, blocks)))

    def read(self, part: slice) -> Tensor:
        content = self._next(part)
        self._copying.start(self._own, Slabs(content.data_ptr(), self._staged), part, _from_source(self._piece))
        return content

    def send(self, content: Tensor) -> Any:
        with torch.cuda.stream(self._copying.stream):
            return self._pair.send(content)

    def receive(self, part: slice) -> tuple[Tensor, Any]:
        content = self._next(part)
        with torch.cuda.stream(self._copying.stream):
            return content, self._pair.receive(content)

    def finish(self, sent: Any) -> None:
        self._pair.finish(sent)

    def write(self, part: slice, content: Tensor) -> None:
        self._copying.start(Slabs(content.data_ptr(), self._staged), self._own, part, _to_target(self._piece))

    def settle(self) -> None:
        self._copying.wait()

    def _next(self, part: slice) -> Tensor:
        """The room whose message is over for longest: what is launched for the next one comes behind the last one's
        scatter, and the last one's gather is over, since it has been sent. What is new is the pair's staging too."""
        num_bytes = (part.stop - part.start) * self._block_bytes
        room = self._rooms.popleft()
        if room is None or room.numel() < num_bytes:
            device = self._pool.tensor.device
            room = torch.empty(max(num_bytes, self._cut.message_bytes), dtype=torch.uint8, device=device)
            # A step may have given this memory back before its kernels ran, for which neither our stream nor NCCL's waits.
            torch.cuda.current_stream(device).synchronize()
            self._pair.staging.append(room)
        self._rooms.append(room)
        return room[:num_bytes]


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
