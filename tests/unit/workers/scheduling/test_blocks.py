"""The ledger: one owner or none lost, epochs that grow, and a cache that others can follow by its events."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.blocks import BlockHasher, BlockId
from headrace.errors import InternalError
from headrace.keys import Event, EventKind
from headrace.values import BlockCounts
from workers.scheduling.blocks import BlockLedger, Hold, Holding

NUM_BLOCKS = 12


def ids(num: int, first: int = 0) -> list[BlockId]:
    return [BlockId(bytes(12) + (first + i).to_bytes(4, "big")) for i in range(num)]


def filled(ledger: BlockLedger, chain: list[BlockId], owner: object = "a") -> Holding:
    holding = ledger.open(owner)
    ledger.allocate(holding, len(chain))
    for index, block_id in enumerate(chain):
        ledger.publish(holding, index, block_id)
    return holding


def replay(events: list[Event], known: set[BlockId]) -> None:
    for event in events:
        match event.kind:
            case EventKind.STORED:
                assert not known & set(event.blocks), "only what is absent is stored"
                known |= set(event.blocks)
            case EventKind.REMOVED:
                assert known >= set(event.blocks), "only what is present is removed"
                known -= set(event.blocks)
            case EventKind.CLEARED:
                known.clear()


class LedgerLife(RuleBasedStateMachine):
    """Holdings open, grow, share, change state and close in any order; the ledger is compared with plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(NUM_BLOCKS, 4)
        self.open: list[Holding] = []
        self.epochs = [0] * NUM_BLOCKS
        self.followed: set[BlockId] = set()
        self.num_ids = 0

    @rule(num=st.integers(0, 4))
    def open_one(self, num: int) -> None:
        holding = self.ledger.open(f"owner {len(self.open)}")
        self.open.append(holding)
        if num <= self.ledger.available:
            held = {block for other in self.open for block in other.blocks}
            taken = self.ledger.allocate(holding, num)
            assert not held & set(taken), "an allocated block has no other owner"
        else:
            with pytest.raises(InternalError, match="available"):
                self.ledger.allocate(holding, num)

    @rule(data=st.data(), new=st.booleans())
    def publish(self, data: st.DataObject, new: bool) -> None:
        candidates = [(h, i) for h in self.open for i in range(len(h.blocks))]
        if candidates:
            holding, index = data.draw(st.sampled_from(candidates))
            self.num_ids += new
            self.ledger.publish(holding, index, ids(1, self.num_ids)[0])

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        known = self.ledger.snapshot()
        if known:
            blocks = self.ledger.match([data.draw(st.sampled_from(known))])
            holding = self.ledger.open("sharer")
            self.open.append(holding)
            self.ledger.share(holding, blocks)

    @rule(data=st.data(), state=st.sampled_from([Hold.PINNED, Hold.QUARANTINED]))
    def convert(self, data: st.DataObject, state: Hold) -> None:
        if self.open:
            holding = data.draw(st.sampled_from(self.open))
            if state is Hold.PINNED:
                self.ledger.pin(holding, 5.0)
                assert holding.deadline == 5.0
            else:
                self.ledger.quarantine(holding)
                assert holding.deadline is None

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.open:
            holding = data.draw(st.sampled_from(self.open))
            self.open.remove(holding)
            expected = self.ledger.available + self.ledger.num_exclusive(holding)
            self.ledger.close(holding)
            assert self.ledger.available == expected
            with pytest.raises(InternalError, match="closed already"):
                self.ledger.close(holding)

    @rule()
    def clear(self) -> None:
        assert self.ledger.clear() >= 0
        assert self.ledger.snapshot() == ()

    @rule(num=st.integers(1, NUM_BLOCKS + 3))
    def resize(self, num: int) -> None:
        held = {block for holding in self.open for block in holding.blocks}
        self.ledger.resize(num)
        assert self.ledger.num_blocks == min(max(num, len(held)), NUM_BLOCKS)

    @rule()
    def follow(self) -> None:
        replay(self.ledger.drain_events(), self.followed)
        assert self.followed == set(self.ledger.snapshot())

    @rule()
    def drain_fresh(self) -> None:
        for block, epoch in self.ledger.drain_fresh():
            assert epoch == self.epochs[block] + 1, "an epoch grows with every allocation, by one"
            self.epochs[block] = epoch
        assert self.epochs == [self.ledger.epoch(block) for block in range(NUM_BLOCKS)]

    @invariant()
    def nothing_is_lost(self) -> None:
        self.ledger.audit()
        held = {block for holding in self.open for block in holding.blocks}
        counts = self.ledger.counts()
        assert counts.total == self.ledger.num_blocks
        assert counts.active + counts.pinned + counts.quarantined == len(held)
        assert counts.stranded == 0
        assert self.ledger.available == self.ledger.num_blocks - len(held)
        assert set(self.ledger.holdings()) == set(self.open)


