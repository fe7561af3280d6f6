"""What the mirror takes, and what it gives back."""

from headrace.keys import Event, EventKind
from router.decisions.chain import Chain
from router.decisions.index import Followed, Index, Overfull
from tests.unit.router.decisions.indexing import Truth, block, held, read, removed, stored, sweep, synced


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


def test_an_empty_index_holds_no_memory_of_blocks() -> None:
    truth = Truth()
    index = synced("a", truth)
    index.apply("a", truth.batch(stored(*range(100))))
    index.apply("a", truth.batch(removed(*range(100))))
    assert index.num_blocks("a") == 0
    assert index.num_keys == 0
