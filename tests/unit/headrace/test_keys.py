import struct
from hashlib import blake2b
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import ID_BYTES, BlockId
from headrace.keys import (
    SNAPSHOT_META_FIELD,
    Digest,
    Event,
    EventBatch,
    EventKind,
    Keys,
    Snapshot,
    Tier,
    decode_batch,
    decode_meta,
    encode_batch,
    low_halves,
    parse_snapshot,
    snapshot_fields,
)

BLOCKS = st.binary(min_size=ID_BYTES, max_size=ID_BYTES).map(BlockId)
U64 = st.integers(0, 2**64 - 1)
EVENTS = st.one_of(
    st.builds(
        Event.of,
        st.sampled_from([EventKind.STORED, EventKind.REMOVED]),
        st.lists(BLOCKS, max_size=4),
        st.sampled_from(Tier),
    ),
    st.just(Event(EventKind.CLEARED)),
)
BATCHES = st.builds(EventBatch, U64, U64, U64, U64, st.lists(EVENTS, max_size=5).map(tuple))


def test_a_workers_keys_share_its_hash_tag_and_its_name_comes_back() -> None:
    keys = Keys("east")
    names = [keys.lease("w-1"), keys.events("w-1"), keys.blocks("w-1")]
    assert all(name.startswith("hr:east:{w-1}:") for name in names)
    assert len(set(names)) == 3
    assert keys.worker_of_lease(names[0]) == "w-1"
    assert not any(
        name.startswith(names[0]) for name in (keys.desired, keys.observed, keys.tenant("t"), Keys("west").lease("w-1"))
    )


@given(BATCHES)
def test_a_batch_comes_back(batch: EventBatch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(BATCHES, st.data())
def test_cut_or_lengthened_batches_are_refused(batch: EventBatch, data: st.DataObject) -> None:
    raw = encode_batch(batch)
    with pytest.raises(ValueError):
        decode_batch(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(ValueError):
        decode_batch(raw + data.draw(st.binary(min_size=1, max_size=40)))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_a_value_error(raw: bytes) -> None:
    try:
        batch = decode_batch(raw)
    except ValueError:
        return
    assert encode_batch(batch) == raw


def test_an_event_that_claims_more_blocks_than_there_can_be_is_refused_without_being_made() -> None:
    raw = struct.pack("<QQQQH", 1, 1, 1, 1, 1) + struct.pack("<BBI", EventKind.STORED, 0, 2**32 - 1)
    with pytest.raises(ValueError, match="cut"):
        decode_batch(raw)


HASHED = st.integers(0, 50).map(lambda n: BlockId(blake2b(bytes((n,)), digest_size=ID_BYTES).digest()))
PAIRS = st.lists(st.tuples(HASHED, st.sampled_from(Tier)), unique=True, max_size=20)


def digest_of(pairs: list[tuple[BlockId, Tier]]) -> Digest:
    digest = Digest()
    for block, tier in pairs:
        digest.add(low_halves(block), tier)
    return digest


@given(PAIRS, st.randoms())
def test_a_digest_does_not_know_the_order(pairs: list[tuple[BlockId, Tier]], random: Random) -> None:
    shuffled = random.sample(pairs, len(pairs))
    assert digest_of(pairs) == digest_of(shuffled)


@given(PAIRS, PAIRS)
def test_different_sets_have_different_digests(
    one: list[tuple[BlockId, Tier]], other: list[tuple[BlockId, Tier]]
) -> None:
    assert (digest_of(one) == digest_of(other)) == (set(one) == set(other))


@given(PAIRS)
def test_what_is_added_and_removed_leaves_nothing(pairs: list[tuple[BlockId, Tier]]) -> None:
    digest = digest_of(pairs)
    for block, tier in pairs:
        digest.remove(low_halves(block), tier)
    assert digest == Digest()
    assert repr(digest) == "Digest(count=0, xor=0000000000000000)"


def test_a_tier_is_part_of_what_is_held() -> None:
    block = BlockId(bytes(range(16)))
    assert digest_of([(block, Tier.DEVICE)]) != digest_of([(block, Tier.HOST)])


@given(U64, U64, st.dictionaries(BLOCKS, st.sets(st.sampled_from(Tier), min_size=1), max_size=10))
def test_a_snapshot_comes_back(generation: int, sequence: int, held: dict[BlockId, set[Tier]]) -> None:
    pairs = {(block, tier) for block, tiers in held.items() for tier in tiers}
    snapshot = parse_snapshot(snapshot_fields(generation, sequence, pairs))
    assert snapshot is not None
    assert (snapshot.generation, snapshot.sequence) == (generation, sequence)
    assert {(block, event.tier) for event in snapshot.stored for block in event.blocks} == pairs


def test_no_snapshot_is_none_and_a_broken_one_an_error() -> None:
    assert parse_snapshot({}) is None
    fields = snapshot_fields(1, 2, [])
    assert parse_snapshot(fields) == Snapshot(1, 2, ())
    with pytest.raises(ValueError, match="3 bytes"):
        decode_meta(b"abc")
    for key, value in ((b"short", b"\x00"), (bytes(16), b""), (bytes(16), b"\x63")):
        with pytest.raises(ValueError):
            parse_snapshot({SNAPSHOT_META_FIELD: fields[SNAPSHOT_META_FIELD], key: value})
