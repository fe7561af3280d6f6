"""Ending what a program leaves behind when it is killed: workers in sessions of their own would keep a GPU's memory."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
MOST_SECONDS = 10.0


def adopt_orphans() -> None:
    """From here on, who loses its parent below this process becomes its child; where the kernel knows no such setting,
    nothing changes."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), *(ctypes.c_ulong(0),) * 3)


def children() -> list[int]:
    """Of this process, whichever of its threads started them."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def end_all_below(but: Collection[int] = ()) -> None:
    """Kills every child but these, and whoever becomes one by that, until there is none."""
    deadline = time.monotonic() + MOST_SECONDS
    while (left := set(children()).difference(but)) and time.monotonic() < deadline:
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
