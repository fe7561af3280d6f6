"""How soon an 8B model is ready to serve, from a checkpoint in the page cache: rows of loadtests.bench_gpu.

A process of its own is timed from its start to the end of the warm-up, twice: with an empty kernel cache (ready_cold_s),
and with what that one left in it (ready_s). Its phases, in seconds: imports (and the interpreter), device (the CUDA
context), model (allocation), weights (files to their place), warm_up (kernels, the library's plans, graphs).
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SHARDS, WRITERS = 16, 4
NEEDED_BYTES = 20 * 2**30


def write_checkpoint(folder: pathlib.Path, shape: dict[str, Any]) -> None:
    """Random weights, as sharded safetensors."""
    import torch
    from safetensors.torch import save_file

    from headrace.values import ParallelLayout
    from kernels.reference import ReferenceOps
    from workers.models.checkpoint import Checkpoint
    from workers.models.parallel import RankContext
    from workers.models.transformer import Transformer

    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    here = RankContext(ParallelLayout(), 0, torch.device("meta"))
    model = Transformer(Checkpoint.open(folder).config, here, ReferenceOps(), torch.bfloat16, 64)

    def save(shard: int) -> None:
        tensors = {
            item.name: torch.randn(item.shape, dtype=torch.bfloat16, device="cuda").mul_(0.02).cpu()
            for item in model.wanted[shard::SHARDS]
        }
        save_file(tensors, folder / f"model-{shard:05}.safetensors", metadata={"format": "pt"})

    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(save, range(SHARDS)))


def start(folder: str, began: float) -> dict[str, float]:
    """What the timed process does; seconds of each phase."""
    import torch

    from headrace.values import ParallelLayout
    from loadtests.one_rank import ENGINE
    from workers.models.checkpoint import Checkpoint
    from workers.models.parallel import form
    from workers.models.weights import LoadProgress, Wanted, load
    from workers.ranks.runner import Runner

    marks = {"imports": time.time()}
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    marks["device"] = time.time()

    def fill(checkpoint: Checkpoint, wanted: tuple[Wanted, ...], progress: LoadProgress) -> None:
        torch.cuda.synchronize()
        marks["model"] = time.time()
        load(checkpoint, wanted, progress)
        torch.cuda.synchronize()
        marks["weights"] = time.time()

    context = form(ParallelLayout(), 0, None, device=torch.device("cuda", 0))
    runner = Runner(Checkpoint.open(folder), ParallelLayout(), 0, ENGINE, context, fill=fill)
    runner.warm_up()
    torch.cuda.synchronize()
    marks["warm_up"] = time.time()
    moments = [began, *marks.values()]
    return {name: round(end - begin, 2) for name, begin, end in zip(marks, moments, moments[1:], strict=False)}


def timed_start(folder: pathlib.Path, kernel_cache: pathlib.Path) -> tuple[float, dict[str, float]]:
    """Seconds from the start of a process to ready, and its phases."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kernel_cache)}
    began = time.time()
    command = [sys.executable, "-m", "loadtests.gpu_start", str(folder), str(began)]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    phases: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return sum(phases.values()), phases


def measure(shape: dict[str, Any], folder: pathlib.Path | None) -> list[tuple[str, float, str]]:
    """(row, seconds, note) of a cold and of a warm start, from a checkpoint of this shape that is written first, or lies in
    `folder` already: in memory, as a page cache does."""
    memory = pathlib.Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > NEEDED_BYTES
    with tempfile.TemporaryDirectory(dir=memory if folder is None and roomy else None) as name:
        scratch = pathlib.Path(name)
        if folder is None:
            folder = scratch
            write_checkpoint(folder, shape)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**30
        rows = []
        for row in ("ready_cold_s", "ready_s"):
            seconds, phases = timed_start(folder, scratch / "kernels")
            rows.append((row, seconds, f"{size:.1f} GiB; " + ", ".join(f"{k} {v:.2f}" for k, v in phases.items())))
        return rows


if __name__ == "__main__":
    print(json.dumps(start(sys.argv[1], float(sys.argv[2]))))
