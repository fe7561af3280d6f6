"""How batches are numbered, and what they carry: without a Redis."""

from headrace.blocks import BlockId
from headrace.keys import STREAM_MAX_ENTRIES, STREAM_MIN_BLOCKS, Event, EventKind
from tests.unit.workers.publish.publishing import BLOCKS, digest_of
from workers.publish import Log


def test_batches_are_numbered_and_carry_the_digest_after_them() -> None:
    log = Log(generation=7)
    first = log.batch([Event.of(EventKind.STORED, tuple(BLOCKS[:3]))])
    second = log.batch([Event.of(EventKind.REMOVED, (BLOCKS[1],)), Event.of(EventKind.STORED, (BLOCKS[5],))])
    assert (first.generation, first.sequence, second.sequence) == (7, 1, 2)
    assert first.digest == digest_of(BLOCKS[:3])
    assert second.digest == digest_of([BLOCKS[0], BLOCKS[2], BLOCKS[5]])


def test_case_30_cleared_empties_the_digest() -> None:
    log = Log(generation=7)
    log.batch([Event.of(EventKind.STORED, tuple(BLOCKS))])
    assert log.batch([Event(EventKind.CLEARED), Event.of(EventKind.STORED, (BLOCKS[9],))]).digest == digest_of(
        [BLOCKS[9]]
    )


def test_case_38_the_stream_keeps_no_more_than_the_set_is_worth() -> None:
    log = Log(generation=7)
    many = [BlockId(number.to_bytes(16, "big")) for number in range(STREAM_MIN_BLOCKS)]
    log.batch([Event.of(EventKind.STORED, many)])
    assert log.num_kept == 1
    log.batch([Event.of(EventKind.REMOVED, many[:1000])])
    assert log.num_kept == 1
    log.batch([Event.of(EventKind.STORED, many[:1000])])
    assert log.num_kept == 2
    for _ in range(STREAM_MAX_ENTRIES):
        log.batch([])
    assert log.num_kept == STREAM_MAX_ENTRIES


def test_a_set_written_anew_leaves_a_gap_that_followers_notice() -> None:
    log = Log(generation=7)
    log.batch([Event.of(EventKind.STORED, tuple(BLOCKS[:3]))])
    batch = log.restart(BLOCKS[:2])
    assert batch.sequence == 3
    assert batch.events == ()
    assert batch.digest == digest_of(BLOCKS[:2])
    assert log.batch([]).sequence == 4
