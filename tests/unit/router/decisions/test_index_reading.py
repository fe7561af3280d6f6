"""Sets that are read in parts while what they are of changes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.keys import Event, EventKind, Tier
from router.decisions.chain import Chain
from router.decisions.index import Followed, Index, Loading, Overfull
from tests.unit.router.decisions.indexing import Truth, block, held, read, removed, stored, sweep, synced


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
