"""What `headrace kernels` does with a tiny model, in a process where Triton compiles: tests of kernels interpret them.

python -m tests.kernels_ahead FOLDER        # prints JSON
"""

import json
import os
import pathlib
import shutil
import sys
from typing import Any

import torch
from triton import knobs

from cluster.commands.kernels import launched
from kernels.ahead import Launched, without_device
from kernels.silu_mul import silu_mul
from kernels.tuning import RowTile
from tests.tiny import make_checkpoint

ENGINE: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16, "max_num_seqs": 16, "max_step_tokens": 1280}


def compiled(width: int) -> list[bool | None]:
    """Whether each of a launch's kernels was there."""
    found: list[Launched] = []
    with without_device(90, found.append):
        x = torch.empty(3, 2 * width, dtype=torch.bfloat16, device="meta")
        silu_mul(x, torch.empty(3, width, dtype=torch.bfloat16, device="meta"), RowTile(1024, 4))
    return [one.cached for one in found]


def files(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def main(folder: pathlib.Path) -> None:
    model = str(make_checkpoint(folder / "tiny", "llama", max_position_embeddings=2048))
    listed = launched(models=(model,), card="h200", tps=(1, 2), deterministic=True, compile_them=False, **ENGINE)
    filled, shipped = folder / "filled", folder / "elsewhere"
    knobs.cache.dir = str(filled)
    twice = [compiled(64), compiled(64)]
    shutil.move(filled, shipped)  # as an image is filled at one place, and mounted at another
    before = files(shipped)
    os.environ["HEADRACE_KERNELS"] = str(shipped)
    knobs.cache.dir = str(folder / "own")
    from kernels.shipped import ShippedCache

    knobs.cache.manager_class = ShippedCache
    print(
        json.dumps(
            {
                "listed": sorted({one.kernel for one in listed}),
                "twice": twice,
                "shipped": compiled(64),
                "not shipped": [compiled(48), compiled(48)],
                "written": sorted(set(files(shipped)) ^ set(before)),
            }
        )
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
