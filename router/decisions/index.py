"""The router's mirror of the prefix index: how far each worker is followed, and what it holds (design 5.4). Pure.

Compatibility classes need no maps of their own: the class is in the key of the hash, so ids of two classes never
coincide, and a request is matched with the ids of each class it may run in.

The mirror is a hint. A worker's part is trusted as far as it was followed without a gap; beyond that it says Resync,
and that worker alone is read again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from headrace.keys import Event, EventBatch, EventKind, Snapshot, low_halves
from router.decisions.chain import Chain, Match, keys_of
from router.decisions.holders import Holders, Part
from router.decisions.overlay import Overlay

MAX_ENTRIES = 16_000_000


@dataclass(frozen=True, slots=True)
class Followed:
    """The batch is in the mirror, now or since earlier."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """The batch is of another generation than the worker that is served now: nothing of it is credited."""


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
    """One worker's part, and how far it was followed. `newest`: the newest generation that there was, which is over where
    it is not the one that is served: clocks number generations, and a clock may be set back."""

    __slots__ = ("full", "generation", "max_entries", "newest", "part", "sequence", "synced")

    def __init__(self, generation: int, part: Part, sequence: int = 0, max_entries: int = MAX_ENTRIES) -> None:
        self.generation = self.newest = generation
        self.part = part
        self.sequence = sequence
        self.max_entries = max_entries
        self.synced = False
        self.full = False


class Loading:
    """A worker's set on its way into the mirror, read a slice at a time while the worker goes on changing it. Until it is
    settled, what is matched stays as it was. Made by Index.loading()."""

    def __init__(self, index: "Index", worker: str, mirror: _Mirror, fresh: _Mirror | None) -> None:
        self._index = index
        self._worker = worker
        self._mirror = mirror
        self._fresh = fresh

    @property
    def wanted(self) -> bool:
        """Whether there is anything to read: not when the mirror is to hold nothing of it, or it changed otherwise."""
        fresh, mirror = self._fresh, self._mirror
        current = self._index._mirrors.get(self._worker) is mirror and not mirror.full
        return fresh is not None and current and mirror.generation == fresh.generation

    def add(self, found: Event) -> None:
        """Blocks that the set held at some moment since the reading began; any may come twice."""
        if self._fresh is not None and self.wanted:
            self._index._load(self._worker, self._mirror, self._fresh, found)

    def settle(self, batches: Sequence[EventBatch], position: tuple[int, int] | None) -> bool:
        """The set is read to its end. `batches` are what changed it since the reading began, `position` is where it stands
        after them. Whether the worker can be followed from there; if not, it is to be read again."""
        if self._fresh is None or not self.wanted:
            return self._index.position(self._worker) is not None
        settled = self._index._settle(self._worker, self._mirror, self._fresh, batches, position)
        if settled:
            self._fresh = None
        return settled

    def close(self) -> None:
        """Frees what was read, if it was not settled."""
        if self._fresh is not None:
            self._index._holders.retire(self._fresh.part)
            self._fresh = None


class Index:
    """Owns the mirror; fed by router.follow alone, read by whoever places. `overlay` is that of who places: here it is
    read, and hears what events confirm."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.overlay = Overlay()
        self._max_entries = max_entries
        self._holders = Holders()
        self._mirrors: dict[str, _Mirror] = {}
        self._num_followed = 0

    # -- reading

    def match(self, chain: Chain) -> Match:
        """Who holds how much of a prompt, which is hashed little further than any worker follows."""
        depths, discounts = self._holders.match(chain)
        if not self.overlay.num_blocks:
            return Match(depths, discounts, depths)
        return Match(self._with_overlay(depths, chain), discounts, depths)

    def _with_overlay(self, depths: dict[str, int], chain: Chain) -> dict[str, int]:
        """The depths that go on where this router's own placements are about to fill what is missing. What is expected
        of a chain is one run, up to some block: often the last one, else its end is found by doubling, then halving. Looked
        at are those who hold its first block already, or expect it."""
        extended = dict(depths)
        keys, reaches, expecting = chain.keys, chain.reaches, self.overlay.expecting
        rooted = self.overlay.rooted(keys[0]) if reaches(0) else ()
        begun = [worker for worker in rooted if worker not in depths]
        for worker in (*(depths.keys() & expecting.keys()), *begun):
            expected, first = expecting[worker], depths.get(worker, 0)
            depth = first
            if depth < len(keys) and keys[depth] not in expected:
                continue  # as most often
            while reaches(depth) and (keys[depth] in expected or (depth > first and self._holds(worker, keys[depth]))):
                if keys[-1] in expected:
                    depth = len(keys) - 1
                step = 1
                while reaches(depth + step) and keys[depth + step] in expected:
                    depth += step
                    step *= 2
                while step > 1:
                    step //= 2
                    if reaches(depth + step) and keys[depth + step] in expected:
                        depth += step
                depth += 1
            if depth > first:
                extended[worker] = depth
        return extended

    def holds(self, worker: str, keys: Sequence[int]) -> bool:
        """Whether the mirror has all of these of the worker."""
        return all(self._holds(worker, key) for key in keys)

    def _holds(self, worker: str, key: int) -> bool:
        mirror = self._mirrors.get(worker)
        return mirror is not None and self._holders.holds(mirror.part, key)

    def position(self, worker: str) -> tuple[int, int] | None:
        """(generation, sequence) up to which the worker is followed; None while it must be read again."""
        mirror = self._mirrors.get(worker)
        return (mirror.generation, mirror.sequence) if mirror is not None and mirror.synced else None

    def generation(self, worker: str) -> int | None:
        """Of the worker that is served, as far as is known."""
        mirror = self._mirrors.get(worker)
        return mirror.generation if mirror is not None else None

    def num_blocks(self, worker: str) -> int:
        """Entries of the worker: a block counts in each tier that holds it."""
        mirror = self._mirrors.get(worker)
        return mirror.part.digest.count if mirror is not None else 0

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._mirrors)

    @property
    def num_followed(self) -> int:
        """How many workers' parts are in step, as far as is known."""
        return self._num_followed

    @property
    def num_keys(self) -> int:
        """Size of the map, with what is still to be swept."""
        return self._holders.num_keys

    # -- following

    def expect(self, worker: str, generation: int) -> None:
        """A worker of this generation is said to be served now: what an older one held is forgotten, and never credited
        again."""
        mirror = self._mirrors.get(worker)
        if mirror is None:
            self._mirrors[worker] = _Mirror(generation, self._holders.begin(worker))
        elif generation > mirror.newest:
            self._renew(worker, mirror, generation)

    def meet(self, worker: str, generation: int, max_entries: int) -> None:
        """The worker itself says so, whatever its generation was before. It can hold so many blocks at most."""
        self.expect(worker, generation)
        mirror = self._mirrors[worker]
        if mirror.generation != generation:
            self._renew(worker, mirror, generation)
        mirror.max_entries = max_entries

    @contextmanager
    def loading(self, worker: str, generation: int, sequence: int, num_blocks: int) -> Iterator[Loading]:
        """The worker's set is read: it stood at `sequence` when that began, and had `num_blocks` blocks. One of another
        generation than is served changes nothing. Nothing of the worker is applied until it is over."""
        self.expect(worker, generation)
        mirror, fresh = self._mirrors[worker], None
        if mirror.generation == generation:
            mirror.full = False
            self._set_synced(mirror, False)
            if self._may_hold(worker, mirror, num_blocks - mirror.part.digest.count):
                fresh = _Mirror(generation, self._holders.begin(), sequence, mirror.max_entries)
            else:
                self._give_up(worker, mirror)
                mirror.sequence = sequence
                self._set_synced(mirror, True)
        loading = Loading(self, worker, mirror, fresh)
        try:
            yield loading
        finally:
            loading.close()

    def load(self, worker: str, snapshot: Snapshot) -> None:
        """Makes the worker's mirror equal to the snapshot, at once."""
        position = snapshot.generation, snapshot.sequence
        with self.loading(worker, *position, snapshot.num_blocks) as loading:
            for found in snapshot.stored:
                loading.add(found)
            loading.settle((), position)

    def apply(self, worker: str, batch: EventBatch) -> Outcome:
        """Follows one batch. Applying a batch twice changes nothing; one that does not continue the mirror says so."""
        mirror = self._mirrors.get(worker)
        if mirror is None:
            return Resync(worker, "unknown")
        if batch.generation > mirror.newest:
            self._renew(worker, mirror, batch.generation)
            return Resync(worker, "generation")
        if batch.generation != mirror.generation:
            return Outdated()
        if not mirror.synced:
            return Resync(worker, "unknown")
        if batch.sequence <= mirror.sequence:
            return Followed()
        if batch.sequence != mirror.sequence + 1:
            self._set_synced(mirror, False)
            return Resync(worker, "gap")
        self._change(worker, mirror, batch)
        if mirror.full:
            return Overfull()
        if mirror.part.digest != batch.digest:
            self._set_synced(mirror, False)
            return Resync(worker, "digest")
        return Followed()

    def drop(self, worker: str) -> None:
        """The worker is gone for good."""
        mirror = self._mirrors.pop(worker, None)
        self.overlay.forget(worker)
        if mirror is not None:
            self._set_synced(mirror, False)
            self._holders.retire(mirror.part)

    def sweep(self) -> Iterator[None]:
        """Frees what was forgotten as a whole, in slices. Advanced to its end before the next one begins."""
        return self._holders.sweep()

    # -- mirrors change here alone

    def _change(self, worker: str, mirror: _Mirror, batch: EventBatch) -> None:
        mirror.sequence = batch.sequence
        for event in batch.events:
            match event.kind:
                case EventKind.CLEARED:
                    self._clear(worker, mirror)
                case EventKind.STORED if not mirror.full:
                    if not self._may_hold(worker, mirror, event.num_blocks):
                        self._give_up(worker, mirror)
                    else:
                        halves = low_halves(event.ids)
                        self._holders.store(mirror.part, halves, event.tier)
                        if worker in self.overlay.expecting:
                            self.overlay.confirm(worker, keys_of(halves))
                case EventKind.REMOVED if not mirror.full:
                    self._holders.remove(mirror.part, low_halves(event.ids), event.tier)

    def _load(self, worker: str, mirror: _Mirror, fresh: _Mirror, found: Event) -> None:
        if self._may_hold(worker, fresh, found.num_blocks):
            self._holders.store(fresh.part, low_halves(found.ids), found.tier)
        else:
            self._give_up(worker, mirror)
            mirror.sequence = fresh.sequence
            self._set_synced(mirror, True)

    def _settle(
        self,
        worker: str,
        mirror: _Mirror,
        fresh: _Mirror,
        batches: Sequence[EventBatch],
        position: tuple[int, int] | None,
    ) -> bool:
        """What the slices missed, or hold too much of, a batch since then has: after all of them the set is exact."""
        for batch in batches:
            if (batch.generation, batch.sequence) != (fresh.generation, fresh.sequence + 1):
                return False
            self._change(worker, fresh, batch)
        digest = batches[-1].digest if batches and not fresh.full else fresh.part.digest
        if position != (fresh.generation, fresh.sequence) or fresh.part.digest != digest:
            return False
        self._holders.retire(mirror.part)
        self._mirrors[worker] = fresh
        self._holders.match_as(worker, fresh.part)
        fresh.newest = mirror.newest
        self._set_synced(fresh, True)
        return True

    def _set_synced(self, mirror: _Mirror, synced: bool) -> None:
        self._num_followed += synced - mirror.synced
        mirror.synced = synced

    def _may_hold(self, worker: str, mirror: _Mirror, num_more: int) -> bool:
        """What another mirror of the worker holds does not count: this one takes its place."""
        current = self._mirrors.get(worker)
        leaving = current.part.digest.count if current is not None and current is not mirror else 0
        num_entries = self._holders.num_entries - leaving
        return mirror.part.digest.count + num_more <= mirror.max_entries and num_entries + num_more <= self._max_entries

    def _give_up(self, worker: str, mirror: _Mirror) -> None:
        self._clear(worker, mirror)
        mirror.full = True

    def _renew(self, worker: str, mirror: _Mirror, generation: int) -> None:
        self._clear(worker, mirror)
        mirror.generation, mirror.sequence = generation, 0
        self._set_synced(mirror, False)
        mirror.newest = max(mirror.newest, generation)

    def _clear(self, worker: str, mirror: _Mirror) -> None:
        mirror.full = False
        self.overlay.forget(worker)
        if mirror.part.digest.count:
            self._holders.retire(mirror.part)
            mirror.part = self._holders.begin(worker if self._mirrors.get(worker) is mirror else None)
