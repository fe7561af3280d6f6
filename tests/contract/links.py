"""What the KvLink suite needs: the implementations, and pools with content that shows every mistake."""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from workers.kv.layout import Piece, SlabLayout
from workers.kv.links import gloo
from workers.kv.links.base import BlockPull, KvLink, KvServer
from workers.kv.pool import KvPool

Hook = Callable[[int], None]


@dataclass(frozen=True)
class Implementation:
    """`hook` is called at whichever end reads the blocks: the source's, or, of one that takes no part, the target's.
    Sources lie on `source_device`, each in its own process or in the target's."""

    serve: Callable[[KvPool, Hook | None], KvServer]
    link: Callable[[str, KvPool, float, Hook | None], KvLink]
    source_device: torch.device
    target_device: torch.device
    source_takes_part: bool
    reads_stopped: bool | None = False  # a source that stands still; None: as its transport has it


def _gloo() -> Implementation:
    return Implementation(
        lambda pool, hook: gloo.serve(pool, "127.0.0.1", 10.0, hook),
        lambda endpoint, pool, seconds, _: gloo.link(endpoint, pool, seconds),
        torch.device("cpu"),
        torch.device("cpu"),
        True,
    )


def _nvlink() -> Implementation:
    """Between two GPUs where there are two, within one otherwise."""
    from workers.kv.links import nvlink

    return Implementation(
        lambda pool, _: nvlink.serve(pool, "127.0.0.1", 10.0),
        nvlink.link,
        torch.device("cuda", torch.cuda.device_count() - 1),
        torch.device("cuda", 0),
        False,
        True,
    )


def _nccl() -> Implementation:
    from workers.kv.links import nccl

    return Implementation(
        lambda pool, hook: nccl.serve(pool, "127.0.0.1", 10.0, hook),
        lambda endpoint, pool, seconds, _: nccl.link(endpoint, pool, seconds),
        torch.device("cuda", torch.cuda.device_count() - 1),
        torch.device("cuda", 0),
        True,
    )


def _nixl() -> Implementation:
    from workers.kv.links import nixl

    return Implementation(
        lambda pool, _: nixl.serve(pool, "127.0.0.1", 10.0),
        nixl.link,
        torch.device("cpu"),
        torch.device("cpu"),
        False,
        None,
    )


MAKE = {"gloo": _gloo, "nccl": _nccl, "nixl": _nixl, "nvlink": _nvlink}


def why_not(scheme: str) -> str:
    """Why an implementation cannot be tested here; "" when it can."""
    if scheme == "nvlink" and not torch.cuda.is_available():
        return "nvlink needs a CUDA device"
    if scheme == "nixl" and importlib.util.find_spec("nixl") is None:
        return "nixl is not installed (the extra rdma)"
    if scheme == "nccl" and torch.cuda.device_count() < 2:
        return "nccl needs two CUDA devices"
    if scheme == "nvlink" and importlib.util.find_spec("cuda.bindings") is None:
        return "nvlink needs cuda-bindings"
    return ""


# A block of 1 MiB: a pull of all blocks takes several messages.
BIG = SlabLayout(num_kv_heads=4, num_layers=4, block_size=64, head_dim=128, element_bytes=4)
BIG_BLOCKS = 40
EPOCH = 5
WHOLE = Piece(0, 0, 0, 0, BIG.num_kv_heads, 0, 0, BIG.num_layers)


def filled_pool(seed: int, device: torch.device, slab: SlabLayout = BIG, num_blocks: int = BIG_BLOCKS) -> KvPool:
    """Random content that is the same on every device, every block at EPOCH."""
    pool = KvPool(slab, num_blocks, torch.float32, device)
    fill(pool, seed)
    pool.set_epochs((block, EPOCH) for block in range(num_blocks))
    return pool


def fill(pool: KvPool, seed: int) -> None:
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    pool.settle()


def pulls_of(blocks: Iterable[int], epoch: int = EPOCH) -> list[BlockPull]:
    """Each block into the block of the same number."""
    return [BlockPull(block, epoch, block) for block in blocks]
