from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import BlockId
from headrace.keys import Digest, Event, EventBatch, EventKind, Snapshot, Tier, low_halves
from router.decisions.chain import SLICE_BLOCKS, Chain, keys_of
from router.decisions.holders import TIER_CREDIT
from router.decisions.index import Followed, Index, Loading, Outdated, Overfull, Resync


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


def test_match_counts_each_workers_leading_blocks() -> None:
    index = Index()
    for worker, numbers in {"a": (1, 2, 3), "b": (1, 2), "c": (2, 3), "d": (1, 3)}.items():
        truth = Truth()
        truth.batch(stored(*numbers))
        read(index, worker, truth.snapshot())
    chain = [block(n) for n in (1, 2, 3, 4)]
    assert index.match(Chain(chain)).depths == {"a": 3, "b": 2, "d": 1}
    assert index.match(Chain(chain[:2])).depths == {"a": 2, "b": 2, "d": 1}
    assert index.match(Chain([])).depths == {}
    assert index.match(Chain([block(9)])).depths == {}


def test_match_reads_the_chain_no_further_than_any_worker_follows() -> None:
    truth = Truth()
    truth.batch(stored(1, 2))
    index = synced("a", truth)
    ids = iter([block(n) for n in range(1, 100)])
    assert index.match(Chain(ids)).depths == {"a": 2}
    assert next(ids) == block(1 + SLICE_BLOCKS)
    assert Index().match(Chain(ids)).depths == {}
    assert next(ids) == block(2 + SLICE_BLOCKS)


def test_an_unknown_worker_is_to_be_read_first() -> None:
    assert Index().apply("a", Truth().batch(stored(1))) == Resync("a", "unknown")


def test_applying_a_batch_twice_changes_nothing() -> None:
    truth = Truth()
    index = synced("a", truth)
    batch = truth.batch(stored(1, 2))
    assert index.apply("a", batch) == Followed()
    assert index.apply("a", batch) == Followed()
    assert held(index, "a") == {block(1), block(2)}
    assert index.position("a") == (1, 1)


def test_a_gap_says_resync_and_keeps_what_is_likely_still_there() -> None:
    truth = Truth()
    index = synced("a", truth)
    index.apply("a", truth.batch(stored(1)))
    truth.batch(stored(2))
    assert index.apply("a", truth.batch(stored(3))) == Resync("a", "gap")
    assert index.position("a") is None
    assert held(index, "a") == {block(1)}
    assert index.apply("a", truth.batch(stored(4))) == Resync("a", "unknown")
    read(index, "a", truth.snapshot())
    assert held(index, "a") == {block(n) for n in (1, 2, 3, 4)}
    assert index.apply("a", truth.batch(removed(1))) == Followed()


def test_a_digest_that_differs_says_resync() -> None:
    truth = Truth()
    index = synced("a", truth)
    good = truth.batch(stored(1))
    wrong = EventBatch(good.generation, good.sequence, good.count, good.xor ^ 1, good.events)
    assert index.apply("a", wrong) == Resync("a", "digest")


def test_a_new_generation_forgets_the_old_ones_blocks_at_once() -> None:
    truth = Truth()
    truth.batch(stored(1))
    index = synced("a", truth)
    assert index.apply("a", Truth(generation=2).batch(stored(2))) == Resync("a", "generation")
    assert held(index, "a") == set()
    assert index.apply("a", truth.batch(stored(3))) == Outdated()
    read(index, "a", truth.snapshot())  # a snapshot that the dead generation left behind
    assert held(index, "a") == set()
    assert index.position("a") is None


def test_expecting_a_generation_forgets_an_older_ones_blocks_only() -> None:
    truth = Truth(generation=2)
    truth.batch(stored(1))
    index = synced("a", truth)
    index.expect("a", 2)
    index.expect("a", 1)
    assert held(index, "a") == {block(1)}
    index.expect("a", 3)
    assert held(index, "a") == set()
    sweep(index)
    assert index.num_keys == 0


