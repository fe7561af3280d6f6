"""What each kernel reaches of the card's own limits, measured in the same run: `python -m loadtests.bench_kernels`.

Checks every kernel against its reference first, then times CUDA-graph replays with events. Rows named *_fraction are
of the measured copy rate (bytes read and written), of the measured matrix rate, or, for pulls, of a plain one-sided
copy over the link; *_behind_rope_us of a layer's attention, as a model launches it. With two devices, `--pull` adds the
pull of a peer's blocks (loadtests.bench_pull). Replays that another process held up are noted (loadtests.disturbed).
Shape: Llama-3.1-8B, bf16, blocks of 32 tokens.
"""

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import noise
from kernels.cuda import CudaOps
from kernels.ops import AttentionBatch
from kernels.reference import ReferenceOps
from kernels.sample import sample
from kernels.sample_floor import sample_floor
from kernels.tuning import card, tuning_of
from loadtests.decode_behind import Behind
from loadtests.disturbed import disturbed
from loadtests.flash_peer import NAME as FLASH
from loadtests.flash_peer import flash_prefill, peer_seconds
from loadtests.report import Report, Row, add_arguments

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, FEED_FORWARD, BLOCK = 32, 32, 8, 128, 4096, 14336, 32
NUM_BLOCKS = 4480  # 18 GiB: 128 rows of 1k and one of 8k
SCALE = DIM**-0.5
DTYPE = torch.bfloat16
MUST = {"decode_b128_1k_fraction": 0.92, "decode_b1_32k_fraction": 0.80, "pull_512mib_gbps": 340.0}
AIM = {"decode_b128_1k_fraction": 0.97, "decode_b1_32k_fraction": 0.92, "pull_512mib_gbps": 375.0}


