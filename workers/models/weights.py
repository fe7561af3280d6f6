"""A rank's weights: the slices it wants, read from the safetensors files straight into their place.

The model allocates its tensors and lists what belongs in them; nothing but those slices is read, and no second copy of
a weight exists but for one slice a thread at a time. A few threads read: one alone keeps neither a disk nor the bus to a
device busy.
"""

import os
import pathlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.errors import CheckpointError
from workers.models.checkpoint import Checkpoint

Span = tuple[int, int]
# What holds weights as they are. Others (FP8, INT8, …) are quantised: their values mean something with a scale alone.
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
LoadProgress = Callable[[int, int], None]
NUM_READERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows (and columns, for matrices) of one checkpoint tensor, and the tensor of ours that they fill.

    `shape` is what the whole tensor must have. `columns` None: all.
    """

    name: str
    shape: tuple[int, ...]
    target: Tensor
    rows: Span
    columns: Span | None = None


def no_progress(done: int, total: int) -> None:
    """For callers who show none."""


def load(checkpoint: Checkpoint, wanted: Iterable[Wanted], progress: LoadProgress = no_progress) -> None:
    """Fills every target; `progress` is told (tensors done, tensors wanted). CheckpointError names the file and the
    tensor that is missing, cut short, of another shape, or quantised."""
    by_name: defaultdict[str, list[Wanted]] = defaultdict(list)
    for item in wanted:
        by_name[item.name].append(item)
    total, done, told = len(by_name), 0, threading.Lock()

    def filled() -> None:
        nonlocal done
        with told:
            done += 1
            progress(done, total)

    parts: list[tuple[pathlib.Path, list[list[Wanted]]]] = []
    for path in checkpoint.weight_files:
        with _opened(path) as file:
            here = [by_name.pop(name) for name in sorted(by_name.keys() & set(file.keys()))]
        parts += [(path, here[first::NUM_READERS]) for first in range(min(NUM_READERS, len(here)))]
    if parts and (device := parts[0][1][0][0].target.device).type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # what held the targets' memory before is done with it
    with ThreadPoolExecutor(NUM_READERS, "weights") as readers:
        for reading in [readers.submit(_read, path, items, filled) for path, items in parts]:
            reading.result()
    if by_name:
        name = min(by_name)
        raise CheckpointError(
            f"{checkpoint.folder} holds no tensor {name!r} ({len(by_name)} of {total} are missing)",
            file=checkpoint.folder,
            tensor=name,
        )


def _read(path: pathlib.Path, tensors: Sequence[list[Wanted]], filled: Callable[[], None]) -> None:
    """On a thread of its own; for a CUDA device on a stream of its own, so that readers do not wait for each other."""
    device = tensors[0][0].target.device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with _opened(path) as file, nullcontext() if stream is None else torch.cuda.stream(stream):
        for items in tensors:
            for item in items:
                _fill(item, file.get_slice(item.name), str(path))
            filled()
    if stream is not None:
        stream.synchronize()


@contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}", file=path) from error


def _fill(item: Wanted, stored: Any, path: str) -> None:
    shape = tuple(stored.get_shape())
    if shape != item.shape:
        raise CheckpointError(
            f"{path}: tensor {item.name!r} must have shape {list(item.shape)}, got {list(shape)}",
            file=path,
            tensor=item.name,
        )
    dtype = stored.get_dtype()
    if dtype not in PLAIN_DTYPES:
        raise CheckpointError(
            f"{path}: tensor {item.name!r} must be one of {', '.join(PLAIN_DTYPES)}, got {dtype}: quantised checkpoints "
            "are not served",
            file=path,
            tensor=item.name,
        )
    rows = slice(*item.rows)
    part = stored[rows] if item.columns is None else stored[rows, slice(*item.columns)]
    item.target.copy_(part)
