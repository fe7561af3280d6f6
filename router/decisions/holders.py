"""Who holds which block, in which tier: one map from block to holders, an int with a bit for every (worker, tier). Pure.

A worker's part has a slot of TIER_BITS bits. What is forgotten as a whole (a reset, a new generation, the end) costs a
new slot, at once, and the old slot's bits are swept later, a shard at a time. Equal holders are one object, so that an
entry costs its key and its place in the map. docs/routing.md has the sums.

The map's keys are 60 bits of an id: what is taken for another block by that is a wrong guess of the router's, never a
wrong answer, for workers compare whole ids.
"""

from collections.abc import Iterator, Sequence

from headrace.keys import Digest, Tier
from router.decisions.chain import KEY_SHIFT, Chain

NUM_SHARDS = 1024  # a power of two
SHARD_MASK = NUM_SHARDS - 1
MAX_SHARED = 65_536
TIER_BITS = len(Tier)
TIER_CREDIT = {Tier.DEVICE: 1.0, Tier.HOST: 0.8, Tier.DISK: 0.4}


class Part:
    """What one worker holds: `flags`, the bits of its slot by tier, and the digest of what they say. Changed by its
    Holders alone."""

    __slots__ = ("digest", "first_bit", "flags")

    def __init__(self, first_bit: int) -> None:
        self.first_bit = first_bit
        self.flags = tuple(1 << first_bit + tier for tier in Tier)
        self.digest = Digest()


class Holders:
    """Owns the map and the slots. `num_entries`: blocks over all parts that are not retired, each tier by itself."""

    def __init__(self) -> None:
        self.num_entries = 0
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        self._shared: dict[int, int] = {}
        self._taken: set[int] = set()  # the first bits of slots, of retired parts too
        self._workers: dict[int, str] = {}  # by the first bit of their slot
        self._live = 0
        self._dead = 0
        self._tiered = False  # whether there ever was a block in a lower tier

    @property
    def num_keys(self) -> int:
        """Size of the map, with what is still to be swept."""
        return sum(map(len, self._shards))

    # -- reading

    def match(self, chain: Chain) -> tuple[dict[str, int], dict[str, float]]:
        """How many leading blocks of a prompt each worker holds, and how much of them is not worth a block on the device.
        The chain is hashed little further than any worker follows."""
        depths: dict[str, int] = {}
        discounts: dict[str, float] = {}
        shards, workers, tiered = self._shards, self._workers, self._tiered
        alive = self._live
        lower = depth = 0
        last: int | None = None
        while alive and chain.reaches(depth):
            # Looked up before any is looked at: so the next ones' memory is waited for together.
            for held in [shards[key & SHARD_MASK].get(key, 0) for key in chain.keys[depth:]]:
                if held is not last:
                    last = held
                    still = (held | held >> 1 | held >> 2) & alive if tiered else held & alive
                    if still != alive:
                        gone = alive ^ still
                        alive = still
                        if depth and gone.bit_count() == 1:  # as most often
                            depths[workers[gone.bit_length() - 1]] = depth
                        elif depth:
                            self._note(depths, gone, depth)
                        if not alive:
                            break
                    if tiered:
                        lower = alive & ~held
                if lower:
                    self._discount(discounts, lower, held)
                depth += 1
        if depth:
            self._note(depths, alive, depth)
        return depths, discounts

    def holds(self, part: Part, key: int) -> bool:
        return bool(self._shards[key & SHARD_MASK].get(key, 0) >> part.first_bit & (1 << TIER_BITS) - 1)

    def _note(self, depths: dict[str, int], bits: int, depth: int) -> None:
        while bits:
            first_bit = bits.bit_length() - 1
            depths[self._workers[first_bit]] = depth
            bits ^= 1 << first_bit

    def _discount(self, discounts: dict[str, float], bits: int, held: int) -> None:
        while bits:
            lowest = bits & -bits
            worker = self._workers[lowest.bit_length() - 1]
            tier = Tier.HOST if held & lowest << Tier.HOST else Tier.DISK
            discounts[worker] = discounts.get(worker, 0.0) + 1.0 - TIER_CREDIT[tier]
            bits ^= lowest

    # -- parts

    def begin(self, worker: str | None = None) -> Part:
        """An empty part. Without a worker it is not matched yet."""
        taken = self._taken
        part = Part(next(first for first in range(0, (len(taken) + 1) * TIER_BITS, TIER_BITS) if first not in taken))
        taken.add(part.first_bit)
        if worker is not None:
            self.match_as(worker, part)
        return part

    def match_as(self, worker: str, part: Part) -> None:
        """From now on the part is what this worker holds; the one before is retired already."""
        self._workers[part.first_bit] = worker
        self._live |= 1 << part.first_bit

    def retire(self, part: Part) -> None:
        """What the part holds is not matched from now on; its bits are swept later."""
        self.num_entries -= part.digest.count
        self._live &= ~part.flags[Tier.DEVICE]
        self._workers.pop(part.first_bit, None)
        if part.digest.count:
            self._dead |= sum(part.flags)
        else:
            self._taken.discard(part.first_bit)

    def store(self, part: Part, halves: Sequence[int], tier: Tier) -> None:
        flag, shards, share = part.flags[tier], self._shards, self._share
        self._tiered = self._tiered or tier is not Tier.DEVICE
        repeated = []
        for half in halves:
            key = half >> KEY_SHIFT
            shard = shards[key & SHARD_MASK]
            held = shard.get(key)
            if held is None:
                shard[key] = flag
            elif held & flag:
                repeated.append(half)
            else:
                shard[key] = share(held | flag)
        part.digest.add(halves, tier)
        part.digest.remove(repeated, tier)
        self.num_entries += len(halves) - len(repeated)

    def remove(self, part: Part, halves: Sequence[int], tier: Tier) -> None:
        flag, shards, share = part.flags[tier], self._shards, self._share
        absent = []
        for half in halves:
            key = half >> KEY_SHIFT
            shard = shards[key & SHARD_MASK]
            held = shard.get(key, 0)
            if held == flag:
                del shard[key]
            elif held & flag:
                shard[key] = share(held ^ flag)
            else:
                absent.append(half)
        part.digest.remove(halves, tier)
        part.digest.add(absent, tier)
        self.num_entries -= len(halves) - len(absent)

    def sweep(self) -> Iterator[None]:
        """Frees what was retired; yields after every shard, so that whoever advances it may let others run. Advanced to
        its end before the next one begins."""
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
        self._taken -= {first_bit for first_bit in self._taken if dead >> first_bit & 1}

    def _share(self, held: int) -> int:
        """The one object for these holders. Forgetting which there are costs memory for a while, nothing else."""
        if len(self._shared) >= MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(held, held)
