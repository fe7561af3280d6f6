"""How fast a rank reads a peer's blocks over a link between two processes of this machine, and what the link costs.

    python -m loadtests.bench_link [--scheme gloo | nixl]      # host memory, beside a bare TCP stream of the same bytes
    python -m loadtests.bench_link --scheme nccl [--sweep]     # two GPUs, each process seeing its own; settings too

SCHEME_*_gbps        bytes over the time of `link.pull`, from the call to its return; blocks scattered on both sides
SCHEME_form_ms       a link's first pull, of one block
SCHEME_memory_bytes  what a formed link has taken of each GPU's memory, staging included, and of that once closed
SCHEME_killed_ms     from SIGKILL of the source in mid-pull to the pull's error; SCHEME_closed_ms: from close() beside a
                     pull whose source has been stopped
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from headrace.errors import HeadraceError
from loadtests.link_schemes import HOST, Scheme
from loadtests.report import Report, Row, add_arguments, cpu
from workers.kv.layout import Piece
from workers.kv.links.base import BlockPull, KvLink

RUNS = 9


def serve(scheme: Scheme) -> None:
    """The source's process: a pool to read from, and a bare stream of as many bytes as each connection asks for. Says how
    much memory its device has free, for each line that it is sent."""
    server = scheme.serve(scheme.pool())
    with socket.create_server(("127.0.0.1", 0)) as bare:
        print(json.dumps([server.endpoint, bare.getsockname()[1]]), flush=True)
        threading.Thread(target=_answer_bare, args=(bare, scheme), daemon=True).start()
        for _ in sys.stdin:
            print(scheme.free_bytes(), flush=True)
    server.close()


def _answer_bare(bare: socket.socket, scheme: Scheme) -> None:
    content = bytes(scheme.num_blocks * HOST.block_bytes)
    stream, _ = bare.accept()
    with stream:
        while asked := stream.recv(8):
            stream.sendall(memoryview(content)[: int.from_bytes(asked, "little")])


class Source:
    """A peer's process; with a GPU, one that sees the given one alone."""

    def __init__(self, scheme: Scheme, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loadtests.bench_link", "--scheme", scheme.name, "--serve"],
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": device} if scheme.on_gpu else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint, self.port = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def free_bytes(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self._line())

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def gigabytes_per_second(num_bytes: int, move: Callable[[Any], object], prepare: Callable[[], Any]) -> list[float]:
    """What `prepare` makes for each move is none of its time."""
    samples = []
    for _ in range(RUNS + 2):
        prepared = prepare()
        began = time.perf_counter()
        move(prepared)
        samples.append(num_bytes / (time.perf_counter() - began) / 1e9)
    return samples[2:]


def read_bare(stream: socket.socket, into: memoryview) -> None:
    stream.sendall(len(into).to_bytes(8, "little"))
    while into:
        into = into[stream.recv_into(into) :]


class Bench:
    def __init__(self, report: Report, scheme: Scheme, device: str) -> None:
        self.report, self.scheme, self.device = report, scheme, device
        self.pool = scheme.pool()
        self.whole = Piece(0, 0, 0, 0, scheme.slab.num_kv_heads, 0, 0, scheme.slab.num_layers)
        self._draw = random.Random(0)

    def blocks(self, count: int) -> list[BlockPull]:
        every = range(self.scheme.num_blocks)
        pairs = zip(self._draw.sample(every, count), self._draw.sample(every, count), strict=True)
        return [BlockPull(source, 0, target) for source, target in pairs]

    def pull(self, link: KvLink, count: int) -> None:
        link.pull(self.blocks(count), self.whole)

    def rates(self) -> None:
        name = self.scheme.name
        with Source(self.scheme, self.device) as source, socket.create_connection(("127.0.0.1", source.port)) as bare:
            free = source.free_bytes(), self.scheme.free_bytes()
            forming = []
            for _ in range(3):
                link = self.scheme.link(source.endpoint, self.pool)
                began = time.perf_counter()
                self.pull(link, 1)
                forming.append((time.perf_counter() - began) * 1e3)
                link.close()
            self.add("form_ms", statistics.median(forming), "ms", "lower", forming)
            link = self.scheme.link(source.endpoint, self.pool)
            room = memoryview(bytearray(self.scheme.num_blocks * HOST.block_bytes))
            for size in self.scheme.sizes:
                num_bytes = size * self.scheme.slab.block_bytes
                ours = gigabytes_per_second(num_bytes, partial(link.pull, piece=self.whole), partial(self.blocks, size))
                label = f"{num_bytes >> 20}mib" if num_bytes >> 20 else f"{num_bytes >> 10}kib"
                must, aim = (250.0, 330.0) if (name, label) == ("nccl", "512mib") else (None, None)
                row = Row(f"{name}_{label}_gbps", statistics.median(ours), "GB/s", "higher", must, aim, ours)
                if not self.scheme.on_gpu:
                    peer = statistics.median(
                        gigabytes_per_second(
                            num_bytes, partial(read_bare, bare), partial(room.__getitem__, slice(num_bytes))
                        )
                    )
                    row = Row(row.name, row.value, "GB/s", "higher", samples=ours, peer=peer, peer_name="bare TCP")
                self.report.add(row)
            if self.scheme.on_gpu:
                self.memory(source, link, free)
            link.close()

    def memory(self, source: Source, link: KvLink, free: tuple[int, int]) -> None:
        held = [
            float(before - now)
            for before, now in zip(free, (source.free_bytes(), self.scheme.free_bytes()), strict=True)
        ]
        link.close()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and free[1] - self.scheme.free_bytes() > held[1] / 4:
            time.sleep(0.01)
        after = [
            before - now for before, now in zip(free, (source.free_bytes(), self.scheme.free_bytes()), strict=True)
        ]
        note = f"source {held[0] / 2**20:.0f} MiB, reader {held[1] / 2**20:.0f}; closed: " + " and ".join(
            f"{each / 2**20:.0f}" for each in after
        )
        self.add("memory_bytes", max(held), "bytes", "lower", held, note)

    def ends(self) -> None:
        """A peer that dies, and one that stands still, in mid-pull."""
        for name, number in (("killed_ms", signal.SIGKILL), ("closed_ms", signal.SIGSTOP)):
            with Source(self.scheme, self.device) as source:
                link = self.scheme.link(source.endpoint, self.pool)
                self.pull(link, 1)
                over = threading.Event()
                failed: list[HeadraceError] = []
                thread = threading.Thread(target=self._pull_until_it_fails, args=(link, over, failed))
                thread.start()
                time.sleep(0.2)
                began = time.perf_counter()
                source.process.send_signal(number)
                if number == signal.SIGSTOP:
                    time.sleep(0.3)
                    began = time.perf_counter()
                    link.close()
                ended = over.wait(10)
                took = (time.perf_counter() - began) * 1e3
                self.add(
                    name, took, "ms", "lower", note=str(failed[0]) if ended else "not over after 10 s", must=1000.0
                )

    def _pull_until_it_fails(self, link: KvLink, over: threading.Event, failed: list[HeadraceError]) -> None:
        try:
            while True:
                self.pull(link, self.scheme.sizes[-1])
        except HeadraceError as error:
            failed.append(error)
        over.set()

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        better: str,
        samples: Sequence[float] = (),
        note: str = "",
        must: float | None = None,
    ) -> None:
        row = Row(f"{self.scheme.name}_{name}", value, unit, "lower", must, samples=list(samples), note=note)
        self.report.add(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--scheme", choices=("gloo", "nccl", "nixl"), default="gloo")
    parser.add_argument("--source-device", default="1", help="the source's GPU, as CUDA_VISIBLE_DEVICES names it")
    parser.add_argument("--sweep", action="store_true", help="of nccl: which settings are the fastest here, too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    scheme = Scheme(arguments.scheme)
    if arguments.serve:
        serve(scheme)
        return 0
    hardware = ""
    if scheme.on_gpu:
        card = torch.cuda.get_device_properties(0)
        hardware = f"2 × {card.name}, {card.total_memory / 2**30:.0f} GiB"
    report = Report("link", ("torch",), hardware=hardware or cpu())
    bench = Bench(report, scheme, arguments.source_device)
    bench.rates()
    bench.ends()
    if arguments.sweep and scheme.on_gpu:
        from loadtests.link_sweep import sweep

        sweep(report, arguments.source_device)
    code = report.close(arguments)
    sys.stdout.flush()
    os._exit(code)  # over threads that sit in calls of a communication library


if __name__ == "__main__":
    raise SystemExit(main())
