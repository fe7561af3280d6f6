"""Pulls of KV over the real links between two processes, each of which sees one GPU: how fast, how soon, at whose cost.

    CUDA_VISIBLE_DEVICES=0 python -m loadtests.bench_handoff --source-device 1 [--out docs/benchmarks/handoff-CARD.json]

Llama-3.1-8B shape, bf16, blocks of 32 tokens of 4 MiB, scattered at random on both sides.

nvlink_*_gbps    bytes of a prompt over the time of `link.pull`, from the call to its return
form_ms          a new link's first pull, of one block, from a peer whose pool has 40 GiB
notice_ms        from SIGKILL of the peer to the link's close; replace_ms: the first pull from its replacement
decode_*         a decode step's products and attention at batch 128 and 1k of context in one CUDA graph, alone and beside
                 pulls; slowdowns are of its mean. "paced": prompts of 8k tokens, as chunks of 2k tokens, as fast as one
                 prefill worker computes them
"""

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import torch

from kernels.cuda import CudaOps
from kernels.ops import AttentionBatch
from loadtests.report import Report, Row, add_arguments
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links import schemes
from workers.kv.links.base import BlockPull, KvLink
from workers.kv.links.endpoint import Endpoint
from workers.kv.links.link import Link
from workers.kv.links.nvlink import NvlinkTransport
from workers.kv.pool import KvPool

SLAB = SlabLayout(num_kv_heads=8, num_layers=32, block_size=32, head_dim=128, element_bytes=2)
WHOLE = Piece(0, 0, 0, 0, SLAB.num_kv_heads, 0, 0, SLAB.num_layers)
QUERY_HEADS, HIDDEN, FEED_FORWARD, BATCH, CONTEXT = 32, 4096, 14336, 128, 1024
POOL_BLOCKS = 10_240
DECODE_BLOCKS = BATCH * CONTEXT // SLAB.block_size
PREFILL_TOKENS_A_SECOND, CHUNK_TOKENS = 43_000, 2048
EPOCH = 1


def random_pool(num_blocks: int) -> KvPool:
    pool = KvPool(SLAB, num_blocks, torch.bfloat16, torch.device("cuda", 0))
    for part in pool.tensor.split(64):
        part.normal_()
    pool.set_epochs((block, EPOCH) for block in range(num_blocks))
    pool.settle()
    return pool


def serve(num_blocks: int) -> None:
    """The source's process: a pool to read from, until its input ends."""
    server = schemes.serve(random_pool(num_blocks), "127.0.0.1", 10.0)
    print(server.endpoint, flush=True)
    sys.stdin.read()
    server.close()