def seconds_of(run: Callable[[], object], repeats: int = 15, inner: int = 1) -> list[float]:
    """Seconds of one `run` in each of `repeats` replays of a graph that holds `inner` of them."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    for _ in range(2):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 / inner for a, b in itertools.pairwise(marks)]


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of 4 GiB: the better of the library's copy and an elementwise kernel."""
    source = torch.empty(2**30, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    copies: list[Callable[[], object]] = [
        lambda: target.copy_(source),
        lambda: torch.neg(source, out=target),
    ]
    return 2 * source.nbytes / min(statistics.median(seconds_of(copy)) for copy in copies)


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of a large product of random bf16 matrices."""
    size = 8192
    a, b = (torch.randn(size, size, dtype=DTYPE, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / statistics.median(seconds_of(lambda: torch.mm(a, b, out=out)))


def random_pool(num_blocks: int, device: torch.device) -> Tensor:
    pool = torch.empty(num_blocks, KV_HEADS, LAYERS, 2, BLOCK, DIM, dtype=DTYPE, device=device)
    for part in pool.split(64):
        part.normal_()
    return pool


def batch_of(rows: list[tuple[int, int]], device: torch.device) -> AttentionBatch:
    """Rows of (tokens, context) over blocks scattered at random."""
    columns = max(-(-context // BLOCK) for _, context in rows)
    tables = torch.randperm(NUM_BLOCKS, device=device)[: len(rows) * columns].to(torch.int32).view(len(rows), columns)
    positions = torch.cat([torch.arange(context - tokens, context, device=device) for tokens, context in rows])
    row_of_T = torch.repeat_interleave(torch.tensor([tokens for tokens, _ in rows], device=device))
    slots = tables[row_of_T, positions // BLOCK].long() * BLOCK + positions % BLOCK
    return AttentionBatch(
        starts_R1=torch.tensor([0, *(tokens for tokens, _ in rows)]).cumsum(0).to(device, torch.int32),
        contexts_R=torch.tensor([context for _, context in rows], dtype=torch.int32, device=device),
        block_tables_RB=tables,
        slots_T=slots,
        positions_T=positions,
        num_decodes=sum(tokens == 1 for tokens, _ in rows),
        max_query=max(tokens for tokens, _ in rows),
        max_context=max(context for _, context in rows),
    )


def ragged_batch(contexts: list[int], device: torch.device) -> AttentionBatch:
    """Decode rows of unequal length over disjoint blocks; table columns beyond a row's context are absurd."""
    order = torch.randperm(NUM_BLOCKS, dtype=torch.int32)
    needed = [-(-context // BLOCK) for context in contexts]
    if sum(needed) > NUM_BLOCKS:
        raise ValueError(f"contexts must fit {NUM_BLOCKS} blocks, got {sum(needed)}")
    tables = torch.full((len(contexts), max(needed)), 2**30, dtype=torch.int32)
    for row, blocks in enumerate(order[: sum(needed)].split(needed)):
        tables[row, : needed[row]] = blocks
    tokens = torch.zeros(len(contexts), dtype=torch.int64, device=device)
    return AttentionBatch(
        starts_R1=torch.arange(len(contexts) + 1, dtype=torch.int32, device=device),
        contexts_R=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables_RB=tables.to(device),
        slots_T=tokens,
        positions_T=tokens,
        num_decodes=len(contexts),
        max_query=1,
        max_context=max(contexts),
    )


def queries(num_tokens: int, device: torch.device) -> Tensor:
    """A slice of a projection that holds k and v too, as a model hands it over."""
    return torch.randn(num_tokens, HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE, device=device)[:, :HEADS]


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


class Bench:
    """Times everything on one device, for a report; owns the pool that all attention rows share."""

    def __init__(self, device: torch.device, ops: CudaOps, report: Report) -> None:
        self.device, self.ops, self.report = device, ops, report
        self.copy_rate, self.matrix_rate = copy_rate(device), matrix_rate(device)
        self.pool = random_pool(NUM_BLOCKS, device)
        self._note("copy_gbps", self.copy_rate / 1e9, "gbps", [])
        self._note("matrix_tflops", self.matrix_rate / 1e12, "tflops", [])

    def check(self) -> None:
        """Every kernel against its reference, at the shapes that are timed. ValueError where one is off."""
        reference = ReferenceOps()
        errors: dict[str, float] = {}
        batches = {
            "decode": ragged_batch([1000 + 37 * i for i in range(24)] + [32768], self.device),
            "prefill": batch_of([(77, 77), (513, 1537), (300, 300)], self.device),
            "dense prefill": replace(
                batch_of([(513, 1537), (777, 777), (300, 300)], self.device),
                prefill_lengths=((513, 1537), (777, 777), (300, 300)),
            ),
        }
        for name, batch in batches.items():
            q = queries(int(batch.starts_R1[-1]), self.device)
            for layer in (0, LAYERS - 1):
                got = self.ops.attention(q, self.pool, layer, batch, SCALE)
                expected = reference.attention(q, self.pool, layer, batch, SCALE)
                errors[f"{name} layer {layer}"] = relative_error(got, expected)
        x = torch.randn(300, WIDTH, dtype=DTYPE, device=self.device)
        weight = torch.randn(WIDTH, dtype=DTYPE, device=self.device)
        errors["norm"] = relative_error(self.ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        for got, expected in zip(
            self.ops.add_rms_norm(x, x.flip(0), weight, 1e-5),
            reference.add_rms_norm(x, x.flip(0), weight, 1e-5),
            strict=True,
        ):
            errors[f"add norm {len(errors)}"] = relative_error(got, expected)
        gate = torch.randn(77, 2 * FEED_FORWARD, dtype=DTYPE, device=self.device)
        errors["silu"] = relative_error(self.ops.silu_mul(gate), reference.silu_mul(gate))
        print("relative errors:", {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
        bad = {name: error for name, error in errors.items() if not error < 1e-2}
        if bad:
            raise ValueError(f"relative error must be below 1e-2, got {bad}")

    def decode(self, num_rows: int, context: int, label: str) -> Row:
        """All layers of one step, one graph. Where a context has a tile for long ones, beside the other."""
        batch = batch_of([(1, context)] * num_rows, self.device)
        num_bytes = LAYERS * num_rows * (context * KV_HEADS * 2 * DIM + 2 * HEADS * DIM) * 2
        ordinary = None
        if any(context >= least for least in self.ops.decode_contexts(num_rows, KV_HEADS)):
            ordinary = CudaOps(self.device, replace(tuning_of(self.device), decode_long=None))
        return self._attention(f"decode_{label}", batch, num_bytes, ordinary)

    def decode_mixed(self) -> None:
        """128 rows of 100 to 1,800 tokens and one of 16k: what the even split is for."""
        contexts = [100 + 37 * i % 1700 for i in range(128)] + [16384]
        batch = ragged_batch(contexts, self.device)
        num_bytes = LAYERS * (sum(contexts) * KV_HEADS * 2 * DIM + 2 * len(contexts) * HEADS * DIM) * 2
        self._attention("decode_mixed", batch, num_bytes)

    def _attention(self, name: str, batch: AttentionBatch, num_bytes: int, peer: CudaOps | None = None) -> Row:
        q = queries(batch.num_decodes, self.device)

        def step(ops: CudaOps) -> None:
            for layer in range(LAYERS):
                ops.attention(q, self.pool, layer, batch, SCALE)

        others = None if peer is None else seconds_of(partial(step, peer))
        return self._bandwidth(name, num_bytes, seconds_of(partial(step, self.ops)), others)

    def behind(self, num_rows: int, context: int, label: str) -> None:
        """Microseconds of a layer's attention behind the rotary store."""
        projection = torch.randn(num_rows, HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE, device=self.device)
        angles = torch.rand(context, DIM, device=self.device)
        batch = batch_of([(1, context)] * num_rows, self.device)
        step = Behind(projection, angles, self.pool, batch, SCALE, LAYERS)
        us = step.microseconds(self.ops, seconds_of)
        self._note(f"decode_{label}_behind_rope_us", statistics.median(us), "us", us)

    def prefill(self, num_tokens: int, context: int, label: str, known: bool = True) -> None:
        """One row; `known`: the host knows its lengths, so that a whole prompt takes the dense path. Beside it, SDPA's
        cuDNN back end on K and V that are dense already, and flash-attn-4 over the pool where others are paged."""
        batch = batch_of([(num_tokens, context)], self.device)
        if known:
            batch = replace(batch, prefill_lengths=((num_tokens, context),))
        q = queries(num_tokens, self.device)
        flops = 4 * HEADS * DIM * (num_tokens * context - num_tokens * (num_tokens - 1) / 2)
        layers = 8

        def chunk() -> None:
            for layer in range(layers):
                self.ops.attention(q, self.pool, layer, batch, SCALE)

        samples = [layers * flops / s / 1e12 for s in seconds_of(chunk)]
        peer: float | None = None
        if num_tokens == context and known:
            dense_q = torch.randn(1, HEADS, num_tokens, DIM, dtype=DTYPE, device=self.device)
            k, v = (torch.randn(1, KV_HEADS, num_tokens, DIM, dtype=DTYPE, device=self.device) for _ in range(2))

            def dense() -> None:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    scaled_dot_product_attention(dense_q, k, v, is_causal=True, enable_gqa=True)

            peer = flops / statistics.median(seconds_of(dense)) / 1e12
        rate, peer_name = statistics.median(samples), "SDPA cuDNN, dense"
        if not known or num_tokens < context:
            run = partial(flash_prefill, q, self.pool, 3, batch, SCALE)
            others = peer_seconds(seconds_of, run, self.ops.attention(q, self.pool, 3, batch, SCALE))
            peer, peer_name = flops / statistics.median(others) / 1e12 if others else None, FLASH
        fraction = rate * 1e12 / self.matrix_rate
        self._note(f"prefill_{label}_tflops", rate, "tflops", samples, peer, peer_name, fraction_of_matrix=fraction)

    def elementwise(self) -> None:
        """Norms, rotary store and gate: bandwidth at 8,192 tokens, microseconds at 1 and 128."""
        for num_tokens in (8192, 128, 1):
            x, residual = (torch.randn(num_tokens, WIDTH, dtype=DTYPE, device=self.device) for _ in range(2))
            weight = torch.randn(WIDTH, dtype=DTYPE, device=self.device)
            gate = torch.randn(num_tokens, 2 * FEED_FORWARD, dtype=DTYPE, device=self.device)
            projection = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE, device=self.device)
            q, k, v = projection.split((HEADS, KV_HEADS, KV_HEADS), 1)
            cos_sin = torch.randn(num_tokens, DIM, device=self.device)
            batch = batch_of([(num_tokens, num_tokens)], self.device)
            runs: dict[str, tuple[Callable[[], object], int]] = {
                "norm": (partial(self.ops.rms_norm, x, weight, 1e-5), 2 * x.nbytes),
                "add_norm": (partial(self.ops.add_rms_norm, x, residual, weight, 1e-5), 4 * x.nbytes),
                "silu_mul": (partial(self.ops.silu_mul, gate), gate.nbytes * 3 // 2),
                "rope_store": (
                    partial(self.ops.rope_store, q, k, v, cos_sin, self.pool, 1, batch),
                    2 * projection.nbytes,
                ),
            }
            for name, (run, num_bytes) in runs.items():
                samples = seconds_of(run, inner=10)
                if num_tokens == 8192:
                    self._bandwidth(name, num_bytes, samples)
                else:
                    us = [s * 1e6 for s in samples]
                    self._note(f"{name}_t{num_tokens}_us", statistics.median(us), "us", us)

    def sampling(self) -> None:
        """128 draws from 128,256 float32 logits: the draw alone, and where min-p, top-k and top-p cut."""
        num_draws, vocabulary, tiles = 128, 128256, tuning_of(self.device)
        logits = torch.randn(num_draws, vocabulary, device=self.device) * 3
        keys = noise.keys(*(torch.arange(num_draws, device=self.device) for _ in range(3)))
        temperature, min_p, top_p, floor = (
            torch.full((num_draws,), value, device=self.device) for value in (0.8, 0.001, 0.95, -torch.inf)
        )
        top_k = torch.full((num_draws,), 50, dtype=torch.int32, device=self.device)
        out = torch.empty(num_draws, dtype=torch.int64, device=self.device)
        runs: dict[str, Callable[[], object]] = {
            "sample": partial(sample, logits, keys, temperature, floor, out, tiles.sample),
            "sample_floor": partial(
                sample_floor, logits, temperature, min_p, top_k, top_p, floor.clone(), tiles.sample_floor
            ),
            "softmax_and_sort": lambda: logits.softmax(-1).sort(-1),
        }
        for name, run in runs.items():
            us = [s * 1e6 for s in seconds_of(run)]
            self._note(f"{name}_b128_us", statistics.median(us), "us", us)

    def _bandwidth(self, name: str, num_bytes: int, seconds: list[float], others: list[float] | None = None) -> Row:
        peer = None if others is None else num_bytes / statistics.median(others) / self.copy_rate
        fractions = [num_bytes / s / self.copy_rate for s in seconds]
        typical = statistics.median(seconds)
        detail = {"microseconds": typical * 1e6, "gbps": num_bytes / typical / 1e9}
        value = statistics.median(fractions)
        return self._note(f"{name}_fraction", value, "fraction", fractions, peer, "short contexts' tile", **detail)

    def _note(
        self,
        name: str,
        value: float,
        unit: str,
        samples: list[float],
        peer: float | None = None,
        peer_name: str = "SDPA cuDNN, dense",
        **detail: float,
    ) -> Row:
        lower = unit == "us"
        note = disturbed(samples if lower else [1 / sample for sample in samples])
        if note:
            print(f"  {name}: {note}", flush=True)
        row = Row(
            name,
            value,
            unit,
            "lower" if lower else "higher",
            MUST.get(name),
            AIM.get(name),
            samples,
            peer,
            peer_name if peer else None,
            (peer / value if lower else value / peer) if peer else None,
            note,
            detail=detail,
        )
        self.report.add(row)
        return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pull", action="store_true", help="only the pull between two devices")
    add_arguments(parser)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    hardware = f"{properties.name}, {properties.multi_processor_count} multiprocessors, " + (
        f"{properties.total_memory / 2**30:.0f} GiB; {os.cpu_count()} cores"
    )
    report = Report("kernels", ("torch", "triton"), hardware)
    if arguments.pull:
        from loadtests.bench_pull import measure_pull

        for name, value, unit, samples in measure_pull(device):
            report.add(Row(name, value, unit, "higher", MUST.get(name), AIM.get(name), samples))
    else:
        torch.manual_seed(0)
        bench = Bench(device, CudaOps(device), report)
        bench.check()
        for num_rows, context, label in (
            (128, 1024, "b128_1k"),
            (32, 1024, "b32_1k"),
            (1, 32768, "b1_32k"),
            (1, 29999, "b1_30k"),
            (1, 16384, "b1_16k"),
            (1, 1024, "b1_1k"),
        ):
            bench.decode(num_rows, context, label)
        bench.decode_mixed()
        for context, label in ((32768, "b1_32k"), (16384, "b1_16k"), (1024, "b1_1k")):
            bench.behind(1, context, label)
        for num_tokens, context, label in (
            (1024, 1024, "1k"),
            (4096, 4096, "4k"),
            (8192, 8192, "8k"),
            (2048, 16384, "2k_at_14k"),
        ):
            bench.prefill(num_tokens, context, label)
        bench.prefill(1024, 1024, "1k_paged", known=False)
        bench.prefill(8192, 8192, "8k_paged", known=False)
        bench.elementwise()
        bench.sampling()
    suffix = "-pull" if arguments.pull else ""
    arguments.out = arguments.out or Path(f"docs/benchmarks/kernels-{card(device)}{suffix}.json")
    return report.close(arguments)


if __name__ == "__main__":
    sys.exit(main())
