"""What benches of links pull over, and the pools that they pull between."""

import importlib
from types import ModuleType

import torch

from workers.kv.layout import SlabLayout
from workers.kv.links.base import KvLink, KvServer
from workers.kv.pool import KvPool

# Llama-3.1-8B in bf16, blocks of 32 tokens: at tp 8, 0.5 MiB each, in host memory; whole, 4 MiB, on a GPU.
HOST = SlabLayout(num_kv_heads=1, num_layers=32, block_size=32, head_dim=128, element_bytes=2)
GPU = SlabLayout(num_kv_heads=8, num_layers=32, block_size=32, head_dim=128, element_bytes=2)


class Scheme:
    """One kind of link, and pools for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_gpu = name == "nccl"
        self.slab, self.num_blocks = (GPU, 1024) if self.on_gpu else (HOST, 128)
        self.sizes = (1, 32, 128, 512) if self.on_gpu else (1, 16, 128)

    def pool(self) -> KvPool:
        torch.set_num_threads(1)
        pool = KvPool(self.slab, self.num_blocks, torch.bfloat16, torch.device("cuda", 0) if self.on_gpu else _CPU)
        pool.tensor.normal_()
        pool.settle()
        return pool

    def serve(self, pool: KvPool) -> KvServer:
        return self._module.serve(pool, "127.0.0.1", 30.0)  # type: ignore[no-any-return]

    def link(self, endpoint: str, pool: KvPool) -> KvLink:
        return self._module.link(endpoint, pool, 30.0)  # type: ignore[no-any-return]

    @property
    def _module(self) -> ModuleType:
        """What another kind of link needs is not imported."""
        return importlib.import_module(f"workers.kv.links.{self.name}")

    def free_bytes(self) -> int:
        if not self.on_gpu:
            return 0
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


_CPU = torch.device("cpu")
