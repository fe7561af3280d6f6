"""Which settings of an nccl link are the fastest here, all in one call: `loadtests.bench_link --scheme nccl --sweep`.

Links of all settings are pulled from in turn, round after round, so that a host that changes meanwhile changes all of them;
a row's samples are its rounds' medians. What NCCL reads from the environment once a process is tried in processes of its
own, each of which begins with main's settings again: a row is to be compared with those of its own process. It counts as
better where its worst round is above main's median there.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.errors import HeadraceError
from loadtests.link_schemes import GPU, Scheme
from loadtests.report import Report, Row
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import BlockPull, KvLink
from workers.kv.links.nccl import SETTINGS, Settings, link, serve
from workers.kv.links.staged import Cut
from workers.kv.pool import KvPool

MIB = 2**20
ROUNDS, PULLS = 5, 5
SIZES = (32, 128)  # blocks of 4 MiB
MUST_BLOCKS = 128

CANDIDATES = (
    SETTINGS,
    replace(SETTINGS, thread_blocks=64),
    replace(SETTINGS, thread_blocks=24),
    replace(SETTINGS, copy_programs=96),
    replace(SETTINGS, cut=Cut(96 * MIB, 3)),
    replace(SETTINGS, cut=Cut(128 * MIB, 3), thread_blocks=64),
    replace(SETTINGS, cut=Cut(48 * MIB, 4), thread_blocks=64),
    replace(SETTINGS, cut=Cut(32 * MIB, 6)),
)
# By name: what NCCL is told, and what is tried there. Buffers of half the size take half the memory of 64 thread blocks; a
# send by the copy engine leaves multiprocessors alone.
ENVIRONMENTS: dict[str, tuple[dict[str, str], Sequence[Settings]]] = {
    "": ({}, CANDIDATES),
    "buffer=2MiB": ({"NCCL_BUFFSIZE": str(2 * MIB)}, (SETTINGS, replace(SETTINGS, thread_blocks=64))),
    "copy engine": ({"NCCL_P2P_USE_CUDA_MEMCPY": "1"}, (SETTINGS,)),
}


def name_of(settings: Settings) -> str:
    blocks = "own" if settings.thread_blocks is None else settings.thread_blocks
    cut = settings.cut
    return f"message={cut.message_bytes // MIB},depth={cut.depth},programs={settings.copy_programs},blocks={blocks}"


def sweep(report: Report, device: str) -> None:
    """`device`: the source's GPU. A process of settings that fails, or takes too long, is a note and no row."""
    for name, (told, candidates) in ENVIRONMENTS.items():
        environment = {**os.environ, **told, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
        command = [sys.executable, "-m", "loadtests.link_sweep", "target", name, device]
        try:
            ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            print(f"link settings {name or 'as NCCL has them'}: not over after 120 s", flush=True)
            continue
        lines = ended.stdout.splitlines()
        if ended.returncode or not lines:
            print(f"link settings {name or 'as NCCL has them'}: failed with {ended.returncode}", flush=True)
            continue
        for row in rows_of(name, json.loads(lines[-1]), candidates):
            report.add(row)
    last = [row for row in report.rows if row.name.startswith(f"nccl_{MUST_BLOCKS * 4}mib_gbps@")]
    for row in sorted(last, key=lambda row: -row.value)[:3]:
        print(f"{row.value:6.1f} GB/s, {row.ratio or 0:.3f} of main's: {row.name.partition('@')[2]}; {row.note}")


def rows_of(name: str, found: dict[str, dict[str, list[float]]], candidates: Sequence[Settings]) -> list[Row]:
    """Of one process: GB/s of each round by settings and number of blocks; and which settings are the best there."""
    rows: list[Row] = []
    main = found.get(name_of(candidates[0]))
    if main is None:
        return rows
    for settings in candidates:
        for count, rounds in found.get(name_of(settings), {}).items():
            middle = statistics.median(rounds)
            better = settings != candidates[0] and min(rounds) > statistics.median(main[count])
            label = name_of(settings) + (f",{name}" if name else "")
            note = "better than main's settings in the same process" if better else ""
            rows.append(
                Row(
                    f"nccl_{int(count) * 4}mib_gbps@{label}",
                    middle,
                    "GB/s",
                    "higher",
                    samples=rounds,
                    note=note,
                    peer=statistics.median(main[count]),
                    peer_name="main's settings",
                    ratio=middle / statistics.median(main[count]),
                )
            )
    return rows


def _blocks(draw: random.Random, num_blocks: int, count: int) -> list[BlockPull]:
    every = range(num_blocks)
    return [
        BlockPull(source, 0, target)
        for source, target in zip(draw.sample(every, count), draw.sample(every, count), strict=True)
    ]


def _gbps(joined: KvLink, blocks: list[BlockPull], whole: Piece) -> float:
    began = time.perf_counter()
    receipt = joined.pull(blocks, whole)
    return receipt.num_bytes / (time.perf_counter() - began) / 1e9


def pull_in_turn(name: str, device: str, slab: SlabLayout) -> dict[str, dict[str, list[float]]]:
    """The target's process, whose source sees `device` alone."""
    candidates = ENVIRONMENTS[name][1]
    source = subprocess.Popen(
        [sys.executable, "-m", "loadtests.link_sweep", "source", name],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pool = _pool()
        assert source.stdout is not None
        endpoints: list[str] = json.loads(source.stdout.readline())
        whole, draw = Piece(0, 0, 0, 0, slab.num_kv_heads, 0, 0, slab.num_layers), random.Random(0)
        links = {
            name_of(settings): link(endpoint, pool, 30.0, settings)
            for settings, endpoint in zip(candidates, endpoints, strict=True)
        }
        found: dict[str, dict[str, list[float]]] = {}
        for _ in range(ROUNDS):
            for label, joined in list(links.items()):
                try:
                    for count in SIZES:
                        rates = [_gbps(joined, _blocks(draw, pool.num_blocks, count), whole) for _ in range(PULLS + 2)]
                        found.setdefault(label, {}).setdefault(str(count), []).append(statistics.median(rates[2:]))
                except HeadraceError as error:
                    print(f"{label}: {error}", file=sys.stderr, flush=True)
                    del links[label]
                    found.pop(label, None)
        return found
    finally:
        source.kill()


def _pool() -> KvPool:
    return Scheme("nccl").pool()


def _serve(name: str) -> None:
    pool = _pool()
    servers = [serve(pool, "127.0.0.1", 30.0, settings=settings) for settings in ENVIRONMENTS[name][1]]
    print(json.dumps([server.endpoint for server in servers]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "source":
        _serve(sys.argv[2])
    else:
        print(json.dumps(pull_in_turn(sys.argv[2], sys.argv[3], GPU)), flush=True)
    os._exit(0)  # over threads that sit in calls of a communication library
