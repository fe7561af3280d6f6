"""The contract of workers.kv.links.base.KvLink and KvServer, kept by every implementation."""

import random
import threading
from queue import SimpleQueue

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import IncompatiblePeer, LinkClosed, StaleBlocks
from tests.contract.link_ends import pools_of, same, served
from tests.contract.links import (
    BIG,
    BIG_BLOCKS,
    EPOCH,
    WHOLE,
    Implementation,
    filled_pool,
    pulls_of,
)
from workers.kv.layout import Piece, SlabLayout
from workers.kv.links.base import BlockPull

pytestmark = pytest.mark.torch
SMALL = SlabLayout(num_kv_heads=3, num_layers=4, block_size=4, head_dim=2, element_bytes=4)
OTHER = SlabLayout(num_kv_heads=2, num_layers=5, block_size=4, head_dim=2, element_bytes=4)
NUM_BLOCKS = 12


@st.composite
def reads(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Piece]:
    """Some blocks, each into another, and a piece that both slabs have room for."""
    sources = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True))
    targets = draw(st.permutations(range(NUM_BLOCKS)))
    num_heads = draw(st.integers(1, min(SMALL.num_kv_heads, OTHER.num_kv_heads)))
    num_layers = draw(st.integers(1, min(SMALL.num_layers, OTHER.num_layers)))
    piece = Piece(
        source_rank=0,
        target_rank=0,
        source_head=draw(st.integers(0, SMALL.num_kv_heads - num_heads)),
        target_head=draw(st.integers(0, OTHER.num_kv_heads - num_heads)),
        num_heads=num_heads,
        source_layer=draw(st.integers(0, SMALL.num_layers - num_layers)),
        target_layer=draw(st.integers(0, OTHER.num_layers - num_layers)),
        num_layers=num_layers,
    )
    return list(zip(sources, targets, strict=False)), piece


def test_any_piece_of_any_blocks_arrives_bit_equal_and_nothing_else_changes(kind: Implementation) -> None:
    pool = filled_pool(1, kind.source_device, SMALL, NUM_BLOCKS)
    target = filled_pool(2, kind.target_device, OTHER, NUM_BLOCKS)
    with served(kind, pool, target) as link:

        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(reads())
        def check(read: tuple[list[tuple[int, int]], Piece]) -> None:
            blocks, piece = read
            expected = target.tensor.clone()
            for source_block, target_block in blocks:
                expected[
                    target_block,
                    piece.target_head : piece.target_head + piece.num_heads,
                    piece.target_layer : piece.target_layer + piece.num_layers,
                ] = pool.tensor[
                    source_block,
                    piece.source_head : piece.source_head + piece.num_heads,
                    piece.source_layer : piece.source_layer + piece.num_layers,
                ]
            receipt = link.pull([BlockPull(s, EPOCH, t) for s, t in blocks], piece)
            assert same(target.tensor, expected)
            assert receipt.num_blocks == len(blocks)
            assert receipt.num_bytes == len(blocks) * piece.num_bytes(SMALL)

        check()


def test_a_pull_of_many_messages_is_bit_equal_by_digest(kind: Implementation) -> None:
    pool, target = pools_of(kind)
    with served(kind, pool, target) as link:
        receipt = link.pull([BlockPull(b, EPOCH, BIG_BLOCKS - 1 - b) for b in range(BIG_BLOCKS)], WHOLE)
    assert receipt.num_bytes == BIG_BLOCKS * BIG.block_bytes
    for block in (0, 15, 16, 17, BIG_BLOCKS - 1):
        mirrored = target.head_layer_digests(BIG_BLOCKS - 1 - block, BIG.block_size)
        assert mirrored == pool.head_layer_digests(block, BIG.block_size)


@pytest.mark.parametrize("at", [0, 20, BIG_BLOCKS - 1], ids=["first message", "second message", "last block"])
def test_an_epoch_that_changes_while_it_is_read_is_noticed(kind: Implementation, at: int) -> None:
    pool, target = pools_of(kind)
    armed = True

    def change(index: int) -> None:
        if armed and index == at:
            pool.set_epochs([(at, EPOCH + 1)])

    with served(kind, pool, target, change) as link:
        with pytest.raises(StaleBlocks, match=f"block {at}"):
            link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
        assert not link.closed
        armed = False
        pool.set_epochs([(at, EPOCH)])
        link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
        assert same(target.tensor[:BIG_BLOCKS], pool.tensor[:BIG_BLOCKS])


