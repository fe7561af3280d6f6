"""Pulls between workers of unlike layouts: 2×1 → 1×1 and 1×1 → 2×1, each rank a process that sees one GPU of three.

    python -m loadtests.bench_reshard [--devices 0,1,2]
    python -m loadtests.bench_reshard --try         # small pools in host memory, over gloo: that it runs, not how fast

into_one_gbps    512 MiB of 128 scattered blocks, into one GPU out of two that hold half of the heads each: bytes over the
                 time from the call of `PeerLinks.pull` to its end, as a worker's rank pulls
out_of_one_gbps  the same out of one GPU into two at once: both's bytes over the time in which either pulls
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import torch

from headrace.errors import HeadraceError
from headrace.values import ParallelLayout
from loadtests.report import Report, Row, add_arguments, cpu
from workers.kv.layout import ModelShape, SlabLayout, shard
from workers.kv.links import schemes
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt
from workers.kv.links.peers import PeerLinks
from workers.kv.pool import KvPool

SHAPE, NUM_BLOCKS, NUM_PULLED = ModelShape(num_layers=32, num_kv_heads=8, head_dim=128, num_heads=32), 2048, 128
SMALL, SMALL_BLOCKS, SMALL_PULLED = ModelShape(num_layers=2, num_kv_heads=2, head_dim=8, num_heads=2), 64, 16
ONE, TWO = ParallelLayout(1, 1), ParallelLayout(2, 1)
RUNS, WARM_UP = 9, 3


class RankSide:
    """What one rank's process holds."""

    def __init__(self, layout: ParallelLayout, rank: int, *, small: bool) -> None:
        torch.set_num_threads(1)
        self.shape, num_blocks = (SMALL, SMALL_BLOCKS) if small else (SHAPE, NUM_BLOCKS)
        mine = shard(self.shape, layout, rank)
        slab = SlabLayout(mine.num_kv_heads, mine.num_layers, 32, self.shape.head_dim, 2)
        device = torch.device("cpu") if small else torch.device("cuda", 0)
        self.pool = KvPool(slab, num_blocks, torch.bfloat16, device)
        self.pool.tensor.normal_()
        self.pool.settle()
        self.server = schemes.serve(self.pool, "127.0.0.1", 10.0)
        self.links = PeerLinks(self.pool, self.server.endpoint, rank, layout, self.shape, 10.0)
        self._draw = random.Random(rank)

    def blocks(self, count: int) -> list[BlockPull]:
        every = range(self.pool.num_blocks)
        pairs = zip(self._draw.sample(every, count), self._draw.sample(every, count), strict=True)
        return [BlockPull(source, 0, target) for source, target in pairs]

    def pull(self, peer: PeerRanks, blocks: Sequence[BlockPull]) -> tuple[float, float, int]:
        """When it began and ended, by the clock that all processes of a machine share, and the bytes."""
        outcome: Future[PullReceipt | HeadraceError] = Future()
        began = time.monotonic()
        self.links.pull(peer, blocks, outcome.set_result)
        found = outcome.result()
        ended = time.monotonic()
        if isinstance(found, HeadraceError):
            raise found
        return began, ended, found.num_bytes


class Rank:
    """A rank's process, asked line by line."""

    def __init__(self, layout: ParallelLayout, rank: int, device: str, *, small: bool) -> None:
        asked = json.dumps([layout.tp, rank, small])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loadtests.bench_reshard", "--rank", asked],
            env={**os.environ, **({} if small else {"CUDA_VISIBLE_DEVICES": device})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> "Rank":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def be_rank(asked: str) -> None:
    """Says where its pool can be read; then pulls so many blocks of a peer (its tp and endpoints) whenever it is told."""
    tp, rank, small = json.loads(asked)
    side = RankSide(ParallelLayout(tp, 1), rank, small=small)
    print(json.dumps(side.server.endpoint), flush=True)
    for line in sys.stdin:
        theirs, endpoints, count = json.loads(line)
        peer = PeerRanks("peer", 1, ParallelLayout(theirs, 1), tuple(endpoints))
        print(json.dumps(side.pull(peer, side.blocks(count))), flush=True)


def pulls_gbps(targets: Sequence[Rank], tp: int, endpoints: Sequence[str], count: int) -> list[float]:
    """All targets' bytes over the time in which one of them pulled."""
    samples = []
    for _ in range(WARM_UP + RUNS):
        for target in targets:
            target.tell([tp, list(endpoints), count])
        found = [target.hear() for target in targets]
        seconds = max(ended for _, ended, _ in found) - min(began for began, _, _ in found)
        samples.append(sum(num_bytes for *_, num_bytes in found) / seconds / 1e9)
    return samples[WARM_UP:]


def measure(report: Report, devices: Sequence[str], *, small: bool) -> None:
    count = SMALL_PULLED if small else NUM_PULLED
    for name, source, target in (("into_one_gbps", TWO, ONE), ("out_of_one_gbps", ONE, TWO)):
        ranks = [(source, rank) for rank in range(source.tp)] + [(target, rank) for rank in range(target.tp)]
        with ExitStack() as stack:
            started = [
                stack.enter_context(Rank(layout, rank, device, small=small))
                for (layout, rank), device in zip(ranks, devices, strict=True)
            ]
            endpoints = [rank.hear() for rank in started]
            samples = pulls_gbps(started[source.tp :], source.tp, endpoints[: source.tp], count)
        must, aim = (None, None) if small else (340.0, 370.0)
        report.add(Row(name, statistics.median(samples), "GB/s", "higher", must, aim, samples))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--devices", default="0,1,2", help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--try", dest="tiny", action="store_true", help="small pools in host memory")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.rank:
        be_rank(arguments.rank)
        return 0
    hardware = cpu() if arguments.tiny else f"3 × {torch.cuda.get_device_properties(0).name}"
    report = Report("reshard", ("torch", "triton"), hardware=hardware)
    measure(report, arguments.devices.split(","), small=arguments.tiny)
    return report.close(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
