from hypothesis import given
from hypothesis import strategies as st

from headrace.keys import Event, EventBatch, EventKind, Tier, low_halves
from router.decisions.chain import SLICE_BLOCKS, Chain, keys_of
from router.decisions.holders import TIER_CREDIT
from router.decisions.index import Followed, Index, Outdated, Resync
from tests.unit.router.decisions.indexing import Truth, block, held, read, removed, stored, sweep, synced


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


def test_a_block_is_held_until_the_last_tier_lets_go() -> None:
    truth = Truth()
    index = synced("a", truth)
    index.apply("a", truth.batch(stored(1), stored(1, tier=Tier.HOST)))
    index.apply("a", truth.batch(removed(1)))
    assert held(index, "a") == {block(1)}
    assert index.apply("a", truth.batch(removed(1, tier=Tier.HOST))) == Followed()
    assert held(index, "a") == set()


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
