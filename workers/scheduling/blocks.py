"""The ledger of one worker's KV blocks: who holds which block, in which state, until when; and the prefix cache.

A block is free, cached (its content has an identity, nobody holds it, it may be evicted) or held. Holders come and go
through a Holding each; a block with several holders shows the strongest of their states: active, then pinned, then
quarantined. Blocks of a holding that closes are given back in reverse order, so that a prefix outlives its tails.

Pure bookkeeping, no memory: `workers.kv.pool` holds the content. Everything is O(1) a block.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum

from headrace.blocks import BlockId
from headrace.errors import InternalError
from headrace.keys import Event, EventKind
from headrace.values import BlockCounts
from workers.scheduling.cache_events import CacheEvents


class Hold(IntEnum):
    """Why a block is held; a lower one is stronger. Quarantined: its owner is gone, but something may still write it."""

    ACTIVE = 0
    PINNED = 1
    QUARANTINED = 2


class Holding:
    """The blocks of one owner, in the order of its block table. Read by all, changed by the ledger alone.

    `deadline` is set while pinned. `era` is the cache's at the time it opened: what is computed under an older one is
    never published.
    """

    __slots__ = ("blocks", "deadline", "era", "owner", "state")

    def __init__(self, owner: object, era: int) -> None:
        self.owner = owner
        self.era = era
        self.blocks: list[int] = []
        self.state = Hold.ACTIVE
        self.deadline: float | None = None

    def __repr__(self) -> str:
        return f"Holding({self.owner!r}, {self.state.name.lower()}, {len(self.blocks)} blocks)"


class BlockLedger:
    """Owns the state, epoch and identity of `num_blocks` blocks. Used by the scheduler; the publisher drains events.

    `size` is what it was made with, `num_blocks` what of that is in use now: less only after resize().
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.size = self.num_blocks = num_blocks
        self.block_size = block_size
        self.era = 0
        self._epochs = array("q", bytes(8 * num_blocks))
        self._refs: tuple[list[int], ...] = tuple([0] * num_blocks for _ in Hold)
        self._total = [0] * num_blocks
        self._shown = [0] * len(Hold)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._unused: list[int] = []
        self._ids: list[BlockId | None] = [None] * num_blocks
        self._by_id: dict[BlockId, int] = {}
        self._holdings: dict[Holding, None] = {}
        self._fresh: list[tuple[int, int]] = []
        self._events = CacheEvents(max(4096, 2 * num_blocks))

    # -- what there is

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._idle)

    @property
    def num_pinned(self) -> int:
        return self._shown[Hold.PINNED]

    def epoch(self, block: int) -> int:
        return self._epochs[block]

    def counts(self) -> BlockCounts:
        """They sum to the pool. `stranded` is what nobody can account for: always 0 unless the ledger is broken."""
        active, pinned, quarantined = self._shown
        free, cached = len(self._free), len(self._idle)
        stranded = self.num_blocks - free - cached - active - pinned - quarantined
        return BlockCounts(free, cached, active, pinned, quarantined, stranded)

    def holdings(self) -> tuple[Holding, ...]:
        """Every open holding: the owner of every held block is in one of them."""
        return tuple(self._holdings)

    def resize(self, num_blocks: int) -> None:
        """From now on the pool is one of `num_blocks`; where more are held, of those, until it is asked again. At most
        `size`. For tests of small pools: cached content makes way, held content never does."""
        while self.num_blocks < min(num_blocks, self.size):
            self._free.append(self._unused.pop())
            self.num_blocks += 1
        while self.num_blocks > num_blocks and self.available:
            self._unused.append(self._take())
            self.num_blocks -= 1

    # -- holding

    def open(self, owner: object) -> Holding:
        holding = Holding(owner, self.era)
        self._holdings[holding] = None
        return holding

    def allocate(self, holding: Holding, num_blocks: int) -> list[int]:
        """Appends blocks of undefined content, each under a new epoch. InternalError beyond `available`."""
        if num_blocks > self.available:
            raise InternalError(f"{num_blocks} blocks asked for, {self.available} available")
        if holding.state is not Hold.ACTIVE:
            raise InternalError(f"{holding!r} cannot grow")
        taken = []
        epochs = self._epochs
        active, total = self._refs[Hold.ACTIVE], self._total
        for _ in range(num_blocks):
            block = self._take()
            epoch = epochs[block] + 1
            epochs[block] = epoch
            self._fresh.append((block, epoch))
            active[block] = total[block] = 1
            taken.append(block)
        self._shown[Hold.ACTIVE] += num_blocks
        holding.blocks += taken
        return taken

    def _take(self) -> int:
        """A free block, else the cached one that was used longest ago."""
        if self._free:
            return self._free.pop()
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        return block

    def share(self, holding: Holding, blocks: Iterable[int]) -> None:
        """Appends blocks that hold final content already: cached, or held by others."""
        total, idle, state = self._total, self._idle, holding.state
        for block in blocks:
            if total[block]:
                self._add(block, state)
            elif block in idle:
                del idle[block]
                total[block] = self._refs[state][block] = 1
                self._shown[state] += 1
            else:
                raise InternalError(f"block {block} is free and cannot be shared")
            holding.blocks.append(block)

    def pin(self, holding: Holding, deadline: float) -> None:
        """Finished content that a peer may read until `deadline`. Pinning again moves the deadline."""
        self._convert(holding, Hold.PINNED)
        holding.deadline = deadline

    def quarantine(self, holding: Holding) -> None:
        """The owner is gone, but a step or a pull in flight may still write; close() when it is over."""
        self._convert(holding, Hold.QUARANTINED)
        holding.deadline = None

    def close(self, holding: Holding) -> None:
        """Gives everything back, tail first. Exactly once a holding."""
        if self._holdings.pop(holding, holding) is holding:
            raise InternalError(f"{holding!r} is closed already")
        self._give_back(holding.blocks, holding.state)
        holding.blocks = []

    def num_exclusive(self, holding: Holding) -> int:
        """How many blocks would become available if this holding closed."""
        return sum(1 for block in holding.blocks if self._total[block] == 1)

    def _convert(self, holding: Holding, state: Hold) -> None:
        if holding not in self._holdings:
            raise InternalError(f"{holding!r} is closed")
        before, holding.state = holding.state, state
        if before is state:
            return
        total, old, new = self._total, self._refs[before], self._refs[state]
        num_alone = 0
        for block in holding.blocks:
            if total[block] == 1 and old[block]:
                old[block], new[block] = 0, 1
                num_alone += 1
            else:
                self._add(block, state)
                self._drop(block, before)
        self._shown[before] -= num_alone
        self._shown[state] += num_alone

    def _give_back(self, blocks: Sequence[int], state: Hold) -> None:
        total, refs, ids = self._total, self._refs[state], self._ids
        num_last = 0
        for block in reversed(blocks):
            if total[block] != 1 or not refs[block]:
                self._drop(block, state)
                continue
            total[block] = refs[block] = 0
            num_last += 1
            if ids[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None
        self._shown[state] -= num_last

    def _state_of(self, block: int) -> Hold | None:
        active, pinned, quarantined = self._refs
        if active[block]:
            return Hold.ACTIVE
        if pinned[block]:
            return Hold.PINNED
        return Hold.QUARANTINED if quarantined[block] else None

    def _add(self, block: int, state: Hold) -> None:
        """One holder more for a block that has some."""
        if self._refs[Hold.ACTIVE][block]:
            self._refs[state][block] += 1
            self._total[block] += 1
            return
        before = self._state_of(block)
        self._refs[state][block] += 1
        self._total[block] += 1
        self._show(before, self._state_of(block))

    def _drop(self, block: int, state: Hold) -> None:
        """One holder less for a block that keeps some."""
        if not self._refs[state][block]:
            raise InternalError(f"block {block} is given back twice")
        if self._refs[Hold.ACTIVE][block] > (state is Hold.ACTIVE):
            self._refs[state][block] -= 1
            self._total[block] -= 1
            return
        before = self._state_of(block)
        self._refs[state][block] -= 1
        self._total[block] -= 1
        self._show(before, self._state_of(block))

    def _show(self, before: Hold | None, after: Hold | None) -> None:
        if before is not after and before is not None and after is not None:
            self._shown[before] -= 1
            self._shown[after] += 1

    # -- the prefix cache

    def match(self, ids: Iterable[BlockId]) -> list[int]:
        """The blocks of the longest known prefix of a chain of ids."""
        found = []
        by_id = self._by_id
        for block_id in ids:
            block = by_id.get(block_id)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these nobody holds: sharing them makes so many fewer available."""
        idle = self._idle
        return sum(1 for block in blocks if block in idle)

    def publish(self, holding: Holding, index: int, block_id: BlockId) -> None:
        """Block `index` of the holding is full, its content final. The first block of an identity is the known one."""
        if holding.era != self.era or block_id in self._by_id:
            return
        block = holding.blocks[index]
        if self._ids[block] is None:
            self._ids[block] = block_id
            self._by_id[block_id] = block
            self._events.add(EventKind.STORED, block_id)

    def clear(self) -> int:
        """Forgets every identity, of held blocks too, and starts a new era; how many there were."""
        dropped = len(self._by_id)
        for block in self._by_id.values():
            self._ids[block] = None
        self._by_id.clear()
        self._free += reversed(self._idle)
        self._idle.clear()
        self.era += 1
        self._events.clear()
        return dropped

    def _forget(self, block: int) -> None:
        block_id = self._ids[block]
        if block_id is None:
            raise InternalError(f"block {block} is cached without an identity")
        self._ids[block] = None
        del self._by_id[block_id]
        self._events.add(EventKind.REMOVED, block_id)

    # -- what others must hear

    def drain_fresh(self) -> tuple[tuple[int, int], ...]:
        """(block, epoch) of every allocation since the last call, in order: for the next plan."""
        if not self._fresh:
            return ()
        fresh = tuple(self._fresh)
        self._fresh.clear()
        return fresh

    @property
    def has_events(self) -> bool:
        return self._events.any

    def drain_events(self) -> list[Event]:
        """The changes of the cached set since the last call, in order. When nobody drained for long it is CLEARED and
        the whole set STORED: the same set by a shorter way."""
        return self._events.drain(self._by_id)

    def snapshot(self) -> tuple[BlockId, ...]:
        """The cached set as it is now, drained or not."""
        return tuple(self._by_id)

    def audit(self) -> None:
        """Recomputes everything from the open holdings; InternalError names the first difference. For tests and debug."""
        refs: list[list[int]] = [[0] * self.size for _ in Hold]
        for holding in self._holdings:
            for block in holding.blocks:
                refs[holding.state][block] += 1
        for state in Hold:
            if refs[state] != self._refs[state]:
                raise InternalError(f"{state.name} references differ from the holdings'")
        if self._total != [sum(counts) for counts in zip(*refs, strict=True)]:
            raise InternalError("numbers of holders differ from the holdings'")
        free, idle, unused = set(self._free), set(self._idle), set(self._unused)
        if len(free) != len(self._free) or free & idle or unused & (free | idle):
            raise InternalError("a block is free twice, or free and cached, or one of these and not in use")
        if len(unused) != self.size - self.num_blocks:
            raise InternalError(f"{len(unused)} of {self.size} blocks are not in use, and {self.num_blocks} are")
        shown = [0] * len(Hold)
        for block in range(self.size):
            state_of = self._state_of(block)
            if (state_of is None) != (block in free or block in idle or block in unused):
                raise InternalError(f"block {block} is held and available, or neither")
            if (block in idle and self._ids[block] is None) or (
                block in free | unused and self._ids[block] is not None
            ):
                raise InternalError(f"block {block} has the wrong identity for its state")
            if state_of is not None:
                shown[state_of] += 1
        if shown != self._shown:
            raise InternalError(f"counts by state are {self._shown}, the blocks say {shown}")
