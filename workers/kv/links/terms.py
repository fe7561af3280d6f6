"""What both ends of a link hold to, whichever transport moves the bytes: what must be equal, what may be asked, and
when a read does not count."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from headrace.errors import IncompatiblePeer, StaleBlocks
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import BlockPull
from workers.kv.links.pair import Message
from workers.kv.pool import KvPool

# Called with the index (in the pull) of each block, after it was read and before its epoch is read again. What it raises
# fails the read. For faults in test builds.
ReadHook = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends must agree on before a byte moves."""

    block_size: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, pool: KvPool) -> "Terms":
        return cls(pool.slab.block_size, pool.slab.head_dim, str(pool.tensor.dtype))

    def check(self, theirs: Message) -> None:
        for field, mine in asdict(self).items():
            if theirs.get(field) != mine:
                raise IncompatiblePeer(
                    f"{field} must be {mine} as it is here, got {theirs.get(field)}",
                    field=field,
                    value=theirs.get(field),
                )


def check_read(slab: SlabLayout, num_blocks: int, piece: Piece, blocks: Sequence[int]) -> None:
    """ValueError when a source of `num_blocks` has no such piece, or no such blocks."""
    if not (
        0 <= piece.source_head < piece.source_head + piece.num_heads <= slab.num_kv_heads
        and 0 <= piece.source_layer < piece.source_layer + piece.num_layers <= slab.num_layers
    ):
        raise ValueError(f"a piece must lie within {slab.num_kv_heads} heads and {slab.num_layers} layers, got {piece}")
    if not 0 <= min(blocks, default=0) <= max(blocks, default=0) < num_blocks:
        raise ValueError(f"blocks must be from 0 to {num_blocks - 1}, each with its epoch")


def check_epochs(blocks: Sequence[BlockPull], found: Sequence[int]) -> None:
    """StaleBlocks, naming the first block whose epoch is not what was asked for."""
    if list(found) == [block.epoch for block in blocks]:
        return
    for block, epoch in zip(blocks, found, strict=True):
        if epoch != block.epoch:
            raise StaleBlocks(
                f"block {block.source} is at epoch {epoch}, was asked for at {block.epoch}",
                block=block.source,
                epoch=epoch,
                asked=block.epoch,
            )
