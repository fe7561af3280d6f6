"""Whether something else was at work on a device while replays were timed, and what the device says of it.

A kernel's replays differ by a few percent. Where some take a multiple of the others, one after another or in turn, that is
another process on the same device: it gets slices of some milliseconds, so that short replays come whole or late and long
ones at half the rate. A slow clock makes all of them slow alike.
"""

import subprocess
from collections.abc import Callable, Sequence
from statistics import median

SLOW = 1.25  # times as long as most, on a device of one's own, is none

# Asks a device's tool for values, by its names.
Ask = Callable[[str], str]


def ask_nvidia_smi(names: str) -> str:
    """Nothing where there is no such tool, or it does not know."""
    command = ["nvidia-smi", f"--query-{names}", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def disturbed(durations: Sequence[float], ask: Ask = ask_nvidia_smi) -> str:
    """ "" where none took much longer than the quickest quarter; else how many, how much longer, how they lie among the
    others, and what the device tells."""
    if len(durations) < 4:
        return ""
    usual = median(sorted(durations)[: -(-len(durations) // 4)])
    slow = [each > SLOW * usual for each in durations]
    if not any(slow):
        return ""
    factor = median(each for each, is_slow in zip(durations, slow, strict=True) if is_slow) / usual
    pattern = "".join("s" if each else "." for each in slow)
    said = [f"{sum(slow)} of {len(slow)} took {factor:.2f} times as long ({pattern})"]
    if processes := ask("compute-apps=pid,used_memory").split("\n")[:-1]:
        said.append(f"{len(processes)} processes on the devices of this host")
    if clocks := ask("gpu=clocks.sm,clocks.mem,clocks_event_reasons.active"):
        said.append("clocks and reasons " + "; ".join(clocks.splitlines()))
    return ", ".join(said)
