"""What `headrace kernels compile` made without a device is all that a worker launches on one: nothing is compiled there."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from kernels.tuning import card
from tests.conftest import ROOT
from tests.tiny import make_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(400)]

SIZES = {"block_size": 16, "max_num_seqs": 8, "max_step_tokens": 128}
COMPILE = "from cluster.cli import main; main()"
SERVE = f"""
import sys, pathlib, torch
from headrace.config import EngineConfig
from headrace.values import ParallelLayout
from tests.model_steps import Steps, decodes, prompts
from workers.models.parallel import form
engine = EngineConfig(device="cuda", dtype="bfloat16", num_blocks=64, **{SIZES})
steps = Steps.of(pathlib.Path(sys.argv[1]), form(ParallelLayout(), 0, None, device=torch.device("cuda")), engine)
steps.runner.warm_up()
prompts(steps)
print(decodes(steps))
"""


def test_a_worker_compiles_nothing_that_was_compiled_ahead(tmp_path: pathlib.Path) -> None:
    """Its own cache holds no kernel after a start, prompts whole, in chunks and behind a cached prefix, and decodes."""
    model, shipped, own = make_checkpoint(tmp_path / "llama"), tmp_path / "shipped", tmp_path / "own"
    options = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    named = card(torch.device("cuda", 0))
    command = ["kernels", "compile", str(model), "--card", named, "--out", str(shipped), *options]
    run(COMPILE, command)
    made = list(shipped.rglob("*.cubin"))
    assert made
    manager = {"TRITON_CACHE_MANAGER": "kernels.shipped:ShippedCache", "HEADRACE_KERNELS": str(shipped)}
    run(SERVE, [str(model)], {**manager, "TRITON_CACHE_DIR": str(own)})
    assert sorted(path.name for path in own.rglob("*.cubin")) == []
    assert sorted(shipped.rglob("*.cubin")) == sorted(made), "what is shipped is read only"


def run(program: str, arguments: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
