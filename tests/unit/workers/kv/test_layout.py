"""Shards and reshard plans: every head and layer of every target, from exactly one source, replicas evenly."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import IncompatiblePeer
from headrace.values import ParallelLayout
from workers.kv.layout import ModelShape, SlabLayout, reshard_plan, shard

layouts = st.builds(ParallelLayout, tp=st.sampled_from([1, 2, 4, 8]), pp=st.integers(1, 4))
shapes = st.builds(
    ModelShape,
    num_layers=st.integers(4, 9),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.just(16),
    num_heads=st.just(8),
)


@given(shape=shapes, layout=layouts)
def test_shards_cover_every_layer_and_head_as_often_as_heads_are_replicated(
    shape: ModelShape, layout: ParallelLayout
) -> None:
    held: Counter[tuple[int, int]] = Counter()
    for rank in range(layout.world_size):
        mine = shard(shape, layout, rank)
        assert (mine.pp_stage, mine.tp_rank) == divmod(rank, layout.tp)
        held.update((layer, head) for layer in range(*mine.layers) for head in range(*mine.kv_heads))
    assert set(held) == {(x, h) for x in range(shape.num_layers) for h in range(shape.num_kv_heads)}
    assert set(held.values()) == {max(1, layout.tp // shape.num_kv_heads)}


@given(shape=shapes, source=layouts, target=layouts)
def test_every_target_cell_comes_from_exactly_one_source_that_holds_it(
    shape: ModelShape, source: ParallelLayout, target: ParallelLayout
) -> None:
    filled: Counter[tuple[int, int, int]] = Counter()
    for piece in reshard_plan(shape, source, target):
        theirs, ours = shard(shape, source, piece.source_rank), shard(shape, target, piece.target_rank)
        assert piece.num_heads >= 1
        assert piece.num_layers >= 1
        for head in range(piece.num_heads):
            for layer in range(piece.num_layers):
                at = (ours.layers[0] + piece.target_layer + layer, ours.kv_heads[0] + piece.target_head + head)
                came = (theirs.layers[0] + piece.source_layer + layer, theirs.kv_heads[0] + piece.source_head + head)
                assert at == came
                assert piece.source_layer + layer < theirs.num_layers
                assert piece.source_head + head < theirs.num_kv_heads
                filled[piece.target_rank, *at] += 1
    wanted = {
        (rank, layer, head)
        for rank in range(target.world_size)
        for layer in range(*shard(shape, target, rank).layers)
        for head in range(*shard(shape, target, rank).kv_heads)
    }
    assert set(filled) == wanted
    assert set(filled.values()) == {1}


@given(shape=shapes, tp=st.sampled_from([2, 4, 8]))
def test_replicas_share_the_targets_evenly(shape: ModelShape, tp: int) -> None:
    """As many targets as sources at one layout: each source then serves as many as any other of its stage."""
    layout = ParallelLayout(tp)
    served = Counter(piece.source_rank for piece in reshard_plan(shape, layout, layout))
    assert set(served) == set(range(tp))
    assert max(served.values()) == min(served.values())


@pytest.mark.parametrize(
    ("layout", "field"), [(ParallelLayout(tp=3), "tp"), (ParallelLayout(tp=16), "tp"), (ParallelLayout(pp=5), "pp")]
)
def test_what_cannot_be_spread_is_refused_by_name(layout: ParallelLayout, field: str) -> None:
    with pytest.raises(IncompatiblePeer) as error:
        shard(ModelShape(num_layers=4, num_kv_heads=2, head_dim=16, num_heads=8), layout, 0)
    assert error.value.numbers["field"] == field


def test_a_rank_outside_the_layout_is_an_error() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        shard(ModelShape(4, 2, 16, 8), ParallelLayout(tp=2), 2)


def test_slab_strides_are_row_major_and_pieces_count_their_bytes() -> None:
    slab = SlabLayout(num_kv_heads=2, num_layers=3, block_size=4, head_dim=8, element_bytes=2)
    assert (slab.kv_stride, slab.layer_stride, slab.head_stride, slab.block_stride) == (32, 64, 192, 384)
    assert slab.block_bytes == 768
    shape = ModelShape(num_layers=3, num_kv_heads=2, head_dim=8, num_heads=8)
    pieces = reshard_plan(shape, ParallelLayout(), ParallelLayout())
    assert sum(piece.num_bytes(slab) for piece in pieces) == slab.block_bytes