def test_a_read_that_races_with_the_blocks_next_owner_is_right_or_discarded(kind: Implementation) -> None:
    """The pins end while they are read: one block a pull, at any moment of it, gets a new epoch and new content."""
    pool, target = pools_of(kind)
    epochs = [EPOCH] * BIG_BLOCKS
    chance, begun, ended = random.Random(5), SimpleQueue[int | None](), SimpleQueue[int]()
    for block in range(BIG_BLOCKS):
        pool.tensor[block].fill_(EPOCH)
    pool.settle()

    def hand_on() -> None:
        while (block := begun.get()) is not None:
            pool.set_epochs([(block, epochs[block] + 1)])
            pool.tensor[block].fill_(epochs[block] + 1)
            pool.settle()
            ended.put(block)

    owner = threading.Thread(target=hand_on, daemon=True)
    owner.start()
    discarded = 0
    with served(kind, pool, target) as link:
        link.pull(pulls_of([0]), WHOLE)
        for _ in range(60):
            read = chance.sample(range(BIG_BLOCKS), 24)
            begun.put(chance.randrange(BIG_BLOCKS))
            try:
                link.pull([BlockPull(block, epochs[block], block) for block in read], WHOLE)
            except StaleBlocks:
                discarded += 1
            else:
                for block in read:
                    assert (target.tensor[block] == epochs[block]).all()
            epochs[ended.get()] += 1
    begun.put(None)
    owner.join()
    assert 0 < discarded < 60


def test_an_epoch_that_has_changed_before_is_noticed_and_nothing_written(kind: Implementation) -> None:
    pool, target = pools_of(kind)
    before = target.tensor.clone()
    pool.set_epochs([(3, EPOCH + 1)])
    with served(kind, pool, target) as link, pytest.raises(StaleBlocks, match="block 3 is at epoch 6"):
        link.pull(pulls_of(range(8)), WHOLE)
    assert same(target.tensor, before)


def test_a_wrong_token_reads_nothing(kind: Implementation) -> None:
    server = kind.serve(filled_pool(1, kind.source_device), None)
    try:
        scheme, _, rest = server.endpoint.partition("://")
        link = kind.link(f"{scheme}://another@{rest.partition('@')[2]}", filled_pool(2, kind.target_device), 10.0, None)
        with pytest.raises(LinkClosed, match="token"):
            link.pull(pulls_of([0]), WHOLE)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("slab", "field"),
    [
        (SlabLayout(4, 4, 32, 128, 4), "block_size"),
        (SlabLayout(4, 4, 64, 64, 4), "head_dim"),
    ],
)
def test_pools_that_do_not_fit_are_refused_by_field(kind: Implementation, slab: SlabLayout, field: str) -> None:
    with served(kind, filled_pool(1, kind.source_device), filled_pool(2, kind.target_device, slab)) as link:
        with pytest.raises(IncompatiblePeer, match=field):
            link.pull(pulls_of([0]), WHOLE)
        assert link.closed


def test_a_request_that_makes_no_sense_is_answered_and_harms_no_other_link(kind: Implementation) -> None:
    pool, target = pools_of(kind)
    server = kind.serve(pool, None)
    good, bad = (kind.link(server.endpoint, target, 10.0, None) for _ in range(2))
    try:
        good.pull(pulls_of([0]), WHOLE)
        with pytest.raises(LinkClosed, match=f"blocks must be from 0 to {BIG_BLOCKS - 1}"):
            bad.pull([BlockPull(BIG_BLOCKS + 7, EPOCH, 0)], WHOLE)
        good.pull(pulls_of([1]), WHOLE)
        assert same(target.tensor[:2], pool.tensor[:2])
    finally:
        good.close()
        server.close()


def test_case_13_a_read_that_fails_at_block_k_is_an_explicit_message(kind: Implementation) -> None:
    def fail(index: int) -> None:
        if index == 20:
            raise OSError("cannot post block 20")

    with served(kind, *pools_of(kind), fail) as link:
        with pytest.raises(LinkClosed, match="cannot post block 20"):
            link.pull(pulls_of(range(BIG_BLOCKS)), WHOLE)
        assert link.closed
