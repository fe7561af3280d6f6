import time

from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import BlockHasher, BlockId
from headrace.keys import Digest, Event, EventBatch, EventKind, Snapshot, Tier
from router.decisions.index import Followed, Index, Outdated, Resync


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
            digest.add(held, tier)
        return EventBatch(self.generation, self.sequence, digest.count, digest.xor, events)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.generation, self.sequence, tuple(self.held))


def stored(*numbers: int, tier: Tier = Tier.DEVICE) -> Event:
    return Event(EventKind.STORED, tuple(map(block, numbers)), tier)


def removed(*numbers: int, tier: Tier = Tier.DEVICE) -> Event:
    return Event(EventKind.REMOVED, tuple(map(block, numbers)), tier)


def read(index: Index, worker: str, snapshot: Snapshot) -> None:
    for _ in index.bootstrap(worker, snapshot):
        pass


def held(index: Index, worker: str, upto: int = 40) -> set[BlockId]:
    return {block(n) for n in range(upto) if worker in index.match([block(n)])}


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
    assert index.match(chain) == {"a": 3, "b": 2, "d": 1}
    assert index.match(chain[:2]) == {"a": 2, "b": 2, "d": 1}
    assert index.match([]) == {}
    assert index.match([block(9)]) == {}


def test_match_reads_the_chain_no_further_than_any_worker_follows() -> None:
    truth = Truth()
    truth.batch(stored(1, 2))
    index = synced("a", truth)
    chain = iter([block(1), block(2), block(3), block(4)])
    assert index.match(chain) == {"a": 2}
    assert next(chain) == block(4)


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


def test_case_30_cleared_empties_all_tiers() -> None:
    truth = Truth()
    index = synced("a", truth)
    index.apply("a", truth.batch(stored(1, 2), stored(2, 3, tier=Tier.HOST)))
    assert index.apply("a", truth.batch(Event(EventKind.CLEARED), stored(7))) == Followed()
    assert held(index, "a") == {block(7)}


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
    assert index.match([block(1)]) == {"b": 1}
    other = Truth()
    other.batch(stored(2))
    read(index, "c", other.snapshot())
    assert index.match([block(1)]) == {"b": 1}
    assert index.match([block(2)]) == {"b": 1, "c": 1}


def test_a_worker_dropped_while_it_is_read_stays_dropped() -> None:
    truth = Truth()
    truth.batch(stored(*range(10_000)))
    index = Index()
    reading = index.bootstrap("a", truth.snapshot())
    next(reading)
    index.drop("a")
    assert list(reading) == []
    assert index.workers == ()
    assert index.match([block(0)]) == {}


def test_an_empty_index_holds_no_memory_of_blocks() -> None:
    truth = Truth()
    index = synced("a", truth)
    index.apply("a", truth.batch(stored(*range(100))))
    index.apply("a", truth.batch(removed(*range(100))))
    assert index.num_blocks("a") == 0
    assert index._holders == {}


EVENTS = st.one_of(
    st.builds(
        lambda kind, numbers, tier: Event(kind, tuple(map(block, numbers)), tier),
        st.sampled_from([EventKind.STORED, EventKind.REMOVED]),
        st.lists(st.integers(0, 12), max_size=5),
        st.sampled_from(Tier),
    ),
    st.just(Event(EventKind.CLEARED)),
)
FATES = st.sampled_from(["arrives", "arrives", "arrives", "lost", "twice", "late", "restart"])


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
    for name, truth in truths.items():
        deliver(name, truth.batch())
        assert index.position(name) == (truth.generation, truth.sequence)
        assert held(index, name) == {held_block for held_block, _ in truth.held}


def test_matching_a_deep_prefix_among_many_workers_costs_less_than_hashing_it() -> None:
    hasher = BlockHasher(revision="r", kv_format="f", block_size=16)
    ids = list(hasher.chain(range(16 * 512)))
    index = Index()
    for number in range(200):
        read(index, f"w{number}", Snapshot(1, 1, tuple((held_id, Tier.DEVICE) for held_id in ids[: 2 * number + 100])))

    def seconds(action: object) -> float:
        assert callable(action)
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    matching = min(seconds(lambda: index.match(ids)) for _ in range(5))
    hashing = min(seconds(lambda: list(hasher.chain(range(16 * 512)))) for _ in range(5))
    assert len(index.match(ids)) == 200
    assert matching < 2 * hashing