class Source:
    """A peer's process, which sees its own GPU alone."""

    def __init__(self, device: str, num_blocks: int) -> None:
        command = [sys.executable, "-m", "loadtests.bench_handoff", "--serve", str(num_blocks)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def endpoint(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Pulls:
    """Random blocks of the source into random blocks of ours that no decode step reads."""

    def __init__(self, pool: KvPool, num_sources: int) -> None:
        self.pool = pool
        self._sources = range(num_sources)
        self._draw = random.Random(0)

    def blocks(self, num_tokens: int) -> list[BlockPull]:
        count = num_tokens // SLAB.block_size
        targets = self._draw.sample(range(DECODE_BLOCKS, self.pool.num_blocks), count)
        return [
            BlockPull(source, EPOCH, target)
            for source, target in zip(self._draw.sample(self._sources, count), targets, strict=True)
        ]

    def gbps(self, link: KvLink, num_tokens: int, runs: int = 9) -> list[float]:
        samples = []
        for _ in range(runs + 2):
            blocks = self.blocks(num_tokens)
            began = time.perf_counter()
            receipt = link.pull(blocks, WHOLE)
            samples.append(receipt.num_bytes / (time.perf_counter() - began) / 1e9)
        return samples[2:]

    @contextlib.contextmanager
    def beside(self, link: KvLink, every_seconds: float) -> Iterator[list[float]]:
        """Chunks of a prompt pulled on a thread of their own, one every so often; the seconds that each took."""
        took: list[float] = []
        over = threading.Event()

        def pull() -> None:
            due = time.perf_counter()
            while not over.wait(max(0.0, due - time.perf_counter())):
                due += every_seconds
                took.append(link.pull(self.blocks(CHUNK_TOKENS), WHOLE).seconds)

        thread = threading.Thread(target=pull)
        thread.start()
        try:
            yield took
        finally:
            over.set()
            thread.join()


def plain_copy_gbps(transport: NvlinkTransport, pool: KvPool, num_bytes: int) -> list[float]:
    """The driver's own copy of as many bytes, contiguous, from the same mapping."""
    from cuda.bindings import driver

    assert transport.mapped is not None
    target = pool.tensor[DECODE_BLOCKS:].data_ptr()
    samples = []
    for _ in range(11):
        began = time.perf_counter()
        driver.cuMemcpyDtoDAsync(
            target, transport.mapped.blocks.address, num_bytes, torch.cuda.current_stream().cuda_stream
        )
        torch.cuda.synchronize()
        samples.append(num_bytes / (time.perf_counter() - began) / 1e9)
    return samples[2:]


class DecodeStep:
    """The products and the attention of a decode step in one graph, over the first blocks of the pool."""

    def __init__(self, pool: KvPool, *, products: bool) -> None:
        device = pool.tensor.device
        shapes = [
            (HIDDEN, (QUERY_HEADS + 2 * SLAB.num_kv_heads) * SLAB.head_dim),
            (HIDDEN, HIDDEN),
            (HIDDEN, 2 * FEED_FORWARD),
            (FEED_FORWARD, HIDDEN),
        ]
        self._weights = [
            [torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02) for shape in shapes]
            for _ in range(SLAB.num_layers if products else 0)
        ]
        inputs = {width: torch.randn(BATCH, width, dtype=torch.bfloat16, device=device) for width, _ in shapes}
        query = torch.randn(BATCH, QUERY_HEADS, SLAB.head_dim, dtype=torch.bfloat16, device=device)
        columns = CONTEXT // SLAB.block_size
        batch = AttentionBatch(
            torch.arange(BATCH + 1, dtype=torch.int32, device=device),
            torch.full((BATCH,), CONTEXT, dtype=torch.int32, device=device),
            torch.randperm(DECODE_BLOCKS, device=device).to(torch.int32).view(BATCH, columns),
            torch.zeros(BATCH, dtype=torch.int64, device=device),
            torch.full((BATCH,), CONTEXT - 1, dtype=torch.int64, device=device),
            num_decodes=BATCH,
            max_query=1,
            max_context=CONTEXT,
        )
        ops = CudaOps(device)

        def step() -> None:
            for layer in range(SLAB.num_layers):
                ops.attention(query, pool.tensor, layer, batch, 0.1)
                for weight in self._weights[layer] if products else ():
                    inputs[weight.shape[0]] @ weight

        step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()

    def milliseconds(self, steps: int) -> list[float]:
        """Of each step, the host waiting for it before it launches the next, as an engine does."""
        samples = []
        for _ in range(steps + 5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
        return samples[5:]


def measure_decode(report: Report, pulls: Pulls, link: KvLink) -> None:
    pace = CHUNK_TOKENS / PREFILL_TOKENS_A_SECOND
    for name, products in (("attention", False), ("decode", True)):
        step = DecodeStep(pulls.pool, products=products)
        step.milliseconds(100)
        samples = step.milliseconds(200)
        alone = statistics.mean(samples)
        report.add(Row(f"{name}_alone_ms", alone, "ms", "lower", samples=samples))
        for label, every in (("paced", pace), ("always", 0.0)):
            with pulls.beside(link, every) as took:
                samples = step.milliseconds(300)
            mean = statistics.mean(samples)
            slowdown = mean / alone - 1
            must = 0.03 if (label, name) == ("paced", "decode") else None
            title = "overlap_slowdown_fraction" if must else f"{name}_{label}_slowdown_fraction"
            rate = CHUNK_TOKENS // SLAB.block_size * SLAB.block_bytes / statistics.median(took) / 1e9
            p99 = sorted(samples)[-2]
            note = f"mean {mean:.3f} ms, p99 {p99:.3f} ms; {len(took)} pulls, each at {rate:.0f} GB/s median"
            report.add(Row(title, slowdown, "", "lower", must=must, samples=samples, note=note))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=POOL_BLOCKS, help="fewer only to try the bench itself")
    parser.add_argument("--source-device", default="0", help="the peer's GPU, as CUDA_VISIBLE_DEVICES names it")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return 0
    card = torch.cuda.get_device_properties(0)
    hardware = f"{1 if arguments.source_device == '0' else 2} × {card.name}, {card.total_memory / 2**30:.0f} GiB"
    report = Report("handoff", ("torch", "triton"), hardware=hardware)
    sources = [Source(arguments.source_device, blocks) for blocks in (arguments.blocks, 1024)]
    try:
        measure(report, sources, arguments.blocks)
    finally:
        for source in sources:
            source.kill()
    return report.close(arguments)


def measure(report: Report, sources: list[Source], num_sources: int) -> None:
    pool = random_pool(DECODE_BLOCKS + 1280)
    server = schemes.serve(pool, "127.0.0.1", 10.0)
    schemes.try_out(pool, server.endpoint, 10.0)
    pulls = Pulls(pool, num_sources)
    theirs, replacement = (source.endpoint() for source in sources)

    samples = []
    for _ in range(6):
        link = schemes.connect(server.endpoint, theirs, pool, 10.0)
        began = time.perf_counter()
        link.pull(pulls.blocks(32), WHOLE)
        samples.append((time.perf_counter() - began) * 1e3)
        link.close()
    report.add(Row("form_ms", statistics.median(samples), "ms", "lower", samples=samples))
    transport = NvlinkTransport(Endpoint.parse(theirs), pool, 10.0)
    link = Link(transport)
    link.pull(pulls.blocks(32), WHOLE)
    for num_tokens, label in ((1024, "1k"), (4096, "512mib"), (8192, "8k"), (32768, "32k")):
        samples = pulls.gbps(link, num_tokens)
        peer = statistics.median(plain_copy_gbps(transport, pool, num_tokens // 32 * SLAB.block_bytes))
        value = statistics.median(samples)
        must, aim = (340.0, 375.0) if label == "512mib" else (None, None)
        name, gbps = f"nvlink_{label}_gbps", "GB/s"
        report.add(Row(name, value, gbps, "higher", must, aim, samples, peer, "plain copy, contiguous", value / peer))
    one = [link.pull(pulls.blocks(32), WHOLE).seconds * 1e6 for _ in range(50)]
    report.add(Row("nvlink_one_block_us", statistics.median(one), "us", "lower", samples=one))
    measure_decode(report, pulls, link)
    free = torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    os.kill(sources[0].process.pid, 9)
    while not link.closed:
        time.sleep(0)
    report.add(Row("notice_ms", (time.perf_counter() - began) * 1e3, "ms", "lower"))
    link = schemes.connect(server.endpoint, replacement, pool, 10.0)
    began = time.perf_counter()
    link.pull([BlockPull(5, EPOCH, DECODE_BLOCKS)], WHOLE)
    report.add(Row("replace_ms", (time.perf_counter() - began) * 1e3, "ms", "lower"))
    held = free - torch.cuda.mem_get_info()[0]
    report.add(Row("link_memory_bytes", float(held), "bytes", "lower", note="on the reader's GPU"))
    link.close()
    server.close()


if __name__ == "__main__":
    raise SystemExit(main())
