"""Who a rank is among the ranks of its worker, and how it talks to them.

Tensor parallel ranks sum and gather within a stage; pipeline stages pass the residual stream on, and the last one
passes what it drew back to the first. The groups are process groups of torch built directly, not through its global
default: a process may hold groups of several workers, and closing one leaves the others alone. On GPUs NCCL is the
back end, and small sums go through memory that the ranks of a machine have mapped of each other (workers.models.meeting).
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from headrace.values import ParallelLayout
from kernels.ops import Ops
from kernels.reference import sum_over_ranks

if TYPE_CHECKING:
    from workers.models.meeting import SmallSums

# torch ships no types for its process groups and stores
Group = Any
Work = Any
Store = Any


@dataclass(frozen=True)
class RankContext:
    """This rank's place. `tp_group` is None when tp is 1, `pp_group` when pp is 1; ranks in them are numbered by tp rank
    and by stage. All ranks of a group make the same calls in the same order. `small_sums`: what sums small tensors
    instead of the tp group, where there is such. `fixed_order`: every sum is float32 in the order of ranks, whatever its
    size; a library's order depends on it."""

    layout: ParallelLayout
    rank: int
    device: torch.device
    tp_group: Group | None = None
    pp_group: Group | None = None
    small_sums: "SmallSums | None" = None
    fixed_order: bool = False

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    @property
    def stage(self) -> int:
        return self.rank // self.layout.tp

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.layout.pp - 1

    @property
    def samples(self) -> bool:
        """Whether this rank draws the tokens, and so answers for the worker."""
        return self.is_last_stage and self.tp_rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the stage's ranks, in place."""
        if self.fixed_order and self.tp_group is not None:
            return self._sum_in_order(x)
        if self.small_sums is not None and self.small_sums.take(x):
            self.small_sums.add_up(x)
        elif self.tp_group is not None:
            options = distributed.AllreduceOptions()
            options.asyncOp = False  # on the stream of the step, which a graph then holds whole
            _end(self.tp_group.allreduce([x], options))
        return x

    def add_rms_norm(
        self, ops: Ops, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Ops.add_rms_norm of the sum of x over the stage's ranks. x may be lost."""
        if not self.fixed_order and self.small_sums is not None and self.small_sums.take_rows(x_TD):
            return self.small_sums.add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return ops.add_rms_norm(self.all_reduce(x_TD), residual_TD, weight_D, eps)

    def _sum_in_order(self, x: Tensor) -> Tensor:
        if self.small_sums is not None and self.small_sums.take_pieces(x):
            for piece in x.view(-1).split(self.small_sums.most_elements(x)):
                self.small_sums.add_up(piece)
            return x
        assert self.tp_group is not None
        parts = [torch.empty_like(x) for _ in range(self.layout.tp)]
        _end(self.tp_group.allgather([parts], [x]))
        return x.copy_(sum_over_ranks(parts))

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's equally shaped x on tp rank 0, in rank order; None on the others."""
        if self.tp_group is None:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.layout.tp)] if self.tp_rank == 0 else None
        options = distributed.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        _end(self.tp_group.gather([] if parts is None else [parts], [x], options))
        return parts

    def share(self, x: Tensor) -> Tensor:
        """tp rank 0's x on all ranks of the stage, in place."""
        if self.tp_group is not None:
            options = distributed.BroadcastOptions()
            options.rootRank, options.asyncOp = 0, False
            _end(self.tp_group.broadcast([x], options))
        return x

    def send(self, x: Tensor, stage: int) -> Work:
        """Under way when this returns; x must not change before its wait() does."""
        assert self.pp_group is not None
        return self.pp_group.send([x], stage, 0)

    def receive(self, x: Tensor, stage: int) -> Work:
        """x is filled once its wait() returns."""
        assert self.pp_group is not None
        return self.pp_group.recv([x], stage, 0)

    def close(self) -> None:
        """Leaves the groups: called by all ranks, after the same calls, when nothing holds their operations any more."""
        if self.device.type == "cuda":
            for group in self._groups:
                group.shutdown()

    def abandon(self) -> None:
        """A rank is lost: what waits for it on the device ends, and its results are worth nothing. From any thread. On a
        CPU its closed connections do that."""
        if self.small_sums is not None:
            self.small_sums.abandon()
        if self.device.type == "cuda":
            for group in self._groups:
                group.abort()

    @property
    def _groups(self) -> list[Group]:
        return [group for group in (self.tp_group, self.pp_group) if group is not None]


def form(
    layout: ParallelLayout,
    rank: int,
    store: Store,
    *,
    device: torch.device | None = None,
    timeout_seconds: float = 60.0,
) -> RankContext:
    """Joins this rank with the others of its worker, who meet at `store`; blocks until all have. ConfigError where two of
    them are on one GPU."""
    place = RankContext(layout, rank, device or torch.device("cpu"))
    on_gpus = place.device.type == "cuda"
    tp_group = pp_group = small_sums = None
    if on_gpus and layout.world_size > 1:
        from workers.models.meeting import own_device_each, place_of

        own_device_each(store, rank, layout.world_size, place_of(place.device))
    if layout.tp > 1:
        here = PrefixStore(f"tp/{place.stage}", store)
        tp_group = _group(place.device, here, place.tp_rank, layout.tp, timeout_seconds)
        if on_gpus:
            from workers.models.meeting import DeviceMemory, meet

            small_sums = meet(here, place.tp_rank, layout.tp, place.device, DeviceMemory(place.device))
    if layout.pp > 1:
        here = PrefixStore(f"pp/{place.tp_rank}", store)
        pp_group = _group(place.device, here, place.stage, layout.pp, timeout_seconds)
    return RankContext(layout, rank, place.device, tp_group, pp_group, small_sums)


def _end(work: Work | None) -> None:
    """Waits for what was asked for synchronously: NCCL's group has put it on the stream by then, and returns nothing."""
    if work is not None:
        work.wait()


def _group(device: torch.device, store: Store, rank: int, size: int, timeout_seconds: float) -> Group:
    timeout = timedelta(seconds=timeout_seconds)
    if device.type != "cuda":
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast that goes wrong takes the host's GPUs with it
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, size, options)
