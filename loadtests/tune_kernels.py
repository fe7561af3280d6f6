"""Finds each kernel's tile sizes on this card and writes kernels/tuned/<card>.json: `python -m loadtests.tune_kernels`.

Variants are compiled side by side first, in processes of their own that fill Triton's cache.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kernels import norm, rope_store, silu_mul
from kernels.paged_decode import DecodeScratch, paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.tuning import TUNED, DecodeTile, LongDecode, PrefillTile, RopeTile, RowTile, card, tuning_of
from loadtests import bench_kernels as bench

DECODE = [
    DecodeTile(tokens, 1, 1, merged, warps, stages, True)
    for tokens, merged, warps, stages in (
        (32, 16, 4, 3),
        (32, 32, 4, 3),
        (32, 32, 4, 5),
        (32, 8, 2, 2),
        (32, 8, 2, 3),
        (32, 16, 2, 3),
        (32, 16, 2, 4),
        (64, 16, 4, 2),
        (64, 16, 4, 3),
        (64, 32, 4, 3),
        (64, 32, 4, 4),
        (64, 16, 2, 3),
        (128, 16, 4, 2),
        (128, 32, 4, 2),
    )
]
# (tokens, programs a multiprocessor, parts merged at a time, warps, stages)
FEW = [
    DecodeTile(tokens, programs, 2, merged, warps, stages, True)
    for tokens, programs, merged, warps, stages in (
        (32, 2, 16, 2, 3),
        (32, 2, 16, 2, 6),
        (32, 2, 32, 4, 3),
        (32, 2, 32, 4, 4),
        (32, 2, 32, 4, 6),
        (32, 2, 32, 4, 7),
        (32, 3, 16, 2, 3),
        (32, 3, 16, 2, 4),
        (32, 3, 32, 4, 4),
        (32, 1, 16, 4, 12),
        (64, 2, 16, 4, 3),
        (64, 2, 32, 4, 3),
        (64, 1, 16, 4, 5),
        (64, 1, 16, 8, 5),
        (128, 1, 16, 8, 3),
    )
]
GRIDS = [(programs, least) for programs in (1, 2, 3, 4, 6) for least in (2, 4)]
PREFILL = [
    PrefillTile(*sizes)
    for sizes in (
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (128, 32, 8, 4),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    )
]
NORM = [RowTile(elements, warps) for elements in (4096, 8192, 16384) for warps in (4, 8, 16)]
SILU = [RowTile(elements, warps) for elements in (1024, 2048, 4096, 8192) for warps in (4, 8)]
ROPE = [RopeTile(heads, warps) for heads in (8, 16, 32) for warps in (2, 4, 8)]


# where a tile for long contexts is looked for: worth a graph and a kernel more where it gains so much
LONG_ROWS, LONG_CONTEXTS, LONG_GAIN = (1, 2, 4), (4096, 8192, 16384, 32768), 1.01
FEW_WEIGHTS = {"b1_32k": 2.0, "b1_30k": 1.0, "b4_mixed": 1.0, "b8_4k": 1.0, "b1_1k": 0.3}


def compile_one(tile: DecodeTile | PrefillTile) -> str:
    """In a process of its own: launches the variant once on a tiny problem."""
    device = torch.device("cuda", 0)
    pool = torch.zeros(4, bench.KV_HEADS, bench.LAYERS, 2, bench.BLOCK, bench.DIM, dtype=bench.DTYPE, device=device)
    try:
        if isinstance(tile, DecodeTile):
            for num_rows in (1,) if tile in FEW else (1, 32, 128):
                batch = _tiny([(1, 33)] * num_rows, device)
                q = bench.queries(num_rows, device)
                scratch = DecodeScratch.of(132, num_rows, bench.KV_HEADS, bench.DIM, device)
                paged_decode(q, pool, 0, batch, 1.0, torch.empty_like(q.contiguous()), scratch, tile)
        else:
            q = bench.queries(64, device)
            batch, out = _tiny([(64, 64)], device), torch.empty_like(q.contiguous())
            paged_prefill(q, pool, 0, batch, 1.0, out, range(1), batch.max_query, tile)
        torch.cuda.synchronize()
    except Exception as error:  # a variant that does not fit the card is a result
        return f"{tile}: {error!r}"[:300]
    return ""


def _tiny(rows: list[tuple[int, int]], device: torch.device) -> Any:
    batch = bench.batch_of(rows, device)
    return dataclasses.replace(batch, block_tables_RB=torch.zeros_like(batch.block_tables_RB))


class Tuner:
    """Measures variants over one pool, and keeps the table."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = bench.random_pool(bench.NUM_BLOCKS, device)
        self.copy_rate = bench.copy_rate(device)
        self.table: dict[str, list[dict[str, Any]]] = {}
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def decode(self, few_only: bool) -> dict[str, DecodeTile | LongDecode | None]:
        """Those of decode attention, by their names in the table of tiles."""
        long = {
            f"b{rows}_{context // 1024}k alone": bench.batch_of([(1, context)] * rows, self.device)
            for rows, context in itertools.product(LONG_ROWS, LONG_CONTEXTS)
        }
        shapes = long | {
            "b128_1k": bench.batch_of([(1, 1024)] * 128, self.device),
            "b8_4k": bench.batch_of([(1, 4096)] * 8, self.device),
            "b32_1k": bench.batch_of([(1, 1024)] * 32, self.device),
            "b1_32k": bench.batch_of([(1, 32768)], self.device),
            "b1_30k": bench.batch_of([(1, 29999)], self.device),
            "b4_mixed": bench.ragged_batch([5000, 9001, 6500, 8200], self.device),
            "b1_1k": bench.batch_of([(1, 1024)], self.device),
            "mixed": bench.ragged_batch([100 + 37 * i % 1700 for i in range(128)], self.device),
        }
        tokens = {name: int(batch.contexts_R.sum()) for name, batch in shapes.items()}
        variants = [
            dataclasses.replace(tile, programs_per_multiprocessor=programs, least_tiles=least)
            for tile in DECODE
            for programs, least in GRIDS
        ]

        def fraction(tile: DecodeTile, name: str) -> float:
            batch = shapes[name]
            num_rows = batch.contexts_R.shape[0]
            q = bench.queries(num_rows, self.device)
            out = torch.empty(q.shape, dtype=q.dtype, device=self.device)
            programs = self.multiprocessors * tile.programs_per_multiprocessor
            scratch = DecodeScratch.of(programs, num_rows, bench.KV_HEADS, bench.DIM, self.device)

            def layers() -> None:
                for layer in range(bench.LAYERS):
                    paged_decode(q, self.pool, layer, batch, bench.SCALE, out, scratch, tile)

            seconds = statistics.median(bench.seconds_of(layers, repeats=5)) / bench.LAYERS
            return tokens[name] * bench.KV_HEADS * bench.DIM * 4 / seconds / self.copy_rate

        few: DecodeTile = self._best("decode_few", FEW, fraction, list(FEW_WEIGHTS), FEW_WEIGHTS)
        found: dict[str, DecodeTile | LongDecode | None] = {
            "decode_few": few,
            "decode_long": self._long(few, self._best("decode_long", FEW, fraction, ["b1_32k", "b1_30k"]), fraction),
        }
        if not few_only:
            found["decode"] = self._best("decode", variants, fraction, ["b32_1k", "b4_mixed"])
            found["decode_many"] = self._best("decode_many", variants, fraction, ["b128_1k", "mixed"])
        return found

    def _long(
        self, few: DecodeTile, tile: DecodeTile, fraction: Callable[[DecodeTile, str], float]
    ) -> LongDecode | None:
        """From which context on it is faster than the one for all lengths, and for how many rows."""
        found = None
        for rows in LONG_ROWS:
            least = None
            for context in reversed(LONG_CONTEXTS):
                own, other = (fraction(each, f"b{rows}_{context // 1024}k alone") for each in (tile, few))
                print(f"decode_long {rows} × {context}: {own:.3f}, {other:.3f} by decode_few", flush=True)
                if own < LONG_GAIN * other:
                    break
                least = context
            if least is None:
                break
            found = LongDecode(rows * bench.KV_HEADS, max(least, found.least_context if found else 0), tile)
        return found

    def prefill(self) -> PrefillTile:
        shapes = {str(n): bench.batch_of([(n, context)], self.device) for n, context in ((1024, 1024), (8192, 8192))}

        def tflops(tile: PrefillTile, name: str) -> float:
            batch, n = shapes[name], int(name)
            q = bench.queries(n, self.device)
            out = torch.empty(q.shape, dtype=q.dtype, device=self.device)

            def run() -> None:
                paged_prefill(q, self.pool, 3, batch, bench.SCALE, out, range(1), batch.max_query, tile)

            seconds = statistics.median(bench.seconds_of(run, repeats=5))
            return 4 * bench.HEADS * bench.DIM * n * (n + 1) / 2 / seconds / 1e12

        best: PrefillTile = self._best("prefill", PREFILL, tflops, list(shapes))
        return best

    def rows(self) -> tuple[RowTile, RopeTile, RowTile]:
        x = {n: torch.randn(n, bench.WIDTH, dtype=bench.DTYPE, device=self.device) for n in (8192, 128)}
        gate = {n: torch.randn(n, 2 * bench.FEED_FORWARD, dtype=bench.DTYPE, device=self.device) for n in (8192, 128)}
        heads = (bench.HEADS, bench.KV_HEADS, bench.KV_HEADS)
        qkv = {n: torch.randn(n, sum(heads), bench.DIM, dtype=bench.DTYPE, device=self.device) for n in (8192, 128)}
        batches = {n: bench.batch_of([(n, n)], self.device) for n in (8192, 128)}
        weight = torch.randn(bench.WIDTH, dtype=bench.DTYPE, device=self.device)
        angles = torch.randn(8192, bench.DIM, device=self.device)
        outs = {n: [torch.empty_like(v) for _ in range(2)] for n, v in x.items()}

        def rate(num_bytes: int, run: Callable[[], object]) -> float:
            return num_bytes / statistics.median(bench.seconds_of(run, repeats=5, inner=5)) / self.copy_rate

        def norm_rate(tile: RowTile, name: str) -> float:
            a, (out, total) = x[int(name)], outs[int(name)]
            return rate(4 * a.nbytes, lambda: norm.add_rms_norm(a, a, weight, 1e-5, out, total, tile))

        def silu_rate(tile: RowTile, name: str) -> float:
            a = gate[int(name)]
            out = torch.empty(a.shape[0], bench.FEED_FORWARD, dtype=a.dtype, device=self.device)
            return rate(a.nbytes * 3 // 2, lambda: silu_mul.silu_mul(a, out, tile))

        def rope_rate(tile: RopeTile, name: str) -> float:
            q, k, v = qkv[int(name)].split(heads, 1)
            out = torch.empty(q.shape, dtype=q.dtype, device=self.device)
            return rate(
                2 * qkv[int(name)].nbytes,
                lambda: rope_store.rope_store(q, k, v, angles, self.pool, 1, batches[int(name)], out, tile),
            )

        names = ["8192", "128"]
        return (
            self._best("norm", NORM, norm_rate, names),
            self._best("rope", ROPE, rope_rate, names),
            self._best("silu", SILU, silu_rate, names),
        )

    def _best(
        self,
        name: str,
        variants: Sequence[Any],
        measure: Callable[[Any, str], float],
        shapes: list[str],
        weights: dict[str, float] | None = None,
    ) -> Any:
        """The variant with the best weighted geometric mean over the shapes; every measurement goes to the table."""
        lines: list[dict[str, Any]] = []
        for tile in variants:
            try:
                figures = {shape: round(measure(tile, shape), 4) for shape in shapes}
            except Exception as error:  # a variant that does not fit the card is a result
                print(f"{name} {tile}: {error!r}"[:200], flush=True)
                continue
            score = sum((weights or {}).get(shape, 1.0) * math.log(value) for shape, value in figures.items())
            lines.append({"tile": dataclasses.asdict(tile), "score": round(score, 5), **figures})
        lines.sort(key=lambda line: -line["score"])
        self.table[name] = lines
        for line in lines[:6]:
            print(name, *line["tile"].values(), {shape: line[shape] for shape in shapes}, flush=True)
        return type(variants[0])(**lines[0]["tile"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True, help="where every measurement goes, as JSON")
    parser.add_argument("--out", type=Path, help="default kernels/tuned/CARD.json")
    parser.add_argument("--decode-only", action="store_true", help="the other tiles stay as they are")
    parser.add_argument("--few-only", action="store_true", help="all but those of decode attention over few rows stay")
    arguments = parser.parse_args()
    started = time.monotonic()
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn")) as processes:
        tiles = FEW if arguments.few_only else [*FEW, *DECODE, *([] if arguments.decode_only else PREFILL)]
        for failure in filter(None, processes.map(compile_one, tiles)):
            print(failure, flush=True)
    print(f"compiled in {time.monotonic() - started:.1f} s", flush=True)
    device = torch.device("cuda", 0)
    tuner = Tuner(device)
    found = tuning_of(device)
    if not (arguments.decode_only or arguments.few_only):
        norm_tile, rope_tile, silu_tile = tuner.rows()
        found = dataclasses.replace(found, prefill=tuner.prefill(), norm=norm_tile, rope=rope_tile, silu=silu_tile)
    found = dataclasses.replace(found, **tuner.decode(arguments.few_only))  # type: ignore[arg-type]
    arguments.table.write_text(json.dumps(tuner.table))
    (arguments.out or TUNED / f"{card(device)}.json").write_text(json.dumps(dataclasses.asdict(found), indent=2) + "\n")
    print(f"tuned in {time.monotonic() - started:.1f} s: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
