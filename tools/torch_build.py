"""Says so when the installed torch is not the CPU's: `python tools/torch_build.py INDEX`, where INDEX has that one."""

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
            f"setup: torch {version} is a build for CUDA {cuda}: it runs on the CPU too, and takes gigabytes. For the "
            f"CPU's: {sys.executable} -m pip install --index-url {sys.argv[1]} --force-reinstall torch=="
            f"{version.partition('+')[0]}"
        )


if __name__ == "__main__":
    main()