def test_case_64_a_worker_restarted_with_its_clock_set_back_begins_anew_and_is_followed() -> None:
    """Its generation is lower than its predecessor's, of which keys and events may still come."""
    old = Truth(generation=1000)
    old.batch(stored(1, 2))
    index = synced("a", old)
    index.meet("a", 700, max_entries=100)
    assert held(index, "a") == set()
    index.expect("a", 1000)
    read(index, "a", old.snapshot())
    assert index.apply("a", old.batch(stored(3))) == Outdated()
    assert (held(index, "a"), index.position("a")) == (set(), None)
    new = Truth(generation=700)
    new.batch(stored(5))
    read(index, "a", new.snapshot())
    assert index.apply("a", new.batch(stored(6))) == Followed()
    assert held(index, "a") == {block(5), block(6)}
    newest = Truth(generation=1001)
    assert index.apply("a", newest.batch(stored(7))) == Resync("a", "generation")
    assert held(index, "a") == set()


def test_case_30_cleared_empties_all_tiers() -> None:
    truth = Truth()
    index = synced("a", truth)
    index.apply("a", truth.batch(stored(1, 2), stored(2, 3, tier=Tier.HOST)))
    assert index.apply("a", truth.batch(Event(EventKind.CLEARED), stored(7))) == Followed()
    assert held(index, "a") == {block(7)}


def test_a_block_in_a_lower_tier_is_worth_less_and_one_in_two_tiers_counts_where_it_is_nearest() -> None:
    index = Index()
    here, below = Truth(), Truth()
    here.batch(stored(1, 2, 3, 4))
    below.batch(stored(1), stored(1, 2, tier=Tier.HOST), stored(3, tier=Tier.DISK))
    read(index, "here", here.snapshot())
    read(index, "below", below.snapshot())
    match = index.match(Chain([block(n) for n in (1, 2, 3, 4)]))
    assert match.depths == {"here": 4, "below": 3}
    assert match.credited_tokens(10) == {
        "here": 40,
        "below": 10 + 10 * TIER_CREDIT[Tier.HOST] + 10 * TIER_CREDIT[Tier.DISK],
    }


@contextmanager
def loading(index: Index, worker: str, truth: Truth) -> Iterator[Loading]:
    with index.loading(worker, truth.generation, truth.sequence, len(truth.held)) as opened:
        yield opened


def test_a_worker_is_matched_as_before_until_its_set_is_read_to_the_end() -> None:
    truth = Truth()
    truth.batch(stored(1))
    index = synced("a", truth)
    truth.batch(removed(1), stored(*range(2, 20)))
    with loading(index, "a", truth) as reading:
        reading.add(stored(*range(2, 10)))
        assert held(index, "a") == {block(1)}
        assert index.position("a") is None
        index.expect("a", 2)
        assert not reading.wanted
        reading.add(stored(*range(10, 20)))
        assert not reading.settle((), (1, truth.sequence))
    assert held(index, "a") == set()
    assert index.position("a") is None
    sweep(index)
    assert index.num_keys == 0


def test_a_set_that_changes_while_it_is_read_is_exact_in_the_end() -> None:
    """A slice may hold what was not there when the reading began, and lack what was removed since."""
    truth = Truth()
    truth.batch(stored(1, 2, 3))
    index = Index()
    with loading(index, "a", truth) as reading:
        reading.add(stored(1, 2))
        batches = [truth.batch(removed(2), stored(4)), truth.batch(removed(3), stored(5))]
        reading.add(stored(4, 5, 1))
        assert reading.settle(batches, (1, truth.sequence))
    assert held(index, "a") == {block(1), block(4), block(5)}
    assert index.apply("a", truth.batch(stored(6))) == Followed()


def test_a_set_that_was_cleared_while_it_was_read_holds_what_came_after() -> None:
    truth = Truth()
    truth.batch(stored(1, 2))
    index = Index()
    with loading(index, "a", truth) as reading:
        reading.add(stored(1, 2))
        batches = [truth.batch(Event(EventKind.CLEARED), stored(7))]
        assert reading.settle(batches, (1, truth.sequence))
        assert held(index, "a") == {block(7)}
    sweep(index)
    assert index.num_keys == 1


@pytest.mark.parametrize(
    "fault", ["a batch is missing", "it was written anew", "the digest differs", "it is elsewhere"]
)
def test_a_set_that_does_not_follow_from_what_was_read_is_read_again(fault: str) -> None:
    truth = Truth()
    truth.batch(stored(1, 2))
    index = synced("a", truth)
    with loading(index, "a", truth) as reading:
        if fault == "a batch is missing":
            truth.batch(stored(3))
        if fault == "the digest differs":
            truth.held.add((block(9), Tier.DEVICE))
        batches = [truth.batch(stored(4))]
        if fault == "it was written anew":
            truth = Truth(generation=2)
            batches = [truth.batch(stored(4))]
        reading.add(stored(1, 2))
        where = (1, 7) if fault == "it is elsewhere" else (truth.generation, truth.sequence)
        assert not reading.settle(batches, where)
    assert index.position("a") is None
    assert held(index, "a") == {block(1), block(2)}
    sweep(index)
    assert index.num_keys == 2
    read(index, "a", truth.snapshot())
    assert index.position("a") == (truth.generation, truth.sequence)


