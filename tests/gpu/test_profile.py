"""A profile of ranks at work on CUDA devices: what each of their next steps cost there, and a trace that says of what; with
names for Nsight Systems beside it, which it need not be run under."""

import gzip
import json
import pathlib
from collections import deque

import pytest
import torch

from headrace.values import ParallelLayout, Role
from tests.gpu.decoding import ON_GPU, begin, decode
from tests.tiny import make_checkpoint
from workers.ranges import NO_RANGES, ranges_of
from workers.ranks.build import build_executor
from workers.ranks.profiles import ON_DEVICE
from workers.spec import WorkerSpec

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

NAMED = ON_GPU.model_copy(update={"nvtx": True})
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
LAYOUTS = [
    ParallelLayout(),
    pytest.param(ParallelLayout(2, 1), marks=[pytest.mark.gpu2, TWO]),
    pytest.param(ParallelLayout(1, 2), marks=[pytest.mark.gpu2, TWO]),
]
STEPS, SECONDS = 5, 60


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_at_work_are_profiled_step_by_step(tmp_path: pathlib.Path, layout: ParallelLayout) -> None:
    """One step ahead, its decodes replayed as graphs, which is most of what a device computes."""
    spec = WorkerSpec("w", 1, Role.UNIFIED, str(make_checkpoint(tmp_path / "llama")), layout, NAMED)
    executor = build_executor(spec)
    try:
        begin(executor)
        for number in (2, 3):
            executor.step(decode(number)).result(SECONDS)
        profiling = executor.profile(STEPS)
        flying = deque([executor.step(decode(4))])
        for number in range(5, 4 + STEPS):
            flying.append(executor.step(decode(number)))
            flying.popleft().result(SECONDS)
        flying.popleft().result(SECONDS)
        ranks = profiling.result(SECONDS)
        after = executor.step(decode(4 + STEPS)).result(SECONDS)
    finally:
        executor.close()
    assert len(after.token_ids) == 4, "the worker goes on"
    assert [rank.rank for rank in ranks] == list(range(layout.world_size))
    for rank in ranks:
        found = [(step.number, step.num_prefill_tokens, step.num_decode_tokens) for step in rank.steps]
        assert found == [(number, 0, 4) for number in range(4, 4 + STEPS)]
        assert all(step.cpu_seconds > 0 and step.gpu_seconds > 0 and step.idle_seconds >= 0 for step in rank.steps)
        events = json.loads(gzip.decompress(rank.trace))["traceEvents"]
        names = {event["name"] for event in events}
        assert {f"step {step.number}" for step in rank.steps} < names
        kernels = {event["name"] for event in events if event.get("cat") in ON_DEVICE}
        assert any("_decode" in name for name in kernels), "the graph's kernels, by their names"


def test_ranges_are_named_on_one_thread_and_across_threads() -> None:
    ranges = ranges_of(NAMED)
    assert ranges is not NO_RANGES
    with ranges("schedule"):
        ended = ranges.begin("pull")
    ended()
