"""A follower of the index before a real Valkey, to be advanced by hand."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from headrace import store as stores
from headrace.clock import SystemClock
from headrace.keys import EventBatch, Keys
from router.decisions.chain import Chain
from router.decisions.index import Index, Loading, Outcome
from router.follow import Follow
from router.sessions import Sessions
from tests.unit.router.publisher import Publisher, block

KEYS = Keys("test")


class Watched(Index):
    """An index that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.applied = asyncio.Event()

    def apply(self, worker: str, batch: EventBatch) -> Outcome:
        outcome = super().apply(worker, batch)
        self.applied.set()
        return outcome

    @contextmanager
    def loading(self, worker: str, generation: int, sequence: int, num_blocks: int) -> Iterator[Loading]:
        with super().loading(worker, generation, sequence, num_blocks) as loading:
            yield loading
        self.applied.set()


@dataclass
class Scene:
    redis: Redis
    store: stores.Store
    follow: Follow
    index: Watched
    gone: list[str]

    def publisher(self, worker: str, generation: int = 1) -> Publisher:
        return Publisher(self.redis, KEYS, worker, generation)

    async def followed(self, worker: str = "a", num_blocks: int = 3) -> Publisher:
        """A worker with a lease that holds blocks 0, 1, … and has been read."""
        publisher = self.publisher(worker)
        await publisher.lease()
        await publisher.store(range(num_blocks))
        await self.follow.scan()
        return publisher

    def held(self, worker: str, upto: int = 64) -> set[int]:
        return {n for n in range(upto) if worker in self.index.match(Chain([block(n)])).depths}


@asynccontextmanager
async def scene(
    url: str, sessions: Sessions | None = None, *, budget_seconds: float = 0.5, scan_seconds: float = 0.05
) -> AsyncIterator[Scene]:
    clock = SystemClock()
    redis = Redis.from_url(url)
    store = stores.connect(url, budget_seconds=budget_seconds, clock=clock, breaker=stores.Breaker(open_seconds=0.0))
    await redis.flushall()
    index, gone = Watched(), list[str]()
    sessions = sessions or Sessions("t", clock, heartbeat_seconds=1, silent_seconds=5)
    try:
        follow = Follow(store, KEYS, index, sessions, clock, gone=gone.append, scan_seconds=scan_seconds)
        yield Scene(redis, store, follow, index, gone)
    finally:
        await store.close()
        await redis.aclose()
