"""A prompt as the index sees it: a lazy chain of blocks, and who holds how much of it. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from headrace.blocks import BlockId
from headrace.keys import low_halves

SLICE_BLOCKS = 16
KEY_SHIFT = 4  # what is left of a block's low half are 60 bits: an int of two digits


def keys_of(halves: Iterable[int]) -> list[int]:
    """What the mirror, and all that is compared with it, knows blocks by."""
    return [half >> KEY_SHIFT for half in halves]


class Chain:
    """A prompt's blocks by their keys. Hashed a slice at a time, no further than they are read, once.

    `keys` are those that are hashed; `grow` alone adds to them.
    """

    __slots__ = ("_is_whole", "_rest", "keys")

    def __init__(self, ids: Iterable[BlockId]) -> None:
        self.keys: list[int] = []
        self._rest = iter(ids)
        self._is_whole = False

    def grow(self) -> bool:
        """Hashes a slice more; False when there is none."""
        if self._is_whole:
            return False
        more = keys_of(low_halves(b"".join(islice(self._rest, SLICE_BLOCKS))))
        self.keys += more
        self._is_whole = len(more) < SLICE_BLOCKS
        return bool(more)

    def reaches(self, depth: int) -> bool:
        """Whether there is a block number `depth`."""
        while len(self.keys) <= depth:
            if not self.grow():
                return False
        return True

    def after(self, first: int) -> Sequence[int]:
        """All blocks from number `first` on."""
        while self.grow():
            pass
        return self.keys[first:]


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading blocks of a prompt each worker holds, or is about to; those that hold none are absent.

    `discounts`: what of them is not worth a block on the device, for workers that hold some in a lower tier only.
    `promised`: what the mirror alone says.
    """

    depths: dict[str, int]
    discounts: dict[str, float]
    promised: dict[str, int]

    def credited_tokens(self, block_size: int) -> dict[str, int]:
        """Leading tokens by worker, each block with its tier's weight."""
        credited = {worker: depth * block_size for worker, depth in self.depths.items()}
        for worker, discount in self.discounts.items():
            credited[worker] -= ceil(discount * block_size)
        return credited
