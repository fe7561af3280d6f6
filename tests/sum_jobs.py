"""What ranks do in tests of kernels.all_reduce: they meet as a worker's ranks do, and sum. Jobs of tests.rank_processes."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import FileStore

import tests.unit.kernels.conftest  # noqa: F401  # before triton: a rank's process interprets where it has no GPU
from kernels.all_reduce import all_reduce, two_shots_fit
from kernels.choose import choose
from kernels.reference import sum_over_ranks
from kernels.tuning import ReduceTile
from workers.models.meeting import DeviceMemory, Memory, SmallSums, meet
from workers.models.parallel import RankContext

POISON = torch.nan
Case = tuple[tuple[int, ...], torch.dtype, bool]


class HostMemory:
    """Buffers that processes of one machine share, in place of a GPU's."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._views: list[Tensor] = []

    def allocate(self, num_bytes: int) -> Tensor:
        self._descriptor = os.memfd_create("sums")
        os.ftruncate(self._descriptor, num_bytes)
        return self._view(self._descriptor, num_bytes)

    def export(self) -> int:
        return os.dup(self._descriptor)

    def map(self, descriptor: int, num_bytes: int) -> int:
        view = self._view(descriptor, num_bytes)
        os.close(descriptor)
        return view.data_ptr()

    def _view(self, descriptor: int, num_bytes: int) -> Tensor:
        self._views.append(torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8))
        return self._views[-1]


class Unreachable(HostMemory):
    def map(self, descriptor: int, num_bytes: int) -> int:
        os.close(descriptor)
        raise RuntimeError("no way there")


def part_of(case: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A rank's part: whole numbers and fractions of either sign, with zeros of either sign among them."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    part = torch.randn(tuple(shape), generator=generator).to(dtype)
    part.view(-1)[::7] = 0.0
    part.view(-1)[::5] *= -1.0
    return part


def met(context: RankContext, path: str, memory: Memory | None = None, room_bytes: int = 2**16) -> SmallSums | None:
    store = FileStore(path, context.layout.tp)
    if memory is None:
        memory = DeviceMemory(context.device) if context.device.type == "cuda" else HostMemory()
    return meet(store, context.tp_rank, context.layout.tp, context.device, memory, room_bytes)


def sum_cases(
    context: RankContext, path: str, cases: Sequence[Case], tile: ReduceTile, room_bytes: int = 2**16
) -> list[Tensor]:
    """The sum of every case, however sizes and shots follow each other. Each is what the reference says, to the bit; from
    Triton's interpreter only nearly so, which does not round as a GPU does."""
    sums = met(context, path, room_bytes=room_bytes)
    assert sums is not None
    ranks, found = context.layout.tp, []
    for number, (shape, dtype, two_shots) in enumerate(cases):
        parts = [part_of(number, rank, shape, dtype) for rank in range(ranks)]
        size = parts[0].numel()
        around = torch.full((size + 64,), POISON, dtype=dtype, device=context.device)
        x = around[32 : 32 + size].view(shape).copy_(parts[context.tp_rank])
        all_reduce(x, sums._meeting, tile, two_shots=two_shots)
        expected = sum_over_ranks(parts)
        if context.device.type == "cuda" or dtype == torch.float32:
            assert torch.equal(x.cpu(), expected), (number, shape, dtype, two_shots)
        else:
            assert (x - expected).float().norm() <= 1e-2 * expected.float().norm()
        found.append(x.cpu())
        assert around[:32].isnan().all()
        assert around[32 + size :].isnan().all()
    assert sums._meeting.state.tolist() == [len(cases) % 2, 0, 0]
    return found


def norm_cases(context: RankContext, path: str, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
    """Sum, residual and norm in one launch, after each other and among plain sums: what the operations give apart."""
    sums, ops = met(context, path, room_bytes=2**22), choose(context.device)
    assert sums is not None
    found = []
    for number, shape in enumerate(shapes):
        parts = [part_of(number, rank, shape, dtype).to(context.device) for rank in range(context.layout.tp)]
        residual = part_of(number, 17, shape, dtype).to(context.device)
        weight = part_of(number, 18, shape[1:], dtype).to(context.device)
        out, total = sums.add_rms_norm(parts[context.tp_rank], residual, weight, 1e-5)
        plain = parts[context.tp_rank].clone()
        sums.add_up(plain)
        expected, expected_total = ops.add_rms_norm(plain, residual, weight, 1e-5)
        if context.device.type == "cuda" or dtype == torch.float32:
            assert torch.equal(total, expected_total)
        for got, wanted in ((total, expected_total), (out, expected)):
            assert (got - wanted).float().norm() <= 1e-2 * wanted.float().norm()
        found += [total.cpu(), out.cpu()]
    return found


def sums_that_nobody_joins(context: RankContext, path: str) -> list[bool]:
    """Rank 0 gives up on the others before it sums; whether it came back."""
    sums = met(context, path)
    assert sums is not None
    if context.tp_rank == 0:
        sums.abandon()
        for _ in range(3):
            sums.add_up(torch.ones(40, device=context.device))
    return [context.tp_rank == 0]


def meeting_of_one_that_cannot(context: RankContext, path: str) -> bool:
    """Whether this rank was told to sum otherwise, where the last one cannot map the others' buffers."""
    last = context.tp_rank == context.layout.tp - 1
    return met(context, path, Unreachable() if last else HostMemory()) is None


TAKEN = [True, True, False, False, False]


def what_is_taken(context: RankContext, path: str) -> list[bool]:
    sums = met(context, path, room_bytes=2**10)
    assert sums is not None
    tensors = (
        torch.empty(512, dtype=torch.bfloat16),
        torch.empty(0),
        torch.empty(513, dtype=torch.bfloat16),
        torch.empty(8, dtype=torch.int64),
        torch.empty(8, 8).t()[1:],
    )
    return [sums.take(tensor) for tensor in tensors]


def cases_of(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], num_ranks: int) -> list[Case]:
    """Each by one shot, and by two where every rank has a part of it."""
    return [
        (shape, dtype, two_shots)
        for dtype in dtypes
        for shape in shapes
        for two_shots in (False, True)
        if not two_shots or two_shots_fit(torch.empty(shape, dtype=dtype), num_ranks)
    ]


def sums_in_order(context: RankContext, path: str) -> Tensor:
    """A sum in a fixed order, whole and row by row, through the group and, in pieces, through memory."""
    context = replace(context, fixed_order=True)
    parts = [part_of(0, rank, (6, 48), torch.bfloat16).to(context.device) for rank in range(context.layout.tp)]
    own = parts[context.tp_rank]
    met_too = replace(context, small_sums=met(context, path, room_bytes=256))
    whole = context.all_reduce(own.clone())
    assert torch.equal(whole, sum_over_ranks(parts))
    assert torch.equal(torch.cat([context.all_reduce(row.clone()) for row in own.split(1)]), whole)
    if context.device.type == "cuda":
        assert torch.equal(met_too.all_reduce(own.clone()), whole)
    else:  # the interpreter's bfloat16 rounds otherwise
        assert (met_too.all_reduce(own.clone()) - whole).float().norm() <= 1e-2 * whole.float().norm()
    return whole
