"""The fleet that the router's benchmarks know: workers of an 8B model on one card each, and what they hold."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from headrace.blocks import ID_BYTES, BlockId, probe
from headrace.costmodel import CostModel
from headrace.keys import Event, EventKind
from headrace.values import Capacity, Compatibility, ParallelLayout, Role, WorkerInfo
from router.decisions.view import class_of

NUM_WORKERS = 128
NUM_BLOCKS = 100_000
BLOCK_SIZE = 32
BATCH_BLOCKS = 256
COMPATIBILITY = Compatibility("m", "r", "t", "c", "bfloat16", "bfloat16", block_size=BLOCK_SIZE)


def worker_info(number: int, role: Role | None = None, compatibility: Compatibility = COMPATIBILITY) -> WorkerInfo:
    """Even ones prefill, odd ones decode."""
    role = role or (Role.DECODE if number % 2 else Role.PREFILL)
    cost = CostModel(4e-3, 2.25e-5, 8e-10, 6.5e-3, 5e-6, 5.7e-8, 5e-4, 2e11)
    capacity = Capacity(NUM_BLOCKS, 4 * 2**20, 256, 131_072, 8192, 128_000)
    info = WorkerInfo(
        f"w{number}", 1, role, f"10.0.0.{number}:1", compatibility, ParallelLayout(), capacity, "m", cost=cost
    )
    return replace(info, probe=probe(class_of(compatibility).hasher()))


def random_ids(random: Random, num_blocks: int) -> bytes:
    return random.randbytes(num_blocks * ID_BYTES)


class Cached:
    """A worker's ledger, as its publisher sees it: the `limit` blocks that were used last."""

    def __init__(self, limit: int = NUM_BLOCKS, seed: int = 7) -> None:
        self._limit = limit
        self._random = Random(seed)
        self._held: dict[bytes, None] = {}
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self._held)

    def use(self, blocks: Sequence[bytes]) -> None:
        """These are held now, and the oldest are evicted for them."""
        new = [block for block in blocks if self._held.pop(block, block) is not None]
        self._held.update(dict.fromkeys(blocks))
        evicted = [block for block, _ in zip(self._held, range(len(self._held) - self._limit), strict=False)]
        for block in evicted:
            del self._held[block]
        if evicted:
            self._events.append(Event(EventKind.REMOVED, b"".join(evicted)))
        if new:
            self._events.append(Event(EventKind.STORED, b"".join(new)))

    def turn(self, num_blocks: int) -> None:
        """So many new blocks, of which nobody has heard."""
        self.use([self._random.randbytes(ID_BYTES) for _ in range(num_blocks)])

    def drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def snapshot(self) -> tuple[BlockId, ...]:
        return tuple(map(BlockId, self._held))
