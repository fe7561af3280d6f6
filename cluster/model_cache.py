"""Where models that are named rather than given as folders live on this machine."""

import os
import pathlib

from workers.models import fetch
from workers.models.gguf_source import Progress


def cache_folder(name: str) -> pathlib.Path:
    """$XDG_CACHE_HOME/headrace/models/<name>, or the same under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "headrace" / "models" / name


def local_source(model: str, progress: Progress = fetch.no_progress) -> str:
    """A known name or a .gguf file as the checkpoint folder made of it, once; folders and hub ids stay as they are."""
    if pathlib.Path(model).is_dir() or not (model in fetch.KNOWN or model.endswith(".gguf")):
        return model
    return str(fetch.fetch(model, cache_folder(pathlib.PurePath(model).name.removesuffix(".gguf")), progress))
