"""An engine on a card starts, and draws in every way, with kernels that were compiled without one: nothing is compiled."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from tests.tiny import make_checkpoint

ROOT = pathlib.Path(__file__).parents[2]
ENGINE = {"dtype": "bfloat16", "block_size": 16, "max_num_seqs": 8, "max_step_tokens": 1280}
CAPABILITY = (9, 0)

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != CAPABILITY, reason="compiled for sm_90 here")

START = """
import json, sys, torch
from dataclasses import replace
from triton import knobs
from headrace.config import EngineConfig
from headrace.values import ParallelLayout, SamplingParams
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import form
from workers.ranks.runner import Runner
from workers.scheduling.plan import RowStart, RowWork, StepPlan

found = {True: [], False: []}
knobs.compilation.listener = lambda *, src, cache_hit, **_: found[cache_hit].append(src.name)
folder, engine = sys.argv[1], EngineConfig.model_validate(json.loads(sys.argv[2]) | {"device": "cuda", "num_blocks": 64})
context = form(ParallelLayout(), 0, None, device=torch.device("cuda", 0))
runner = Runner(Checkpoint.open(folder), ParallelLayout(), 0, engine, context)
runner.warm_up()
way = SamplingParams(max_tokens=4, seed=1)
ways = (replace(way, temperature=0.0), way, replace(way, top_p=0.5))
for count in (1, 2, 3, 4):
    for way in ways:
        starts = tuple(RowStart(row, (5,), (), way) for row in range(count))
        work = tuple(RowWork(row, 0, 1, (5,), (row,)) for row in range(count))
        runner.run(StepPlan(1, work, 0, starts=starts))
        runner.run(StepPlan(2, (), 0, ends=tuple(range(count))))
print(json.dumps({"hits": len(found[True]), "misses": found[False]}))
"""


def test_a_start_compiles_nothing_that_was_compiled_ahead(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", max_position_embeddings=2048, head_dim=64)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    card = "h200" if "H200" in torch.cuda.get_device_name() else "h100"
    command = ["kernels", "compile", str(folder), f"--card={card}", f"--out={tmp_path / 'kernels'}", *words]
    subprocess.run([sys.executable, "-m", "cluster.cli", *command], cwd=ROOT, check=True)
    environment = os.environ | {
        "HEADRACE_KERNELS": str(tmp_path / "kernels"),
        "TRITON_CACHE_MANAGER": "kernels.shipped:ShippedCache",
        "TRITON_CACHE_DIR": str(tmp_path / "own"),
    }
    arguments = [sys.executable, "-c", START, str(folder), json.dumps(ENGINE)]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["misses"] == []
    assert found["hits"] > 20
