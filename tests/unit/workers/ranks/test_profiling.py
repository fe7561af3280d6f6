"""workers.ranks.profiling: a trace of real steps."""

import gzip
import json

import pytest
import torch

from workers.ranks import profiles, profiling
from workers.scheduling.plan import RowWork, StepPlan

pytestmark = pytest.mark.torch


def test_a_trace_is_parsed_beside_the_process_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (profiles, profiling):
        monkeypatch.setattr(module, "steps_of", lambda *_: pytest.fail("it would hold up all streams"), raising=False)
    profiler = profiling.StepProfiler(3, 2, torch.device("cpu"))
    for plan in (StepPlan(7, (RowWork(0, 0, 5, (1,) * 5, (0,)),), 0), StepPlan(8, (RowWork(0, 5, 1, None),), 1)):
        with profiler.step(plan):
            torch.ones(4).sum()
    assert profiler.full
    profiler.stop()
    found = profiler.read()
    assert found.rank == 3
    assert [(step.number, step.num_prefill_tokens, step.num_decode_tokens) for step in found.steps] == [
        (7, 5, 0),
        (8, 0, 1),
    ]
    assert all(step.cpu_seconds > 0 for step in found.steps)
    names = {event["name"] for event in json.loads(gzip.decompress(found.trace))["traceEvents"]}
    assert {"step 7", "step 8", "aten::sum"} < names
