"""A worker's cache as it really is, what it tells of it, and an index that hears that."""

from headrace.blocks import BlockId
from headrace.keys import Digest, Event, EventBatch, EventKind, Snapshot, Tier, low_halves
from router.decisions.chain import Chain
from router.decisions.index import Index


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "big"))


class Truth:
    """A worker's own ledger: the oracle."""

    def __init__(self, generation: int = 1) -> None:
        self.generation = generation
        self.sequence = 0
        self.held: set[tuple[BlockId, Tier]] = set()

    def batch(self, *events: Event) -> EventBatch:
        for event in events:
            pairs = {(held, event.tier) for held in event.blocks}
            match event.kind:
                case EventKind.STORED:
                    self.held |= pairs
                case EventKind.REMOVED:
                    self.held -= pairs
                case EventKind.CLEARED:
                    self.held.clear()
        self.sequence += 1
        digest = Digest()
        for held, tier in self.held:
            digest.add(low_halves(held), tier)
        return EventBatch(self.generation, self.sequence, digest.count, digest.xor, events)

    def snapshot(self) -> Snapshot:
        by_tier = {tier: [held for held, where in self.held if where is tier] for tier in Tier}
        stored = tuple(Event.of(EventKind.STORED, blocks, tier) for tier, blocks in by_tier.items() if blocks)
        return Snapshot(self.generation, self.sequence, stored)


def stored(*numbers: int, tier: Tier = Tier.DEVICE) -> Event:
    return Event.of(EventKind.STORED, map(block, numbers), tier)


def removed(*numbers: int, tier: Tier = Tier.DEVICE) -> Event:
    return Event.of(EventKind.REMOVED, map(block, numbers), tier)


def read(index: Index, worker: str, snapshot: Snapshot) -> None:
    index.load(worker, snapshot)


def sweep(index: Index) -> None:
    for _ in index.sweep():
        pass


def held(index: Index, worker: str, upto: int = 40) -> set[BlockId]:
    return {block(n) for n in range(upto) if worker in index.match(Chain([block(n)])).depths}


def synced(worker: str, truth: Truth) -> Index:
    index = Index()
    read(index, worker, truth.snapshot())
    return index