def test_case_38_a_set_that_outgrows_the_worker_while_it_is_read_is_mirrored_no_more() -> None:
    index, truth = Index(), Truth()
    index.meet("a", 1, max_entries=3)
    truth.batch(stored(1))
    with loading(index, "a", truth) as reading:
        reading.add(stored(1, 2))
        reading.add(stored(3, 4))
        assert not reading.wanted
    assert (index.num_blocks("a"), index.position("a")) == (0, (1, 1))
    assert index.apply("a", truth.batch(stored(5))) == Overfull()


def test_a_slot_is_taken_again_only_when_it_is_swept() -> None:
    truth = Truth()
    index = synced("a", truth)
    for number in range(20):
        index.apply("a", truth.batch(stored(number)))
        index.apply("a", truth.batch(Event(EventKind.CLEARED)))
    assert index.match(Chain([block(n) for n in range(20)])).depths == {}
    sweeping = index.sweep()
    next(sweeping)
    index.apply("a", truth.batch(stored(30), Event(EventKind.CLEARED), stored(31)))
    assert len(list(sweeping)) > 0
    assert held(index, "a") == {block(31)}
    sweep(index)
    assert index.num_keys == 1
    other = Truth()
    other.batch(stored(5))
    read(index, "b", other.snapshot())
    assert held(index, "b") == {block(5)}


def test_case_38_a_worker_that_claims_more_than_it_can_hold_is_mirrored_no_more_until_it_begins_anew() -> None:
    index = Index()
    truth = Truth()
    index.meet("a", 1, max_entries=10)
    read(index, "a", truth.snapshot())
    assert index.apply("a", truth.batch(stored(*range(10)))) == Followed()
    assert index.apply("a", truth.batch(stored(11))) == Overfull()
    assert held(index, "a") == set()
    assert index.apply("a", truth.batch(removed(0, 11), stored(12))) == Overfull()
    assert index.position("a") == (1, truth.sequence)
    read(index, "a", truth.snapshot())
    assert index.num_blocks("a") == 10
    index.apply("a", truth.batch(stored(20, 21)))
    assert index.apply("a", truth.batch(Event(EventKind.CLEARED), stored(1))) == Followed()
    assert held(index, "a") == {block(1)}
    truth.batch(stored(*range(11)))
    read(index, "a", truth.snapshot())
    assert (index.num_blocks("a"), index.position("a")) == (0, (1, truth.sequence))


def test_case_38_the_whole_mirror_has_a_cap() -> None:
    index = Index(max_entries=15)
    for worker in ("a", "b"):
        truth = Truth()
        read(index, worker, truth.snapshot())
        outcome = index.apply(worker, truth.batch(stored(*range(10))))
        assert outcome == (Followed() if worker == "a" else Overfull())
    assert index.match(Chain([block(1)])).depths == {"a": 1}


def test_case_38_distinct_prefixes_under_a_shared_prompt_with_evictions_leave_the_map_flat() -> None:
    index = Index()
    truth = Truth()
    read(index, "a", truth.snapshot())
    index.apply("a", truth.batch(stored(0)))
    sizes = []
    for number in range(1, 2001):
        evicted = [removed(number - 50)] if number > 50 else []
        assert index.apply("a", truth.batch(*evicted, stored(number))) == Followed()
        sizes.append(index.num_keys)
    assert max(sizes) == sizes[-1] == 51


def test_a_block_is_held_until_the_last_tier_lets_go() -> None:
    truth = Truth()
    index = synced("a", truth)
    index.apply("a", truth.batch(stored(1), stored(1, tier=Tier.HOST)))
    index.apply("a", truth.batch(removed(1)))
    assert held(index, "a") == {block(1)}
    assert index.apply("a", truth.batch(removed(1, tier=Tier.HOST))) == Followed()
    assert held(index, "a") == set()


