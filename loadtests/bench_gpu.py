"""The engine on one CUDA device: scheduler and runner in one process, the Llama-3.1-8B shape, random weights.

    python -m loadtests.bench_gpu [--out docs/benchmarks/engine-CARD.json] [--layers 32] [--peer vllm.json]

--peer names what another engine measured on the same card just before, in rows of the same names; a row's must and aim
are multiples of its peer's.

decode_b*   output tok/s at 1k of context: (time of 129 tokens − time of 1) / 128, prompts of 1,024 tokens
prefill_*   prompt tok/s, 32,768 tokens of prompts in one go, one token drawn of each
ttft_1024   ms from the intake of one prompt of 1,024 tokens to its first token
mixed_256   output tok/s of 256 requests, 100 to 1,024 tokens in, 100 to 1,024 out
attn_bw_*   decode attention: fraction of the card's copy rate, both measured here
fixed_*     decode_* and prefill_* under `deterministic: true`; peer: the same engine without

The other rows: loadtests.gpu_serving, loadtests.gpu_start, loadtests.gpu_steps.
"""

import argparse
import json
import pathlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.costmodel import CostModel
from headrace.devicecost import DeviceCost
from loadtests import gpu_start, gpu_steps
from loadtests.gpu_serving import continuous_vs_static, idle_fraction, prefix_cache_speedup, prompts
from loadtests.one_rank import ENGINE, LLAMA_8B, OneRank
from loadtests.report import Report, Row, add_arguments, timed

# of the peer's rate: what must be reached, and what is aimed at
GOALS = {
    "prefill_1024": (0.95, 1.02),
    "prefill_4096": (0.95, 1.02),
    "ttft_1024": (1.0, 1.1),
    "decode_b1": (1.0, 1.08),
    "decode_b32": (1.0, 1.08),
    "decode_b128": (1.0, 1.15),
    "decode_b256": (1.0, 1.12),
    "mixed_256": (1.0, 1.15),
}
DECODE_TOKENS = 128
PARTS = ("engine", "serving", "idle", "attention", "fixed", "start", "steps")


def beside(row: Row, peers: dict[str, float], peer_name: str) -> Row:
    """The row with its peer's figure, where there is one."""
    peer = peers.get(row.name)
    if peer is None:
        return row
    lower = row.better == "lower"
    row = replace(row, peer=peer, peer_name=peer_name, ratio=peer / row.value if lower else row.value / peer)
    if row.name not in GOALS:
        return row
    must, aim = (peer / goal if lower else peer * goal for goal in GOALS[row.name])
    return replace(row, must=must, aim=aim)


@dataclass(frozen=True)
class Timed:
    """How long an engine takes for prompts of one length and so many tokens each."""

    engine: OneRank
    draw: random.Random

    def seconds(self, count: int, length: int, tokens: int, repeats: int) -> list[float]:
        inputs = [prompts(count, length, self.draw) for _ in range(repeats)]
        return timed(lambda: self.engine.serve(inputs.pop(), [tokens] * count), repeats)

    def prefill(self, length: int) -> Row:
        count = 32_768 // length
        self.seconds(count, length, 1, 1)
        samples = self.seconds(count, length, 1, 3)
        return Row(f"prefill_{length}", count * length / min(samples), "tok/s", "higher", samples=samples)

    def decode(self, batch: int) -> Row:
        self.seconds(batch, 1024, 4, 1)
        first = min(self.seconds(batch, 1024, 1, 2))
        samples = [(whole - first) / DECODE_TOKENS for whole in self.seconds(batch, 1024, DECODE_TOKENS + 1, 2)]
        note = f"TPOT {min(samples) * 1e3:.2f} ms"
        return Row(f"decode_b{batch}", batch / min(samples), "tok/s", "higher", samples=samples, note=note)


def fixed_rows(shape: dict[str, Any], draw: random.Random) -> Iterator[Row]:
    found: list[list[Row]] = []
    for deterministic in (False, True):
        engine = OneRank(shape, ENGINE.model_copy(update={"deterministic": deterministic}))
        timed = Timed(engine, draw)
        found.append([timed.prefill(4096), *map(timed.decode, (1, 32, 128))])
        del engine, timed
        torch.cuda.empty_cache()
    for plain, row in zip(*found, strict=True):
        ratio = row.value / plain.value
        yield replace(row, name=f"fixed_{row.name}", peer=plain.value, peer_name="not deterministic", ratio=ratio)


