"""Ranks of one worker on two CUDA devices: whole models against one CPU in float32, and what happens to the rest when
one is killed. Where the ranks are this test's processes each sees its own device alone."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import EngineConfig
from headrace.errors import WorkerLost
from headrace.values import ParallelLayout
from tests.gpu.decoding import ENGINE, ON_GPU, begin, decode, executor_of
from tests.model_steps import DECODES, Steps, alone, decodes, prompts
from tests.rank_processes import RankProcesses, rank_processes
from tests.tiny import make_checkpoint, make_variant
from workers.models.parallel import RankContext

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
TP2, PP2 = ParallelLayout(2, 1), ParallelLayout(1, 2)
LIMIT, MARGIN = 2e-2, 0.1  # as in test_engine
ON_CPU = EngineConfig.model_validate(ENGINE)
SECONDS = 10.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes(2, "cuda") as processes:
        yield processes


def answer(context: RankContext, folder: pathlib.Path, engine: EngineConfig, named: list[Any] | None) -> dict[str, Any]:
    """Two prompts, one whole and one in chunks, a third behind the first one's blocks, then steps of all three rows, of the
    tokens named or of those drawn last."""
    steps = Steps.of(folder, context, engine)
    prompts(steps)
    begun = tuple(int(steps.logits[at][0].argmax()) for at in (0, 3, 4)) if steps.logits else ()
    drawn = [begun, *decodes(steps, named)]
    steps.runner.settle()
    if context.device.type == "cuda":
        torch.cuda.synchronize()
        assert steps.runner._decodes is not None
        steps.runner._graph_memory.close()
    return {"drawn": drawn, "logits": [logits.float().cpu() for logits in steps.logits]}


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
@pytest.mark.parametrize("name", ["llama", "llama-mqa", "llama-biased", "llama-mha-tied"])
def test_logits_equal_the_cpus(ranks: RankProcesses, tmp_path: pathlib.Path, name: str, layout: ParallelLayout) -> None:
    folder = make_variant(tmp_path, name)
    weights = {key: value.to(torch.bfloat16) for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ours = ranks.run(layout, answer, folder, ON_GPU, None)[layout.world_size - layout.tp]
    theirs = answer(alone(), folder, ON_CPU, ours["drawn"][:-1])
    assert len(ours["logits"]) == len(theirs["logits"]) == 5 + DECODES
    for found, expected in zip(ours["logits"], theirs["logits"], strict=True):
        distance = float((found - expected).norm() / expected.norm())
        print(f"{name} {layout}: {distance:.2e}")
        assert distance < LIMIT
    for token_ids, expected in zip(ours["drawn"][1:], theirs["logits"][5:], strict=True):
        chosen = expected[range(3), list(token_ids)]
        assert ((expected.amax(-1) - chosen) < MARGIN * expected.std(-1)).all()


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_a_killed_rank_in_mid_decode_fails_the_worker_and_leaves_nothing_stuck(
    tmp_path: pathlib.Path, layout: ParallelLayout
) -> None:
    """Twice in one process: the second worker begins on devices that the first left."""
    folder = make_checkpoint(tmp_path / "llama")
    for _ in range(2):
        executor = executor_of(layout, folder)
        begin(executor)
        flying = [executor.step(decode(2)), executor.step(decode(3))]
        for number in range(4, 60):
            flying.pop(0).result(60)
            flying.append(executor.step(decode(number)))
        (child,) = executor._children
        child.kill()
        killed = time.monotonic()
        reason = executor.failed.result(SECONDS)
        assert "rank 1" in str(reason)
        for step in flying:
            with pytest.raises(WorkerLost):
                step.result(SECONDS)
        executor.close()
        print(f"{layout}: all over {time.monotonic() - killed:.2f} s after the kill")
        assert executor._rank0 is not None
        assert not executor._rank0._thread.is_alive(), "rank 0 waits for nothing on its device"
        assert child.returncode == -signal.SIGKILL
        torch.cuda.synchronize()


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_ranks_do_not_outlive_a_killed_rank_0(tmp_path: pathlib.Path, layout: ParallelLayout) -> None:
    folder = make_checkpoint(tmp_path / "llama")
    program = (
        "import itertools, pathlib, sys\n"
        "from headrace.values import ParallelLayout\n"
        "from tests.gpu.decoding import begin, decode, executor_of\n"
        f"executor = executor_of(ParallelLayout({layout.tp}, {layout.pp}), pathlib.Path({str(folder)!r}))\n"
        "begin(executor)\n"
        "flying = [executor.step(decode(2))]\n"
        "for number in itertools.count(3):\n"
        "    flying.append(executor.step(decode(number)))\n"
        "    flying.pop(0).result(60)\n"
        "    if number == 50:\n"
        "        print(executor._children[0].pid, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as rank0:
        assert rank0.stdout is not None
        orphan = int(rank0.stdout.readline())
        watched = os.pidfd_open(orphan)
        rank0.kill()
        ended = wait([watched], timeout=SECONDS)
        os.close(watched)
        assert ended, "the child ends when rank 0 does"


def test_a_closed_worker_leaves_at_once_and_another_begins(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path / "llama")
    first = []
    for layout in (TP2, PP2, TP2):
        executor = executor_of(layout, folder)
        first.append(begin(executor))
        executor.step(decode(2)).result(60)
        began = time.monotonic()
        executor.close()
        print(f"{layout}: closed in {time.monotonic() - began:.2f} s")
        assert [child.returncode for child in executor._children] == [0]
        assert not executor.failed.done()
    assert first[0] == first[2]
