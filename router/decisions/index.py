"""The router's mirror of the prefix index: which worker holds which block, and in which tier (design 5.4). Pure.

One map from block to holders, an int with a bit for every (worker, tier). A worker has a slot of TIER_BITS bits; what it
forgets as a whole (a reset, a new generation, the end) costs a new slot, at once, and the old slot's bits are swept
later, a shard at a time. Equal holders are one object, so that an entry costs its key and its place in the map.
docs/routing.md has the sums.

Compatibility classes need no maps of their own: the class is in the key of the hash, so ids of two classes never
coincide, and a request is matched with the ids of each class it may run in. The map's keys are 60 bits of an id: what is
taken for another block by that is a wrong guess of the router's, never a wrong answer, for workers compare whole ids.

The mirror is a hint. A worker's part is trusted as far as it was followed without a gap; beyond that it says Resync,
and that worker alone is read again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.keys import Digest, EventBatch, EventKind, Snapshot, Tier, low_halves
from router.decisions.chain import Chain, Match
from router.decisions.overlay import Overlay

BOOTSTRAP_SLICE_BLOCKS = 4096
NUM_SHARDS = 1024  # a power of two
SHARD_MASK = NUM_SHARDS - 1
MAX_ENTRIES = 16_000_000
MAX_SHARED = 65_536
TIER_BITS = len(Tier)
TIER_CREDIT = {Tier.DEVICE: 1.0, Tier.HOST: 0.8, Tier.DISK: 0.4}


@dataclass(frozen=True, slots=True)
class Followed:
    """The batch is in the mirror, now or since earlier."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """The batch is of an older generation than the worker that is served now: nothing of it is credited."""


@dataclass(frozen=True, slots=True)
class Overfull:
    """The worker claims more blocks than it or the mirror may hold: it is mirrored no more until it begins anew."""


@dataclass(frozen=True, slots=True)
class Resync:
    """The mirror of this worker cannot be continued from here: read its snapshot again."""

    worker: str
    reason: Literal["unknown", "gap", "generation", "digest"]


Outcome = Followed | Outdated | Overfull | Resync


class _Mirror:
    """One worker's part. `slot` numbers its bits in the map; `digest` counts what they say."""

    __slots__ = ("digest", "flags", "full", "generation", "max_entries", "sequence", "slot", "synced")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.sequence = 0
        self.synced = False
        self.full = False
        self.max_entries = MAX_ENTRIES
        self.slot = -1
        self.flags: tuple[int, ...] = ()
        self.digest = Digest()