TestLedgerLife = LedgerLife.TestCase
TestLedgerLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_tails_are_evicted_before_heads_and_the_least_recently_used_first() -> None:
    ledger = BlockLedger(4, 4)
    first, second = ids(2), ids(2, 10)
    ledger.close(filled(ledger, first))
    ledger.close(filled(ledger, second))
    again = ledger.open("b")
    ledger.share(again, ledger.match(first))
    ledger.close(again)

    holding = ledger.open("c")
    evicted = []
    for _ in range(4):
        before = set(ledger.snapshot())
        ledger.allocate(holding, 1)
        evicted += list(before - set(ledger.snapshot()))

    assert evicted == [second[1], second[0], first[1], first[0]]


def test_a_prefix_is_matched_up_to_the_first_gap() -> None:
    ledger = BlockLedger(8, 4)
    chain = ids(3)
    holding = filled(ledger, chain[:1] + chain[2:])
    assert ledger.match(chain) == holding.blocks[:1]
    assert ledger.match(ids(1, 50)) == []


def test_the_strongest_state_of_a_shared_block_shows() -> None:
    ledger = BlockLedger(4, 4)
    first = filled(ledger, ids(1))
    second = ledger.open("b")
    ledger.share(second, first.blocks)
    ledger.pin(first, 1.0)
    assert ledger.counts() == BlockCounts(free=3, active=1)
    ledger.quarantine(second)
    assert ledger.counts() == BlockCounts(free=3, pinned=1)
    ledger.close(first)
    assert ledger.counts() == BlockCounts(free=3, quarantined=1)
    ledger.close(second)
    assert ledger.counts() == BlockCounts(free=3, cached=1)


def test_what_was_computed_before_a_clear_is_never_published_after_it() -> None:
    ledger = BlockLedger(4, 4)
    old = ledger.open("old")
    ledger.allocate(old, 1)
    ledger.clear()
    ledger.publish(old, 0, ids(1)[0])
    assert ledger.snapshot() == ()


def test_a_block_that_holds_the_same_as_a_known_one_is_freed_not_cached() -> None:
    ledger = BlockLedger(4, 4)
    first, second = filled(ledger, ids(1)), filled(ledger, ids(1), "b")
    ledger.close(second)
    assert ledger.counts() == BlockCounts(free=3, active=1)
    ledger.close(first)
    assert ledger.counts() == BlockCounts(free=3, cached=1)


def test_a_publisher_that_stayed_away_gets_the_whole_set() -> None:
    ledger = BlockLedger(2, 4)
    for number in range(3000):
        ledger.close(filled(ledger, ids(2, 2 * number)))
    events = ledger.drain_events()
    assert [event.kind for event in events] == [EventKind.CLEARED, EventKind.STORED]
    known: set[BlockId] = set(ids(5))
    replay(events, known)
    assert known == set(ledger.snapshot()) == set(ids(2, 5998))
    assert ledger.drain_events() == []


def test_free_blocks_cannot_be_shared_and_ended_holdings_cannot_grow() -> None:
    ledger = BlockLedger(2, 4)
    holding = ledger.open("a")
    with pytest.raises(InternalError, match="block 1 is free"):
        ledger.share(holding, [1])
    ledger.quarantine(holding)
    with pytest.raises(InternalError, match="cannot grow"):
        ledger.allocate(holding, 1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockLedger(num_blocks, block_size)


def test_chains_of_two_salts_share_no_block() -> None:
    random = Random(1)
    tokens = [random.randrange(1000) for _ in range(16)]
    plain, salted = (
        list(BlockHasher(revision="r", kv_format="f", block_size=4, cache_salt=salt).chain(tokens))
        for salt in ("", "x")
    )
    ledger = BlockLedger(8, 4)
    filled(ledger, plain)
    assert ledger.match(salted) == []
    assert len(ledger.match(plain)) == 4