def test_dropping_a_worker_leaves_the_others_and_frees_its_place() -> None:
    index = Index()
    for worker in ("a", "b"):
        truth = Truth()
        truth.batch(stored(1, 2))
        read(index, worker, truth.snapshot())
    index.drop("a")
    index.drop("never seen")
    assert index.match(Chain([block(1)])).depths == {"b": 1}
    other = Truth()
    other.batch(stored(2))
    read(index, "c", other.snapshot())
    assert index.match(Chain([block(1)])).depths == {"b": 1}
    assert index.match(Chain([block(2)])).depths == {"b": 1, "c": 1}


def test_a_worker_dropped_while_it_is_read_stays_dropped() -> None:
    truth = Truth()
    truth.batch(stored(*range(20)))
    index = Index()
    with loading(index, "a", truth) as reading:
        reading.add(stored(*range(10)))
        index.drop("a")
        reading.add(stored(*range(10, 20)))
        assert not reading.settle((), (1, truth.sequence))
    assert index.workers == ()
    assert index.match(Chain([block(0)])).depths == {}
    sweep(index)
    assert index.num_keys == 0


def test_an_empty_index_holds_no_memory_of_blocks() -> None:
    truth = Truth()
    index = synced("a", truth)
    index.apply("a", truth.batch(stored(*range(100))))
    index.apply("a", truth.batch(removed(*range(100))))
    assert index.num_blocks("a") == 0
    assert index.num_keys == 0


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 12), st.integers(0, 12))
def test_a_run_of_expected_blocks_is_followed_to_its_end(
    num_asked: int, num_held: int, num_expected: int, gap: int, num_behind: int
) -> None:
    """Held, expected from there, not known for a gap, and held again."""
    truth = Truth()
    chain = [block(n) for n in range(num_asked)]
    known = num_held + num_expected
    truth.batch(stored(*range(num_held), *range(known + gap, known + gap + num_behind)))
    index = synced("a", truth)
    expected = keys_of(low_halves(b"".join(block(n) for n in range(num_held, known))))
    index.overlay.expect("r", "a", expected, capacity=100, expires=1.0)
    depth = min(num_asked, known if gap else known + num_behind)
    found = index.match(Chain(chain))
    assert found.depths == ({"a": depth} if depth else {})
    assert found.promised.get("a", 0) == min(num_asked, num_held + (num_behind if not gap and not num_expected else 0))


EVENTS = st.one_of(
    st.builds(
        lambda kind, numbers, tier: Event.of(kind, map(block, numbers), tier),
        st.sampled_from([EventKind.STORED, EventKind.REMOVED]),
        st.lists(st.integers(0, 12), max_size=5),
        st.sampled_from(Tier),
    ),
    st.just(Event(EventKind.CLEARED)),
)
FATES = st.sampled_from(["arrives", "arrives", "arrives", "lost", "twice", "late", "restart", "dropped", "swept"])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(EVENTS, max_size=4), FATES), max_size=40))
def test_dropped_doubled_and_reordered_events_never_leave_a_wrong_mirror_that_claims_to_be_in_step(
    story: list[tuple[str, list[Event], str]],
) -> None:
    index = Index()
    truths = {"a": Truth(), "b": Truth()}
    late: list[tuple[str, EventBatch]] = []

    def deliver(worker: str, batch: EventBatch) -> None:
        match index.apply(worker, batch):
            case Resync(worker=name):
                assert name == worker
                read(index, worker, truths[worker].snapshot())

    for worker, events, fate in story:
        if fate == "restart":
            truths[worker] = Truth(truths[worker].generation + 1)
        elif fate == "dropped":
            index.drop(worker)
        elif fate == "swept":
            sweep(index)
        batch = truths[worker].batch(*events)
        if fate == "late":
            late.append((worker, batch))
        elif fate != "lost":
            deliver(worker, batch)
            if fate == "twice":
                deliver(worker, batch)
            while late:
                deliver(*late.pop())
        for name, truth in truths.items():
            if index.position(name) == (truth.generation, truth.sequence):
                assert held(index, name) == {held_block for held_block, _ in truth.held}
        assert index.num_followed == sum(index.position(name) is not None for name in truths)
    for name, truth in truths.items():
        deliver(name, truth.batch())
        assert index.position(name) == (truth.generation, truth.sequence)
        assert held(index, name) == {held_block for held_block, _ in truth.held}
    sweep(index)
    assert index.num_keys == len({block for truth in truths.values() for block, _ in truth.held})
