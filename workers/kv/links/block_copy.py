"""Copies pieces of blocks between pools' memory and staging on a GPU, on a stream of its own, beside what the pool's worker
computes: one launch of few thread blocks, whatever the number of blocks and runs."""

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from kernels.pull_blocks import PullLauncher, PullShape
from kernels.tuning import PullTile, tuning_of
from workers.kv.layout import Piece, SlabLayout

LEAST_ROOM, ROOM_STEP = 512, 64  # blocks


class Slabs(NamedTuple):
    """Blocks that follow each other from `address` on, which is a multiple of 16 bytes."""

    address: int
    slab: SlabLayout


class BlockCopy:
    """On one device, by one thread at a time, in turn. What has been copied when `run` or `wait` returns is there for
    whatever is launched afterwards; what was started, for what is launched on `stream`."""

    def __init__(self, device: torch.device, tile: PullTile | None = None) -> None:
        """`tile`: how the kernel is launched, where not as the card was tuned."""
        self._device = device
        self._launcher = PullLauncher(tile or tuning_of(device).pull)
        _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # its stub takes it for a method
        self.stream = torch.cuda.Stream(device, priority=highest)
        # Waited for by spinning: a sleeping thread wakes a tenth of a millisecond late, and a pull takes about one.
        self._done = torch.cuda.Event()
        self._make_room(LEAST_ROOM)

    def run(self, source: Slabs, target: Slabs, sources: Sequence[int], targets: Sequence[int], piece: Piece) -> None:
        """Blocks the calling thread until it is done."""
        self.begin(source, target, sources, targets, piece)()

    def begin(
        self, source: Slabs, target: Slabs, sources: Sequence[int], targets: Sequence[int], piece: Piece
    ) -> Callable[[], None]:
        """Nothing writes the target blocks, nor reads the source, once the function returned has, or this has raised."""
        try:
            self.number(sources, targets)
            self.start(source, target, slice(0, len(sources)), piece)
        except BaseException:
            self.wait()
            raise
        return self.wait

    def number(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Which blocks the next copies are of, in one transfer for all of them. What was started must be over."""
        count = len(sources)
        if count > self._room:
            self._make_room(2 * count)
        self._staged[:count] = array("i", sources)
        self._staged[self._room : self._room + count] = array("i", targets)
        with torch.cuda.stream(self.stream):
            self._numbers.copy_(self._pinned, non_blocking=True)
        self._done.record(self.stream)

    def start(self, source: Slabs, target: Slabs, part: slice, piece: Piece) -> None:
        """Of the blocks numbered `part`. Returns when it is launched: behind what was launched on `stream`."""
        shape = _shape(source.slab, target.slab, piece)
        try:
            self._launcher.launch(
                source.address, target.address, self._sources, self._targets, part, shape, self.stream
            )
        finally:
            self._done.record(self.stream)

    def wait(self) -> None:
        """Until what was started is done; at once where nothing was."""
        self._done.synchronize()

    def _make_room(self, count: int) -> None:
        """For the numbers of `count` blocks, sources and targets: both begin aligned, whatever is pulled, since a kernel is
        compiled anew for pointers of another alignment. Of `stream`'s own memory: another's may be in use there still."""
        self._room = -(-count // ROOM_STEP) * ROOM_STEP
        self._pinned = torch.zeros(2 * self._room, dtype=torch.int32).pin_memory()
        self._staged = self._pinned.numpy().data
        with torch.cuda.stream(self.stream):
            self._numbers = torch.empty(2 * self._room, dtype=torch.int32, device=self._device)
        self._sources, self._targets = self._numbers.split(self._room)


@lru_cache(maxsize=256)
def _shape(source: SlabLayout, target: SlabLayout, piece: Piece) -> PullShape:
    return PullShape.of(
        target.layer_stride * target.element_bytes,
        source.num_kv_heads,
        source.num_layers,
        target.num_kv_heads,
        target.num_layers,
        source_head=piece.source_head,
        target_head=piece.target_head,
        num_heads=piece.num_heads,
        source_layer=piece.source_layer,
        target_layer=piece.target_layer,
        num_layers=piece.num_layers,
    )
