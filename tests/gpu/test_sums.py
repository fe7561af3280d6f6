"""Sums of two ranks, each a process: on a CUDA device of its own, or both on the only one, where they take turns."""

import dataclasses
import pathlib
from collections.abc import Iterator

import pytest
import torch

from headrace.values import ParallelLayout
from kernels.reference import sum_over_ranks
from kernels.tuning import ReduceTile, tuning_of
from tests import sum_jobs
from tests.rank_processes import RankProcesses, rank_processes
from workers.models.parallel import RankContext

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

TP2 = ParallelLayout(2, 1)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SHAPES = ((1,), (3, 577), (1, 8192), (37, 4096), (64, 8192), (200, 5120))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes(2, "cuda") as processes:
        yield processes


@pytest.mark.parametrize("small", [False, True], ids=["tuned", "small"])
def test_sums_are_those_of_the_reference_to_the_bit(
    ranks: RankProcesses, tmp_path: pathlib.Path, *, small: bool
) -> None:
    tile = ReduceTile(5, 256, 2) if small else tuning_of(torch.device("cuda", 0)).reduce
    cases = sum_jobs.cases_of(SHAPES, DTYPES, 2)
    found = ranks.run(TP2, sum_jobs.sum_cases, str(tmp_path / "store"), cases, tile, 2**22)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_residual_and_norm_in_one_launch(ranks: RankProcesses, tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    shapes = ((1, 8192), (64, 8192), (3, 577), (200, 4096), (2, 64))
    one, other = ranks.run(TP2, sum_jobs.norm_cases, str(tmp_path / "store"), shapes, dtype)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


def wrong_sums(context: RankContext, path: str, replays: int) -> list[int]:
    """A graph of sums of several sizes, NCCL's among them where there is one, replayed back to back over new parts with
    single sums between: how many of each size were wrong."""
    device, rank = context.device, context.tp_rank
    context = dataclasses.replace(context, small_sums=sum_jobs.met(context, path, room_bytes=2**21))
    sizes = ((1, 8192), (64, 8192), (1, 8192), (600, 8192))[: 3 + (context.tp_group is not None)]
    xs = [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in sizes]
    parts = [torch.zeros(2, *size, dtype=torch.bfloat16, device=device) for size in sizes]
    wrong = torch.zeros(len(sizes), dtype=torch.int64, device=device)

    def step() -> None:
        for number, x in enumerate(xs):
            context.all_reduce(x.copy_(parts[number][rank]))
            wrong[number] += (x != sum_over_ranks(list(parts[number]))).any()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    generator = torch.Generator(device).manual_seed(7)
    for number in range(replays):
        for part in parts:
            part.normal_(generator=generator)
        graph.replay()
        if number % 3 == 0:
            step()
    torch.cuda.synchronize()
    graph.reset()
    return list(wrong.tolist())


def test_sums_in_graphs_stay_right_over_many_replays(ranks: RankProcesses, tmp_path: pathlib.Path) -> None:
    found = ranks.run(TP2, wrong_sums, str(tmp_path / "store"), 100)
    assert not any(found[0] + found[1])


def test_a_rank_that_gives_up_on_the_others_waits_for_nobody(ranks: RankProcesses, tmp_path: pathlib.Path) -> None:
    assert ranks.run(TP2, sum_jobs.sums_that_nobody_joins, str(tmp_path / "store")) == [[True], [False]]
