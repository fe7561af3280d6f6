"""Epoch words that processes of one machine share: the owner writes them, its peers read them without asking. One word
more, the last, says which plan's writes are done.

They lie in host memory also where the pool does not. A rank sets a block's word before it launches what overwrites the
block; so whoever has read the block, and finds the word unchanged afterwards, has read what it was. Setting costs no
launch and waits for none, and the owner's death takes nothing from those who have mapped them.
"""

import mmap
import os

import torch
from torch import Tensor

WORD_BYTES = 8


class SharedWords:
    """`count` int64 words and the last plan's, all 0 at first, as `tensor` and `done`. Owns a descriptor; the mapping
    lives as long as the tensors."""

    def __init__(self, count: int) -> None:
        self._descriptor = os.memfd_create("headrace-epochs", os.MFD_CLOEXEC)
        size = (count + 1) * WORD_BYTES
        os.ftruncate(self._descriptor, size)
        words: Tensor = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.int64)
        self.tensor, self.done = words.split((count, 1))

    def export(self) -> int:
        """A descriptor that can only read, which the caller closes."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._descriptor)


def map_words(descriptor: int) -> memoryview:
    """A peer's words, to be read alone; closes the descriptor. The mapping lives as long as the view."""
    try:
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)).cast("q")
    finally:
        os.close(descriptor)
