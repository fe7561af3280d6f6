"""A runner without a model: what it writes into a block depends on token, position, head and layer alone, so that every
layout must hold the same. Its ranks agree on the plan's number by an all-reduce, as ranks of a model would."""

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.errors import CheckpointError, WorkerLost
from workers.kv.layout import ModelShape, SlabLayout, shard
from workers.kv.pool import KvPool
from workers.ranks.rank_runner import Launched, UnderWay
from workers.scheduling.plan import StepPlan, StepResult
from workers.spec import WorkerSpec

SHAPE = ModelShape(num_layers=5, num_kv_heads=4, head_dim=8, num_heads=8)
NUM_BLOCKS = 24


@dataclass(frozen=True)
class Toy:
    """How a toy rank behaves. The rank `at_rank` fails while loading, or in the step of that number, or waits there for a
    dead rank, or errs in what that step writes. Steps that are `awaited` are those of a device: the odd ones are done
    there once the next was launched, and fail there too."""

    shape: ModelShape = SHAPE
    at_rank: int = -1
    raise_on_load: bool = False
    raise_at: int = -1
    hang_at: int = -1
    err_at: int = -1
    awaited: bool = False

    def __call__(self, spec: WorkerSpec, rank: int, store: Any) -> "ToyRunner":
        torch.set_num_threads(1)
        faulty = rank == self.at_rank
        if faulty and self.raise_on_load:
            raise CheckpointError("model.safetensors: truncated", file="model.safetensors")
        return ToyRunner(self, spec, rank, store, faulty)


@dataclass
class ToyRunner:
    toy: Toy
    spec: WorkerSpec
    rank: int
    store: Any
    faulty: bool
    tables: dict[int, list[int]] = field(default_factory=dict)
    followed: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        shape = self.shape = self.toy.shape
        self.held = shard(shape, self.spec.layout, self.rank)
        block_size = self.spec.engine.block_size
        self.slab = SlabLayout(self.held.num_kv_heads, self.held.num_layers, block_size, shape.head_dim, 4)
        self.num_blocks = NUM_BLOCKS
        self.pool = KvPool(self.slab, NUM_BLOCKS, torch.float32, torch.device("cpu"))
        layout = self.spec.layout
        self.answers = self.rank == (layout.pp - 1) * layout.tp
        self.group = None
        if layout.world_size > 1:
            self.group = dist.ProcessGroupGloo(self.store, self.rank, layout.world_size, timedelta(seconds=30))

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        self.abandoned.set()

    def launch(self, plan: StepPlan) -> Launched:
        if not self.toy.awaited:
            return self._run(plan)
        self.followed.set()
        followed = self.followed = threading.Event()

        def wait() -> StepResult | None:
            if plan.number % 2 and not followed.wait(10):
                raise TimeoutError(f"no step was launched behind {plan.number}")
            return self._run(plan)

        return UnderWay(wait)

    def _run(self, plan: StepPlan) -> StepResult | None:
        if self.faulty and plan.number == self.toy.raise_at:
            raise ValueError("a toy was told to fail")
        if self.faulty and plan.number == self.toy.hang_at:
            self.abandoned.wait()
            raise WorkerLost("a toy was told to wait no more")
        self.pool.set_epochs(plan.fresh)
        self.pool.copy_blocks(plan.copies)
        for end in plan.ends:
            del self.tables[end]
        for start in plan.starts:
            self.tables[start.row] = []
        for work in plan.work:
            self.tables[work.row] += work.new_blocks
            assert work.token_ids is not None
            for offset, token in enumerate(work.token_ids):
                errs = self.faulty and plan.number == self.toy.err_at
                self._store_token(work.row, work.start + offset, token + errs)
        if self.group is not None:
            agreed = torch.tensor([plan.number, -plan.number])
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self.group.allreduce([agreed], options).wait()
            assert agreed.tolist() == [plan.number, -plan.number], "ranks are at different plans"
        if not self.answers:
            return None
        return StepResult(plan.number, tuple(work.row * 1000 + plan.number for work in plan.work))

    def _store_token(self, row: int, position: int, token: int) -> None:
        block = self.tables[row][position // self.slab.block_size]
        heads = torch.arange(*self.held.kv_heads).view(-1, 1, 1, 1)
        layers = torch.arange(*self.held.layers).view(1, -1, 1, 1)
        kv = torch.arange(2).view(1, 1, 2, 1)
        dim = torch.arange(self.slab.head_dim)
        mixed = token * 10007 + position * 7919 + heads * 401 + layers * 211 + kv * 101 + dim
        self.pool.tensor[block, :, :, :, position % self.slab.block_size] = (mixed % 65521).float()