def engine_rows(engine: OneRank, draw: random.Random) -> Iterator[Row]:
    timed_engine = Timed(engine, draw)
    engine.serve(prompts(4, 64, draw), [8] * 4)
    yield from map(timed_engine.prefill, (1024, 4096))
    samples = [seconds * 1e3 for seconds in timed_engine.seconds(1, 1024, 1, 5)]
    yield Row("ttft_1024", min(samples), "ms", "lower", samples=samples)
    yield from map(timed_engine.decode, (1, 32, 128, 256))
    lengths = [draw.randint(100, 1024) for _ in range(256)]
    outputs = [draw.randint(100, 1024) for _ in range(256)]
    mixed = [prompts(1, length, draw)[0] for length in lengths]
    samples = timed(lambda: engine.serve(mixed, outputs), 1)
    yield Row("mixed_256", sum(outputs) / samples[0], "tok/s", "higher", samples=samples)


def attention_rows() -> Iterator[Row]:
    from kernels.cuda import CudaOps
    from loadtests.bench_kernels import Bench

    device = torch.device("cuda", 0)
    bench = Bench(device, CudaOps(device), Report("kernels"))
    for name, num_rows, context, must, aim in (
        ("b128_1k", 128, 1024, 0.92, 0.97),
        ("b1_32k", 1, 32768, 0.8, 0.92),
        ("b1_16k", 1, 16384, None, None),
        ("b1_1k", 1, 1024, None, None),
    ):
        row = bench.decode(num_rows, context, name)
        yield replace(row, name=f"attn_bw_{name}", must=must, aim=aim)


def start_rows(shape: dict[str, Any], checkpoint: pathlib.Path | None) -> Iterator[Row]:
    for name, seconds, note in gpu_start.measure(shape, checkpoint):
        warm = name == "ready_s"
        yield Row(name, seconds, "s", "lower", 25 if warm else None, 12 if warm else None, note=note)


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    draw, parts = random.Random(0), arguments.parts.split(",")
    shape = {**LLAMA_8B, "num_hidden_layers": arguments.layers}
    if {"engine", "serving"} & set(parts):
        engine = OneRank(shape, ENGINE, graphs=not arguments.eager)
        if "engine" in parts:
            yield from engine_rows(engine, draw)
        if "serving" in parts:
            yield prefix_cache_speedup(engine, draw)
            yield continuous_vs_static(engine, draw)
        del engine
    if "idle" in parts:
        yield idle_fraction(draw)
    if "attention" in parts:
        yield from attention_rows()
    if "fixed" in parts:
        yield from fixed_rows(shape, draw)
    if "steps" in parts:
        torch.cuda.empty_cache()
        yield from gpu_steps.step_rows(shape, arguments.cost, draw, gpu_steps.Sizes())
    if "start" in parts:
        torch.cuda.empty_cache()
        yield from start_rows(shape, arguments.checkpoint)


def cost_of(path: str) -> CostModel:
    """Of a card's file."""
    return DeviceCost.from_json(json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["cost"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=32, help="fewer than 32 only to try the bench itself")
    parser.add_argument("--eager", action="store_true", help="every kernel launched from Python, no CUDA graphs")
    parser.add_argument("--peer", type=pathlib.Path, help='{"name": …, "rows": {"decode_b1": …, …}}')
    parser.add_argument(
        "--cost", type=cost_of, metavar="FILE", help="the planner's card, beside whose cost steps stand"
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, help="of this shape, in the page cache; else one is written")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    add_arguments(parser)
    arguments = parser.parse_args()
    card = torch.cuda.get_device_properties(0)
    report = Report("gpu", ("torch", "triton"), hardware=f"{card.name}, {card.total_memory / 2**30:.0f} GiB")
    peer: dict[str, Any] = (
        {"name": "", "rows": {}} if arguments.peer is None else json.loads(arguments.peer.read_text())
    )
    for row in rows(arguments):
        report.add(beside(row, peer["rows"], peer["name"]))
    return report.close(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
