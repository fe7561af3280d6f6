"""What a worker is started as."""

import pytest

from headrace.config import EngineConfig
from headrace.values import ParallelLayout, Role
from workers.spec import WorkerSpec


@pytest.mark.parametrize(
    ("stages", "asked", "overlap", "found"),
    [(1, None, True, 1), (1, 4, True, 1), (2, None, True, 2), (4, 2, True, 2), (2, 64, True, 2), (2, 2, False, 1)],
)
def test_a_worker_has_as_many_plans_at_once_as_stages_at_most(
    stages: int, asked: int | None, overlap: bool, found: int
) -> None:
    engine = EngineConfig(micro_batches=asked, overlap=overlap)
    spec = WorkerSpec("w", 1, Role.UNIFIED, "model", ParallelLayout(1, stages), engine)
    assert spec.num_micro_batches == found
