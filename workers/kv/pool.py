"""The KV memory of one rank: blocks as slabs, and an epoch word beside each (design 5.3).

Owned by the rank's runner, which alone writes it; links read a peer's pool and write our own on the runner's behalf,
into blocks that the plan's ledger gave them. One block more than `num_blocks` exists: the trash block that padding
rows write to. On a CUDA device both lie in memory that processes of this machine can map.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.kv.layout import Piece, SlabLayout
from workers.kv.shared_words import WORD_BYTES, SharedWords

if TYPE_CHECKING:
    from workers.kv.device_memory import DeviceWord, MappedMemory


@dataclass(frozen=True, slots=True)
class Exportable:
    """A pool's memory as peers on this machine can map it: its blocks from the first byte on, and its words, the last of
    which the device sets."""

    blocks: "MappedMemory"
    words: SharedWords
    done: "DeviceWord"


class KvPool:
    """`tensor` is [num_blocks + 1, kv_heads, layers, 2, block_size, head_dim]; `epochs` is int64 [num_blocks + 1], in
    host memory. `exportable` is None where the pool is in host memory."""

    def __init__(self, slab: SlabLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slab = slab
        self.num_blocks = num_blocks
        shape = (num_blocks + 1, slab.num_kv_heads, slab.num_layers, 2, slab.block_size, slab.head_dim)
        self.exportable: Exportable | None = None
        if device.type == "cuda":
            self.exportable = _exportable(slab, num_blocks + 1, device)
            blocks = torch.as_tensor(self.exportable.blocks, device=device)
            self.tensor = blocks[: (num_blocks + 1) * slab.block_bytes].view(dtype).view(shape).zero_()
            self.epochs = self.exportable.words.tensor
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            self.epochs = torch.zeros(num_blocks + 1, dtype=torch.int64)
        self._words = self.epochs.numpy()  # the same memory: to set one costs a tenth of what it costs through torch

    @property
    def trash_block(self) -> int:
        return self.num_blocks

    def settle(self) -> None:
        """Waits until the calling thread's stream has done what it was given. From then on a link may read the blocks that
        this wrote, and write those that this was the last to use: neither would wait for the stream."""
        if self.exportable is not None:
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def wrote(self, step: int) -> None:
        """All that plan `step` writes into the pool has been given to the calling thread's stream: when that has done it,
        who waits for the plan at a link reads."""
        if self.exportable is not None:
            self.exportable.done.write(step, torch.cuda.current_stream(self.tensor.device).cuda_stream)

    def set_epochs(self, fresh: Iterable[tuple[int, int]]) -> None:
        """Blocks changed hands: from here on a reader that expects an older epoch finds out."""
        for block, epoch in fresh:
            self._words[block] = epoch

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Whole blocks, source to target."""
        for source, target in pairs:
            self.tensor[target].copy_(self.tensor[source])

    def read(self, blocks: Sequence[int], piece: Piece) -> Tensor:
        """The source side of a piece, gathered: [blocks, heads, layers, 2, block_size, head_dim], contiguous."""
        heads = slice(piece.source_head, piece.source_head + piece.num_heads)
        layers = slice(piece.source_layer, piece.source_layer + piece.num_layers)
        where = torch.as_tensor(blocks, dtype=torch.long, device=self.tensor.device)
        return self.tensor[:, heads, layers].index_select(0, where)

    def write(self, blocks: Sequence[int], piece: Piece, content: Tensor) -> None:
        """The target side of a piece, scattered from what `read` made."""
        heads = slice(piece.target_head, piece.target_head + piece.num_heads)
        layers = slice(piece.target_layer, piece.target_layer + piece.num_layers)
        part = self.tensor[:, heads, layers]
        for block, slab in zip(blocks, content, strict=True):  # twice as fast as by index: each copy is a few memcpys
            part[block].copy_(slab)

    def head_layer_digests(self, block: int, filled: int) -> list[list[bytes]]:
        """A digest of the first `filled` positions for each local (head, layer): [heads][layers] of 8 bytes.

        XOR over all ranks of blake2b(global head, global layer, this) is equal for equal content in any layout.
        """
        content = self.tensor[block, :, :, :, :filled].contiguous().cpu().view(torch.uint8)
        return [
            [
                blake2b(content[head, layer].numpy().tobytes(), digest_size=8).digest()
                for layer in range(self.slab.num_layers)
            ]
            for head in range(self.slab.num_kv_heads)
        ]


def _exportable(slab: SlabLayout, num_slabs: int, device: torch.device) -> Exportable:
    from workers.kv.device_memory import DeviceWord, MappedMemory

    index = torch.cuda.current_device() if device.index is None else device.index
    blocks, words = MappedMemory.allocate(num_slabs * slab.block_bytes, index), SharedWords(num_slabs)
    first, last = words.tensor.data_ptr(), words.done.data_ptr()
    done = DeviceWord(words, first, last + WORD_BYTES - first, last, index)
    return Exportable(blocks, words, done)
