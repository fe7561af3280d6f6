"""The form of every benchmark's result: one JSON object, the last line on stdout, and in docs/benchmarks/ by --out."""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

CALIBRATION_ROUNDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `better` is "lower" or "higher"; `ratio` is ours against the peer of the same run, higher is better."""

    name: str
    value: float
    unit: str
    better: str
    must: float | None = None
    aim: float | None = None
    samples: Sequence[float] = ()
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    note: str = ""
    detail: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.must is None:
            return None
        return self.value <= self.must if self.better == "lower" else self.value >= self.must

    def as_json(self) -> dict[str, Any]:
        found = asdict(self) | {"met": self.met, "samples": list(self.samples)}
        return {key: value for key, value in found.items() if value or key not in ("note", "detail")}


@dataclass
class Report:
    """Collects the rows of a run; `packages` are those whose versions matter to its figures."""

    bench: str
    packages: Sequence[str] = ()
    hardware: str = field(default_factory=lambda: cpu())
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        limits = ", ".join(
            f"{name} {value:g}" for name, value in (("must", row.must), ("aim", row.aim)) if value is not None
        )
        print(
            f"  {row.name:28} {row.value:12.4g} {row.unit:10} {limits}{'' if row.met in (None, True) else '  MISSED'}",
            flush=True,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "commit": commit(),
            "command": command(),
            "hardware": self.hardware,
            "versions": {"python": platform.python_version(), **versions(self.packages)},
            "date": datetime.now(UTC).date().isoformat(),
            "calibration_ms": round(calibrate() * 1e3, 2),
            "rows": [row.as_json() for row in self.rows],
        }

    def close(self, arguments: argparse.Namespace) -> int:
        """Writes and prints the result; the exit status. Arguments are those of add_arguments."""
        result = self.as_json()
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result), flush=True)
        return 1 if arguments.gate and any(row.met is False for row in self.rows) else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gate", action="store_true", help="exit 1 when a row misses its must")
    parser.add_argument("--out", type=pathlib.Path, help="where the result is written too")


def calibrate(repeats: int = 5) -> float:
    """Seconds of a fixed loop: how fast this interpreter is here and now, beside figures that depend on it."""

    def loop() -> None:
        total = 0
        for number in range(CALIBRATION_ROUNDS):
            total += number & 7

    return statistics.median(timed(loop, repeats))


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


def command() -> str:
    """What was run; of files elsewhere on this machine, the name alone."""
    parts = [pathlib.Path(part).name if pathlib.Path(part).is_absolute() else part for part in sys.argv[1:]]
    return " ".join(["python -m", f"loadtests.{pathlib.Path(sys.argv[0]).stem}", *parts])


def commit() -> str:
    """The commit that was measured: HEADRACE_COMMIT, else git's; "+" when files differ from it."""
    if known := os.environ.get("HEADRACE_COMMIT"):
        return known
    head = _git("rev-parse", "--short", "HEAD")
    return head + ("+" if head and _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    try:
        found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def cpu() -> str:
    """Model, cores and memory of this machine, as far as it tells."""
    model = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    memory = pathlib.Path("/proc/meminfo")
    size = ""
    if memory.exists():
        size = f", {int(memory.read_text(encoding='utf-8').split()[1]) / 2**20:.0f} GiB"
    return f"{model}, {os.cpu_count()} cores{size}"
