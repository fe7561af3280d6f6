"""Says so when the installed torch is not the CPU's: `python tools/torch_build.py`."""

import importlib.util
import pathlib
import runpy
import sys
from typing import Any


def cuda_of(version_file: pathlib.Path) -> tuple[str, str | None]:
    """(version, CUDA version or None), without importing torch, which takes seconds."""
    said: dict[str, Any] = runpy.run_path(str(version_file))
    return str(said["__version__"]), said.get("cuda")


def main() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("setup: torch is not installed")
    version, cuda = cuda_of(pathlib.Path(spec.origin).with_name("version.py"))
    if cuda is not None:
        print(
            f"setup: torch {version} is a build for CUDA {cuda}: it runs on the CPU too, and takes gigabytes. torch's own "
            f"index for CPUs (its installation page names it) has a smaller one: {sys.executable} -m pip install "
            f"--index-url INDEX --force-reinstall torch=={version.partition('+')[0]}"
        )


if __name__ == "__main__":
    main()
