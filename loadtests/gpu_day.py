"""A GPU host's short time, spent in order: every part is done once, within its own time, and the same command goes on.

    python -m loadtests.gpu_day [--seconds 560] [--traces azure=FILE mooncake=FILE] [--pack FILE.tgz]
                                [--peer "COMMAND"] [--pair-peer "COMMAND"]
    python -m loadtests.gpu_day --list [--gpus 2]     # what would be run

What was done is kept in --state, with every part's output; copy that folder to a fresh host and it goes on there. --pack is
written anew after each part. A part that failed is not run again but by --again; one that was cut is, after the others.
--peer prints one JSON line of another engine's figures on this card, --pair-peer one for each of the words pd and agg that
follow it: they become the peers of our own rows (loadtests.bench_gpu, loadtests.vllm_pair). The table at the end has each
row that must or aims, of all parts done so far.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.gpu_day_parts import PAIR_PEER, PEER, Host, Part, plan, rows_of_peer
from loadtests.left_behind import adopt_orphans, children, end_all_below
from workers.kv.links.endpoint import this_machine

PEER_USUAL, PEER_MOST = 300.0, 420.0
LEAST_SECONDS = 15.0


@dataclass
class Day:
    """Owns the state folder: a line for each part that was run, outputs, and what peers said."""

    folder: Path
    commands: dict[str, str]  # of peers

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._record = self.folder / "parts.jsonl"

    def status(self) -> dict[str, str]:
        """Of each part that was run, how its last run ended. What a peer said on another host is no peer of ours here."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        found = {part["name"]: part["status"] for part in map(json.loads, lines)}
        return {
            name: status
            for name, status in found.items()
            if name not in (PEER, PAIR_PEER) or status != "done" or self.said_by_peer(name).exists()
        }

    def note(self, name: str, status: str, seconds: float) -> None:
        with self._record.open("a") as lines:
            lines.write(json.dumps({"name": name, "status": status, "seconds": round(seconds, 1)}) + "\n")

    def log(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '-')}.log"

    def said_by_peer(self, name: str) -> Path:
        return self.folder / f"{name}-{this_machine()[:8] or 'host'}.json"

    def run(self, part: Part, seconds: float) -> str:
        arguments = [sys.executable, *part.arguments]
        said = self.said_by_peer(PEER if part.peer == "--peer" else PAIR_PEER)
        if part.peer and said.exists():
            arguments += [part.peer, str(said)]
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": part.devices} if part.devices else {})}
        code = self._run(arguments, environment, self.log(part.name), seconds)
        if code is None:
            return "cut"
        if code == 0 and part.done_when and part.done_when not in self.log(part.name).read_text():
            return "cut"
        return "done" if code == 0 else "failed"

    def ask_peer(self, name: str, seconds: float) -> str:
        """Of the pair's, its two modes one after the other."""
        lines: list[str] = []
        began = time.monotonic()
        for mode in ("pd", "agg") if name == PAIR_PEER else ("",):
            command = [*shlex.split(self.commands[name]), *([mode] if mode else [])]
            log = self.log(f"{name}{mode}")
            code = self._run(["env", *command], dict(os.environ), log, seconds - (time.monotonic() - began))
            if code is None:
                return "cut"
            found = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
            if code or not found:
                return "failed"
            lines.append(found[-1])
        said = self.said_by_peer(name)
        if name == PEER:
            said.write_text(json.dumps({"name": "vLLM", "rows": rows_of_peer(json.loads(lines[0]))}))
        else:
            said.write_text("\n".join(lines) + "\n")
        return "done"

    def _run(self, command: Sequence[str], environment: dict[str, str], log: Path, seconds: float) -> int | None:
        """The exit status; None where time was over. What it started is gone when this returns."""
        others = children()
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                return process.wait(max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                return None
            finally:
                end_all_below(others)
                process.wait()

    def pack(self, into: Path, parts: Sequence[Part]) -> None:
        with tarfile.open(into, "w:gz") as archive:
            archive.add(self.folder, self.folder.name)
            for part in parts:
                if part.out is not None:
                    for path in (part.out, part.out.with_suffix(".jsonl"), part.out.with_suffix(".png")):
                        if path.exists():
                            archive.add(path)

    def table(self, parts: Sequence[Part]) -> Iterator[str]:
        status = self.status()
        for name in (each for each in status if not any(each == part.name and part.out for part in parts)):
            yield f"{name:28} {status[name]:8} {last_line(self.log(name))}"
        for part in parts:
            if part.out is None or status.get(part.name) is None:
                continue
            yield f"{part.name:28} {status[part.name]}"
            if status[part.name] == "failed" or not part.out.exists():
                yield f"  {last_line(self.log(part.name))}"
                continue
            for row in json.loads(part.out.read_text())["rows"]:
                if row["must"] is not None or row["aim"] is not None or row["ratio"] is not None:
                    yield line_of(row)


def line_of(row: dict[str, float | str | bool | None]) -> str:
    def shown(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, int | float) else "-"

    verdict = {True: "met", False: "MISSED", None: ""}[row["met"] if isinstance(row["met"], bool) else None]
    numbers = " ".join(f"{shown(row[name]):>9}" for name in ("value", "must", "aim", "ratio"))
    return f"  {str(row['name'])[:60]:60} {numbers} {row['unit']!s:8} {verdict}"


def last_line(log: Path) -> str:
    """That says something to a reader: a result's JSON is in its file."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip()[:160] for line in reversed(lines) if line.strip() and not line.startswith("{")), "")


def in_turn(parts: Sequence[str], status: dict[str, str]) -> list[str]:
    """What is left to do: what was never run, then what was cut."""
    fresh = [name for name in parts if name not in status]
    return fresh + [name for name in parts if status.get(name) == "cut"]


def spend(day: Day, host: Host, seconds: float, pack: Path | None) -> None:
    deadline = time.monotonic() + seconds
    parts = {part.name: part for part in plan(host)}
    peers = {name for name in (PEER, PAIR_PEER) if name in day.commands}
    order = names_of(host, peers)
    for name in in_turn(order, day.status()):
        left = deadline - time.monotonic()
        usual, most = (PEER_USUAL, PEER_MOST) if name in peers else (parts[name].usual, parts[name].most)
        if left < max(usual, LEAST_SECONDS):
            print(f"{name}: {left:.0f} s are left, it takes {usual:.0f}", flush=True)
            continue
        began, limit = time.monotonic(), min(most, left)
        print(f"{name} …", flush=True)
        status = day.ask_peer(name, limit) if name in peers else day.run(parts[name], limit)
        took = time.monotonic() - began
        day.note(name, status, took)
        print(f"{name}: {status} after {took:.0f} s: {last_line(day.log(name))}", flush=True)
        if pack is not None:
            day.pack(pack, list(parts.values()))


def names_of(host: Host, peers: set[str]) -> list[str]:
    """Parts and peers' benches, which stand before ours, in order."""
    names: list[str] = []
    for part in plan(host):
        needs = {"--peer": PEER, "--vllm": PAIR_PEER}.get(part.peer)
        names += [needs] if needs in peers else []
        names.append(part.name)
    return names


def found_here() -> tuple[str, int]:
    """The card and how many, asked in a process of its own: this one holds no memory of a device."""
    ask = (
        "import torch; from kernels.tuning import card; print(card(torch.device('cuda', 0)), torch.cuda.device_count())"
    )
    card, num_gpus = subprocess.run(
        [sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    return card, int(num_gpus)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call")
    parser.add_argument("--traces", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--peer", help="prints another engine's figures on one GPU as a JSON line")
    parser.add_argument("--pair-peer", help="the same of its prefill and decode pair; gets the word pd, then agg")
    parser.add_argument("--state", type=Path, default=Path(".headrace/gpu-day"))
    parser.add_argument("--pack", type=Path, help="an archive of all results, written anew after each part")
    parser.add_argument("--again", nargs="*", default=[], help="parts to run once more")
    parser.add_argument("--gpus", type=int, help="default: as many as there are")
    parser.add_argument("--card", help="as files are named; default: as the device says")
    parser.add_argument("--list", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if arguments.list:
        card, num_gpus = arguments.card or "h200", arguments.gpus or 1
    else:
        card, num_gpus = arguments.card, arguments.gpus
        if card is None or num_gpus is None:
            found_card, found_gpus = found_here()
            card, num_gpus = card or found_card, num_gpus or found_gpus
    host = Host(card, num_gpus, dict(each.split("=", 1) for each in arguments.traces))
    commands = {PEER: arguments.peer, PAIR_PEER: arguments.pair_peer}
    day = Day(arguments.state, {name: command for name, command in commands.items() if command})
    if arguments.list:
        status = day.status()
        for part in plan(host):
            print(
                f"{status.get(part.name, ''):7} {part.name:28} {part.usual:4.0f} s  python {' '.join(part.arguments)}"
            )
        return 0
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in arguments.again:
        day.note(name, "cut", 0)
    spend(day, host, arguments.seconds, arguments.pack)
    lines = list(day.table(plan(host)))
    (arguments.state / "summary.txt").write_text("\n".join(lines) + "\n")
    print(f"\n{'':62} {'measured':>9} {'must':>9} {'aim':>9} {'ratio':>9}", *lines, sep="\n", flush=True)
    left = in_turn(names_of(host, set(day.commands)), day.status())
    print(f"left: {', '.join(left)}" if left else "nothing is left", flush=True)
    if arguments.pack is not None:
        day.pack(arguments.pack, plan(host))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
