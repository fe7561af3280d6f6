"""What the KvLink suite needs: the implementations, and pools with content that shows every mistake."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import BlockPull, KvLink, KvServer
from workers.kv.links.gloo import GlooLink, GlooServer
from workers.kv.pool import KvPool

Hook = Callable[[int], None]


@dataclass(frozen=True)
class Implementation:
    serve: Callable[[KvPool, Hook | None], KvServer]
    link: Callable[[str, KvPool, float], KvLink]


IMPLEMENTATIONS = {
    "gloo": Implementation(lambda pool, hook: GlooServer(pool, "127.0.0.1", 10.0, hook), GlooLink),
}

# A block of 1 MiB: a pull of all blocks takes several messages.
BIG = SlabLayout(num_kv_heads=4, num_layers=4, block_size=64, head_dim=128, element_bytes=4)
BIG_BLOCKS = 40
EPOCH = 5
WHOLE = Piece(0, 0, 0, 0, BIG.num_kv_heads, 0, 0, BIG.num_layers)


def filled_pool(seed: int, slab: SlabLayout = BIG, num_blocks: int = BIG_BLOCKS) -> KvPool:
    """Random content, every block at EPOCH."""
    pool = KvPool(slab, num_blocks, torch.float32, torch.device("cpu"))
    pool.tensor.normal_(generator=torch.Generator().manual_seed(seed))
    pool.set_epochs((block, EPOCH) for block in range(num_blocks))
    return pool


def pulls_of(blocks: Iterable[int], epoch: int = EPOCH) -> list[BlockPull]:
    """Each block into the block of the same number."""
    return [BlockPull(block, epoch, block) for block in blocks]
