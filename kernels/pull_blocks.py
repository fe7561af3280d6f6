"""Reads pieces of scattered blocks of a peer's pool, mapped into this process, and writes them into ours.

A fixed, small number of thread blocks does it, so that a pull runs beside decode steps. The source's epoch words are
read by a second launch on the same stream, when the first has read everything: a block that changed hands meanwhile
shows (design 5.3). Only our own pool is written.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tuning import PullTile

WORD_BYTES = 4


class Mapped(Protocol):
    """Device memory that a kernel can read: a tensor, or an address that another process's pool is mapped at."""

    @property
    def dtype(self) -> torch.dtype: ...

    def data_ptr(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MappedWords:
    """Memory at an address, as words of `dtype`. Whoever mapped it keeps it mapped."""

    address: int
    dtype: torch.dtype = torch.int32

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class PullShape:
    """What to read of each block, in 4-byte words of a slab [K, L, 2, S, E] (workers.kv.layout.Piece, SlabLayout)."""

    source_block_words: int
    source_head_words: int
    source_first_word: int
    target_block_words: int
    target_head_words: int
    target_first_word: int
    num_runs: int  # contiguous runs a block: one a head, or one in all where every layer is read
    run_words: int

    @classmethod
    def of(
        cls,
        layer_bytes: int,
        source_heads: int,
        source_layers: int,
        target_heads: int,
        target_layers: int,
        source_head: int,
        target_head: int,
        num_heads: int,
        source_layer: int,
        target_layer: int,
        num_layers: int,
    ) -> "PullShape":
        """`layer_bytes`: K and V of one head and one layer. ValueError where they are not whole words."""
        if layer_bytes % WORD_BYTES:
            raise ValueError(f"layer_bytes must be a multiple of {WORD_BYTES}, got {layer_bytes}")
        words = layer_bytes // WORD_BYTES
        whole = num_layers == source_layers == target_layers
        return cls(
            source_heads * source_layers * words,
            source_layers * words,
            (source_head * source_layers + source_layer) * words,
            target_heads * target_layers * words,
            target_layers * words,
            (target_head * target_layers + target_layer) * words,
            1 if whole else num_heads,
            num_layers * words * (num_heads if whole else 1),
        )


def pull_blocks(
    source: Mapped,
    target: Mapped,
    source_blocks_I: Tensor,
    target_blocks_I: Tensor,
    shape: PullShape,
    tile: PullTile,
    part: slice | None = None,
) -> None:
    """Starts the copy of one piece of every block (int32 numbers), or of a part of them, on the current stream. `source`
    and `target` are int32 words from the pools' first; target blocks are distinct."""
    programs, numbers = _launch_of(shape, tile, part or slice(0, source_blocks_I.shape[0]))
    arguments = source, target, source_blocks_I, target_blocks_I, *numbers
    _pull[(programs,)](*arguments, W=tile.words, num_warps=tile.num_warps)


class PullLauncher:
    """pull_blocks for one device and tile, of pools and numbers that all begin at multiples of 16 bytes: what a launch
    looks up (the kernel for these arguments, their types, the stream) it finds once a shape. That is a third of what a
    short pull takes."""

    def __init__(self, tile: PullTile) -> None:
        self._tile = tile
        self._compiled: dict[PullShape, Any] = {}

    def launch(
        self,
        source: int,
        target: int,
        source_blocks: Tensor,
        target_blocks: Tensor,
        part: slice,
        shape: PullShape,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Of the numbers of `part`, between pools at these addresses, on `stream` or the current one."""
        tile = self._tile
        programs, numbers = _launch_of(shape, tile, part)
        compiled = self._compiled.get(shape)
        if compiled is None:
            arguments = MappedWords(source), MappedWords(target), source_blocks, target_blocks, *numbers
            with torch.cuda.stream(stream):
                self._compiled[shape] = _pull[(programs,)](*arguments, W=tile.words, num_warps=tile.num_warps)
        else:
            handle = (stream or torch.cuda.current_stream()).cuda_stream
            addresses = source, target, source_blocks.data_ptr(), target_blocks.data_ptr()
            compiled[(programs, 1, 1)](*addresses, *numbers, tile.words, stream=handle)


def _launch_of(shape: PullShape, tile: PullTile, part: slice) -> tuple[int, tuple[int, ...]]:
    """How many programs, and the kernel's numbers in its order."""
    chunks_per_run = -(-shape.run_words // tile.words)
    num_chunks = (part.stop - part.start) * shape.num_runs * chunks_per_run
    return min(tile.num_programs, num_chunks), (
        part.start,
        num_chunks,
        chunks_per_run,
        shape.num_runs,
        shape.run_words,
        shape.source_block_words,
        shape.source_head_words,
        shape.source_first_word,
        shape.target_block_words,
        shape.target_head_words,
        shape.target_first_word,
    )


def count_stale(epochs: Mapped, source_blocks_I: Tensor, expected_I: Tensor, stale_1: Tensor) -> None:
    """Adds to `stale_1` (int32) how many of the source's epoch words (int64, by block) are not what is expected."""
    width = 1024
    count = source_blocks_I.shape[0]
    _count_stale[(triton.cdiv(count, width),)](epochs, source_blocks_I, expected_I, stale_1, count, W=width)


@triton.jit(do_not_specialize=["first", "num_chunks", "chunks_per_run", "num_runs"])
def _pull(
    SOURCE,
    TARGET,
    SOURCE_BLOCKS,
    TARGET_BLOCKS,
    first,
    num_chunks,
    chunks_per_run,
    num_runs,
    run_words,
    source_block_words,
    source_head_words,
    source_first_word,
    target_block_words,
    target_head_words,
    target_first_word,
    W: tl.constexpr,
):
    w = tl.arange(0, W)
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        run = chunk // chunks_per_run
        index = first + run // num_runs
        head = (run % num_runs).to(tl.int64)
        word_W = chunk % chunks_per_run * W + w
        held_W = word_W < run_words
        source_block = tl.load(SOURCE_BLOCKS + index).to(tl.int64)
        target_block = tl.load(TARGET_BLOCKS + index).to(tl.int64)
        source = SOURCE + source_block * source_block_words + head * source_head_words + source_first_word
        target = TARGET + target_block * target_block_words + head * target_head_words + target_first_word
        tl.store(target + word_W, tl.load(source + word_W, mask=held_W, other=0), mask=held_W)


@triton.jit(do_not_specialize=["count"])
def _count_stale(EPOCHS, SOURCE_BLOCKS, EXPECTED, STALE, count, W: tl.constexpr):
    i = tl.program_id(0) * W + tl.arange(0, W)
    held = i < count
    block = tl.load(SOURCE_BLOCKS + i, mask=held, other=0).to(tl.int64)
    found = tl.load(EPOCHS + block, mask=held, other=0, volatile=True)
    expected = tl.load(EXPECTED + i, mask=held, other=0)
    tl.atomic_add(STALE, tl.sum((held & (found != expected)).to(tl.int32), 0))
