"""kernels.all_reduce in Triton's interpreter: ranks are processes that map each other's memory, as ranks on GPUs do."""

import pathlib
from collections.abc import Iterator

import pytest
import torch

from headrace.errors import ConfigError
from headrace.values import ParallelLayout
from kernels.tuning import ReduceTile
from tests import sum_jobs
from tests.rank_processes import RankProcesses, rank_processes
from workers.kv.links.endpoint import Place
from workers.models.meeting import own_device_each

pytestmark = [pytest.mark.torch, pytest.mark.interpreter]

SHAPES = ((1,), (3, 5), (128,), (7, 96), (2, 40))
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes(3) as processes:
        yield processes


@pytest.mark.parametrize("tp", [2, 3])
def test_sums_are_those_of_the_reference_and_equal_on_all_ranks(
    ranks: RankProcesses, tmp_path: pathlib.Path, tp: int
) -> None:
    cases = sum_jobs.cases_of(SHAPES, DTYPES, tp)
    assert any(two_shots for _, _, two_shots in cases)
    tile = ReduceTile(num_programs=3, elements=64, num_warps=4)
    found = ranks.run(ParallelLayout(tp, 1), sum_jobs.sum_cases, str(tmp_path / "store"), cases, tile)
    for sums in zip(*found, strict=True):
        assert all(torch.equal(one, sums[0]) for one in sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_residual_and_norm_in_one_launch(ranks: RankProcesses, tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    found = ranks.run(
        ParallelLayout(3, 1), sum_jobs.norm_cases, str(tmp_path / "store"), ((1, 64), (5, 96), (2, 31)), dtype
    )
    for sums in zip(*found, strict=True):
        assert all(torch.equal(one, sums[0]) for one in sums)


def test_a_rank_that_gives_up_on_the_others_waits_for_nobody(ranks: RankProcesses, tmp_path: pathlib.Path) -> None:
    layout = ParallelLayout(2, 1)
    assert ranks.run(layout, sum_jobs.sums_that_nobody_joins, str(tmp_path / "store")) == [[True], [False]]


def test_where_one_cannot_map_the_others_all_sum_otherwise(ranks: RankProcesses, tmp_path: pathlib.Path) -> None:
    layout = ParallelLayout(3, 1)
    assert ranks.run(layout, sum_jobs.meeting_of_one_that_cannot, str(tmp_path / "store")) == [True] * 3


def test_what_does_not_fit_goes_elsewhere(ranks: RankProcesses, tmp_path: pathlib.Path) -> None:
    assert ranks.run(ParallelLayout(2, 1), sum_jobs.what_is_taken, str(tmp_path / "store")) == [sum_jobs.TAKEN] * 2


def test_ranks_on_one_gpu_are_refused_and_named(tmp_path: pathlib.Path) -> None:
    store = torch.distributed.HashStore()
    place = Place("machine", "GPU-1")
    for rank, other in ((0, "GPU-0"), (1, "GPU-1")):
        store.set(f"place/{rank}", f'["machine", "{other}"]')
    with pytest.raises(ConfigError, match="ranks 1 and 2 are on one GPU, GPU-1"):
        own_device_each(store, 2, 3, place)
    own_device_each(store, 2, 3, Place("another machine", "GPU-1"))
    own_device_each(store, 2, 3, Place("machine", "GPU-2"))


def test_sums_in_a_fixed_order_are_the_same_whole_and_in_pieces(ranks: RankProcesses, tmp_path: pathlib.Path) -> None:
    found = ranks.run(ParallelLayout(3, 1), sum_jobs.sums_in_order, str(tmp_path / "store"))
    assert all(torch.equal(sums, found[0]) for sums in found)
