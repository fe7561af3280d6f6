"""Pools that a test plays for a controller."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from cluster.pools import Addresses, Adopted, Progress
from workers.spec import WorkerSpec


@dataclass
class Pools:
    """Workers start at once, drain when they are let go, and end when they are gone; what happens to them is noted in
    order."""

    let_go: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    gone: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    happened: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: dict[tuple[str, int], float] = field(default_factory=dict)
    found: list[list[Adopted] | None] = field(default_factory=list)
    head_silent_seconds: float = 0.0
    trouble: str = ""
    named: bool = False  # addresses are ids: whoever is asked knows who is asked

    def note(self, what: str) -> None:
        self.happened.append(what)
        self.changed.set()

    async def until(self, *what: str) -> None:
        async with asyncio.timeout(10):
            while not set(what) <= set(self.happened):
                self.changed.clear()
                await self.changed.wait()

    async def start(self, spec: WorkerSpec, progress: Progress) -> Addresses:
        self.note(f"{spec.worker_id} starts")
        return Addresses(spec.worker_id if self.named else "127.0.0.1:1", "127.0.0.1:1")

    async def ended(self, worker_id: str, generation: int) -> str:
        await self.gone[worker_id].wait()
        return "its process ended"

    async def drain(self, worker_id: str, generation: int) -> None:
        self.note(f"{worker_id} drains")
        await self.let_go[worker_id].wait()
        self.note(f"{worker_id} is drained")

    def remove(self, worker_id: str, generation: int) -> None:
        self.note(f"{worker_id} is removed")

    async def notices(self) -> dict[tuple[str, int], float]:
        return self.leaving

    async def adopt(self) -> list[Adopted] | None:
        return self.found.pop(0) if self.found else []

    async def resume(self, spec: WorkerSpec) -> Addresses:
        self.note(f"{spec.worker_id} loads on")
        await self.let_go[spec.worker_id].wait()
        return Addresses("127.0.0.1:1", "127.0.0.1:1")