class Index:
    """Owns the mirror; fed by router.follow alone, read by whoever places. `overlay` is that of who places: here it is
    read, and hears what events confirm."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.overlay = Overlay()
        self._max_entries = max_entries
        self._num_entries = 0
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        self._shared: dict[int, int] = {}
        self._mirrors: dict[str, _Mirror] = {}
        self._slots: dict[int, str | None] = {}
        self._live = 0
        self._dead = 0
        self._tiered = False  # whether there ever was a block in a lower tier

    # -- reading

    def match(self, chain: Chain) -> Match:
        """Who holds how much of a prompt, which is hashed little further than any worker follows."""
        depths: dict[str, int] = {}
        discounts: dict[str, float] = {}
        shards, slots, tiered = self._shards, self._slots, self._tiered
        alive = self._live
        lower = depth = 0
        last: int | None = None
        while alive and chain.reaches(depth):
            for half in chain.halves[depth:]:
                key = half >> 4
                held = shards[key & SHARD_MASK].get(key, 0)
                if held is not last:
                    last = held
                    still = (held | held >> 1 | held >> 2) & alive if tiered else held & alive
                    if still != alive:
                        gone = alive ^ still
                        if not depth:
                            pass
                        elif gone & (gone - 1):
                            self._note(depths, gone, depth)
                        else:  # one worker alone, as most often
                            depths[slots[gone.bit_length() // TIER_BITS]] = depth  # type: ignore[index]
                        alive = still
                        if not alive:
                            break
                    if tiered:
                        lower = alive & ~held
                if lower:
                    self._discount(discounts, lower, held)
                depth += 1
        if depth:
            self._note(depths, alive, depth)
        if not self.overlay.num_blocks:
            return Match(depths, discounts, depths)
        return Match(self._with_overlay(depths, chain), discounts, depths)

    def _with_overlay(self, depths: dict[str, int], chain: Chain) -> dict[str, int]:
        """The depths that go on where this router's own placements are about to fill what is missing. What is expected
        of a chain is one run, up to some block: often the last one, else its end is found by doubling, then halving. Looked
        at are those who hold its first block already, or expect it."""
        extended = dict(depths)
        halves, reaches, overlay = chain.halves, chain.reaches, self.overlay
        begun = dict.fromkeys(overlay.rooted(halves[0]), 0) if reaches(0) else {}
        for worker, first in (begun | depths).items():
            expected, depth = overlay.expected(worker), first
            while reaches(depth) and (
                halves[depth] in expected or (depth > first and self._holds(worker, halves[depth]))
            ):
                if halves[-1] in expected:
                    depth = len(halves) - 1
                step = 1
                while reaches(depth + step) and halves[depth + step] in expected:
                    depth += step
                    step *= 2
                while step > 1:
                    step //= 2
                    if reaches(depth + step) and halves[depth + step] in expected:
                        depth += step
                depth += 1
            if depth > first:
                extended[worker] = depth
        return extended

    def _holds(self, worker: str, half: int) -> bool:
        mirror, key = self._mirrors.get(worker), half >> 4
        return mirror is not None and bool(self._shards[key & SHARD_MASK].get(key, 0) & sum(mirror.flags))

    def position(self, worker: str) -> tuple[int, int] | None:
        """(generation, sequence) up to which the worker is followed; None while it must be read again."""
        mirror = self._mirrors.get(worker)
        return (mirror.generation, mirror.sequence) if mirror is not None and mirror.synced else None

    def num_blocks(self, worker: str) -> int:
        """Entries of the worker: a block counts in each tier that holds it."""
        mirror = self._mirrors.get(worker)
        return mirror.digest.count if mirror is not None else 0

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._mirrors)

    @property
    def num_followed(self) -> int:
        """How many workers' parts are in step, as far as is known."""
        return sum([mirror.synced for mirror in self._mirrors.values()])

    @property
    def num_keys(self) -> int:
        """Size of the map, with what is still to be swept."""
        return sum(map(len, self._shards))

    def _note(self, depths: dict[str, int], bits: int, depth: int) -> None:
        slots = self._slots
        while bits:
            slot = bits.bit_length() // TIER_BITS
            depths[slots[slot]] = depth  # type: ignore[index]  # only live slots are matched
            bits ^= 1 << slot * TIER_BITS

    def _discount(self, discounts: dict[str, float], bits: int, held: int) -> None:
        while bits:
            lowest = bits & -bits
            worker = self._slots[lowest.bit_length() // TIER_BITS]
            assert worker is not None, "only live slots are matched"
            tier = Tier.HOST if held & lowest << Tier.HOST else Tier.DISK
            discounts[worker] = discounts.get(worker, 0.0) + 1.0 - TIER_CREDIT[tier]
            bits ^= lowest

    # -- following

    def expect(self, worker: str, generation: int, max_entries: int | None = None) -> None:
        """A worker of this generation is served now: what an older one held is forgotten, and never credited again.
        `max_entries`: how many blocks it can hold at most."""
        mirror = self._mirrors.get(worker)
        if mirror is None:
            mirror = self._mirrors[worker] = _Mirror(generation)
            self._take_slot(worker, mirror)
        elif mirror.generation < generation:
            self._renew(worker, mirror, generation)
        if max_entries is not None and mirror.generation == generation:
            mirror.max_entries = max_entries

    def bootstrap(self, worker: str, snapshot: Snapshot) -> Iterator[None]:
        """Makes the worker's mirror equal to the snapshot. Until that is done it stays as it was.

        To be advanced to its end before the worker's next batch; it yields every BOOTSTRAP_SLICE_BLOCKS, so that
        whoever advances it may let others run. A snapshot of an older generation than expected changes nothing.
        """
        self.expect(worker, snapshot.generation)
        mirror = self._mirrors[worker]
        if mirror.generation != snapshot.generation:
            return
        mirror.synced = False
        if not self._may_hold(mirror, snapshot.num_blocks - mirror.digest.count):
            self._give_up(worker, mirror)
            mirror.sequence, mirror.synced = snapshot.sequence, True
            return
        fresh = _Mirror(snapshot.generation)
        fresh.sequence, fresh.max_entries = snapshot.sequence, mirror.max_entries
        self._take_slot(None, fresh)
        loaded = False
        try:
            for event in snapshot.stored:
                halves = low_halves(event.ids)
                for start in range(0, len(halves), BOOTSTRAP_SLICE_BLOCKS):
                    self._store(fresh, halves[start : start + BOOTSTRAP_SLICE_BLOCKS], event.tier)
                    yield
                    if self._mirrors.get(worker) is not mirror or mirror.generation != snapshot.generation:
                        return
            self._retire(mirror)
            fresh.synced = loaded = True
            self._mirrors[worker] = fresh
            self._slots[fresh.slot] = worker
            self._live |= 1 << fresh.slot * TIER_BITS
        finally:
            if not loaded:
                self._retire(fresh)

    def apply(self, worker: str, batch: EventBatch) -> Outcome:
        """Follows one batch. Applying a batch twice changes nothing; one that does not continue the mirror says so."""
        mirror = self._mirrors.get(worker)
        if mirror is None:
            return Resync(worker, "unknown")
        if batch.generation < mirror.generation:
            return Outdated()
        if batch.generation > mirror.generation:
            self._renew(worker, mirror, batch.generation)
            return Resync(worker, "generation")
        if not mirror.synced:
            return Resync(worker, "unknown")
        if batch.sequence <= mirror.sequence:
            return Followed()
        if batch.sequence != mirror.sequence + 1:
            mirror.synced = False
            return Resync(worker, "gap")
        mirror.sequence = batch.sequence
        for event in batch.events:
            match event.kind:
                case EventKind.CLEARED:
                    self._clear(worker, mirror)
                case EventKind.STORED if not mirror.full:
                    if not self._may_hold(mirror, event.num_blocks):
                        self._give_up(worker, mirror)
                    else:
                        halves = low_halves(event.ids)
                        self._store(mirror, halves, event.tier)
                        self.overlay.confirm(worker, halves)
                case EventKind.REMOVED if not mirror.full:
                    self._remove(mirror, low_halves(event.ids), event.tier)
        if mirror.full:
            return Overfull()
        if mirror.digest != batch.digest:
            mirror.synced = False
            return Resync(worker, "digest")
        return Followed()

    def drop(self, worker: str) -> None:
        """The worker is gone for good."""
        mirror = self._mirrors.pop(worker, None)
        self.overlay.forget(worker)
        if mirror is not None:
            self._retire(mirror)

    def sweep(self) -> Iterator[None]:
        """Frees what was forgotten as a whole; yields after every shard, so that whoever advances it may let others
        run. Advanced to its end before the next one begins."""
        dead = self._dead
        if not dead:
            return
        for at, shard in enumerate(self._shards):
            stale = [key for key, held in shard.items() if held & dead]
            for key in stale:
                left = shard[key] & ~dead
                if left:
                    shard[key] = self._share(left)
                else:
                    del shard[key]
            if len(stale) > len(shard):
                self._shards[at] = dict(shard)  # a dict does not shrink by itself
            yield
        self._dead &= ~dead
        for slot in [slot for slot, worker in self._slots.items() if worker is None and dead >> slot * TIER_BITS & 1]:
            del self._slots[slot]

    # -- the map and the slots change here alone

    def _store(self, mirror: _Mirror, halves: Sequence[int], tier: Tier) -> None:
        flag, shards, share = mirror.flags[tier], self._shards, self._share
        self._tiered = self._tiered or tier is not Tier.DEVICE
        repeated = []
        for half in halves:
            key = half >> 4
            shard = shards[key & SHARD_MASK]
            held = shard.get(key)
            if held is None:
                shard[key] = flag
            elif held & flag:
                repeated.append(half)
            else:
                shard[key] = share(held | flag)
        mirror.digest.add(halves, tier)
        mirror.digest.remove(repeated, tier)
        self._num_entries += len(halves) - len(repeated)

    def _remove(self, mirror: _Mirror, halves: Sequence[int], tier: Tier) -> None:
        flag, shards, share = mirror.flags[tier], self._shards, self._share
        absent = []
        for half in halves:
            key = half >> 4
            shard = shards[key & SHARD_MASK]
            held = shard.get(key, 0)
            if held == flag:
                del shard[key]
            elif held & flag:
                shard[key] = share(held ^ flag)
            else:
                absent.append(half)
        mirror.digest.remove(halves, tier)
        mirror.digest.add(absent, tier)
        self._num_entries -= len(halves) - len(absent)

    def _share(self, held: int) -> int:
        """The one object for these holders. Forgetting which there are costs memory for a while, nothing else."""
        if len(self._shared) >= MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(held, held)

    def _may_hold(self, mirror: _Mirror, num_more: int) -> bool:
        return (
            mirror.digest.count + num_more <= mirror.max_entries and self._num_entries + num_more <= self._max_entries
        )

    def _give_up(self, worker: str, mirror: _Mirror) -> None:
        self._clear(worker, mirror)
        mirror.full = True

    def _renew(self, worker: str, mirror: _Mirror, generation: int) -> None:
        self._clear(worker, mirror)
        mirror.generation, mirror.sequence, mirror.synced = generation, 0, False

    def _clear(self, worker: str, mirror: _Mirror) -> None:
        mirror.full = False
        self.overlay.forget(worker)
        if mirror.digest.count:
            self._retire(mirror)
            self._take_slot(worker, mirror)

    def _take_slot(self, worker: str | None, mirror: _Mirror) -> None:
        """Without a worker the slot is not matched yet."""
        slot = next(slot for slot in range(len(self._slots) + 1) if slot not in self._slots)
        self._slots[slot] = worker
        first = slot * TIER_BITS
        if worker is not None:
            self._live |= 1 << first
        mirror.slot = slot
        mirror.flags = tuple(1 << first + tier for tier in Tier)
        mirror.digest = Digest()

    def _retire(self, mirror: _Mirror) -> None:
        """What the mirror holds is not matched from now on; its bits are swept later."""
        self._num_entries -= mirror.digest.count
        self._live &= ~mirror.flags[Tier.DEVICE]
        if mirror.digest.count:
            self._slots[mirror.slot] = None
            self._dead |= sum(mirror.flags)
        else:
            del self._slots[mirror.slot]
