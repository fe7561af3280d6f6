"""The router's mirror of the prefix index: which worker holds which block (design 5.4). Pure.

One map from block id to the set of workers that hold it, a bit a worker. Compatibility classes need no maps of their
own: the class is in the key of the hash, so ids of two classes never coincide, and a request is matched with the ids
of each class it may run in.

The mirror is a hint. A worker's part is trusted as far as it was followed without a gap; beyond that it says Resync,
and that worker alone is read again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.blocks import BlockId
from headrace.keys import Digest, EventBatch, EventKind, Snapshot, Tier

BOOTSTRAP_SLICE_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Followed:
    """The batch is in the mirror, now or since earlier."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """The batch is of an older generation than the worker that is served now: nothing of it is credited."""


@dataclass(frozen=True, slots=True)
class Resync:
    """The mirror of this worker cannot be continued from here: read its snapshot again."""

    worker: str
    reason: Literal["unknown", "gap", "generation", "digest"]


Outcome = Followed | Outdated | Resync


class _Mirror:
    """One worker's set as this router knows it. `tiers` of a block is a bit for every tier that holds it."""

    __slots__ = ("bit", "digest", "generation", "sequence", "synced", "tiers")

    def __init__(self, bit: int, generation: int) -> None:
        self.bit = bit
        self.generation = generation
        self.sequence = 0
        self.synced = False
        self.digest = Digest()
        self.tiers: dict[BlockId, int] = {}


class Index:
    """Owns the mirror; fed by router.follow alone, read by whoever places."""

    def __init__(self) -> None:
        self._holders: dict[BlockId, int] = {}
        self._mirrors: dict[str, _Mirror] = {}
        self._workers: dict[int, str] = {}

    def match(self, ids: Iterable[BlockId]) -> dict[str, int]:
        """How many leading blocks of a prompt each worker holds; workers that hold none are absent.

        `ids` is read only as far as any worker follows, so a lazy chain is hashed no further than that.
        """
        matched: dict[str, int] = {}
        holders = self._holders
        alive = -1
        depth = 0
        for block in ids:
            still = holders.get(block, 0) & alive
            if still != alive:
                if depth:
                    self._note(matched, alive & ~still, depth)
                alive = still
                if not alive:
                    return matched
            depth += 1
        if depth:
            self._note(matched, alive, depth)
        return matched

    def _note(self, matched: dict[str, int], bits: int, depth: int) -> None:
        while bits:
            lowest = bits & -bits
            matched[self._workers[lowest]] = depth
            bits ^= lowest

    def expect(self, worker: str, generation: int) -> None:
        """A worker of this generation is served now: what an older one held is forgotten, and never credited again."""
        mirror = self._mirrors.get(worker)
        if mirror is None:
            self._mirrors[worker] = _Mirror(self._free_bit(worker), generation)
        elif mirror.generation < generation:
            self._renew(mirror, generation)

    def bootstrap(self, worker: str, snapshot: Snapshot) -> Iterator[None]:
        """Makes the worker's mirror equal to the snapshot, changing only what differs.

        To be advanced to its end before the worker's next batch; it yields every BOOTSTRAP_SLICE_BLOCKS, so that
        whoever advances it may let others run. A snapshot of an older generation than expected changes nothing.
        """
        self.expect(worker, snapshot.generation)
        mirror = self._mirrors[worker]
        if mirror.generation != snapshot.generation:
            return
        mirror.synced = False
        wanted: dict[BlockId, int] = {}
        for block, tier in snapshot.blocks:
            wanted[block] = wanted.get(block, 0) | 1 << tier
        changed = [block for block in mirror.tiers if block not in wanted]
        changed += [block for block, tiers in wanted.items() if mirror.tiers.get(block) != tiers]
        for number, block in enumerate(changed):
            self._set_tiers(mirror, block, wanted.get(block, 0))
            if number % BOOTSTRAP_SLICE_BLOCKS == BOOTSTRAP_SLICE_BLOCKS - 1:
                yield
                if self._mirrors.get(worker) is not mirror or mirror.generation != snapshot.generation:
                    return
        mirror.sequence = snapshot.sequence
        mirror.synced = True

    def apply(self, worker: str, batch: EventBatch) -> Outcome:
        """Follows one batch. Applying a batch twice changes nothing; one that does not continue the mirror says so."""
        mirror = self._mirrors.get(worker)
        if mirror is None:
            return Resync(worker, "unknown")
        if batch.generation < mirror.generation:
            return Outdated()
        if batch.generation > mirror.generation:
            self._renew(mirror, batch.generation)
            return Resync(worker, "generation")
        if not mirror.synced:
            return Resync(worker, "unknown")
        if batch.sequence <= mirror.sequence:
            return Followed()
        if batch.sequence != mirror.sequence + 1:
            mirror.synced = False
            return Resync(worker, "gap")
        for event in batch.events:
            if event.kind is EventKind.CLEARED:
                self._clear(mirror)
                continue
            flag = 1 << event.tier
            for block in event.blocks:
                held = mirror.tiers.get(block, 0)
                self._set_tiers(mirror, block, held | flag if event.kind is EventKind.STORED else held & ~flag)
        mirror.sequence = batch.sequence
        if mirror.digest != batch.digest:
            mirror.synced = False
            return Resync(worker, "digest")
        return Followed()

    def drop(self, worker: str) -> None:
        """The worker is gone for good; its bit is free for another."""
        mirror = self._mirrors.pop(worker, None)
        if mirror is not None:
            self._clear(mirror)
            del self._workers[mirror.bit]

    def position(self, worker: str) -> tuple[int, int] | None:
        """(generation, sequence) up to which the worker is followed; None while it must be read again."""
        mirror = self._mirrors.get(worker)
        return (mirror.generation, mirror.sequence) if mirror is not None and mirror.synced else None

    def num_blocks(self, worker: str) -> int:
        mirror = self._mirrors.get(worker)
        return len(mirror.tiers) if mirror is not None else 0

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._mirrors)

    def _free_bit(self, worker: str) -> int:
        bit = 1
        while bit in self._workers:
            bit <<= 1
        self._workers[bit] = worker
        return bit

    def _renew(self, mirror: _Mirror, generation: int) -> None:
        self._clear(mirror)
        mirror.generation, mirror.sequence, mirror.synced = generation, 0, False

    def _clear(self, mirror: _Mirror) -> None:
        keep = ~mirror.bit
        holders = self._holders
        for block in mirror.tiers:
            left = holders[block] & keep
            if left:
                holders[block] = left
            else:
                del holders[block]
        mirror.tiers.clear()
        mirror.digest = Digest()

    def _set_tiers(self, mirror: _Mirror, block: BlockId, tiers: int) -> None:
        """The one place where a worker's set, its digest and the shared map change, together."""
        held = mirror.tiers.get(block, 0)
        if held == tiers:
            return
        for tier in Tier:
            flag = 1 << tier
            if tiers & flag and not held & flag:
                mirror.digest.add(block, tier)
            elif held & flag and not tiers & flag:
                mirror.digest.remove(block, tier)
        if not tiers:
            del mirror.tiers[block]
            left = self._holders[block] & ~mirror.bit
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]
            return
        mirror.tiers[block] = tiers
        if not held:
            self._holders[block] = self._holders.get(block, 0) | mirror.bit
