"""The reshard plan between any two layouts: everything filled once, from where it is, with the load spread evenly."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.errors import IncompatiblePeer
from headrace.values import ParallelLayout
from workers.kv.layout import ModelShape, Shard, reshard_plan, shard


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    group = draw(st.sampled_from([1, 2, 4, 8]))
    return ModelShape(draw(st.integers(1, 17)), kv_heads, 64, kv_heads * group)


def layouts() -> st.SearchStrategy[ParallelLayout]:
    return st.builds(ParallelLayout, st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), st.integers(1, 5))


def shards(shape: ModelShape, layout: ParallelLayout) -> list[Shard]:
    try:
        return [shard(shape, layout, rank) for rank in range(layout.world_size)]
    except IncompatiblePeer:
        assume(False)
        raise


def held(one: Shard) -> set[tuple[int, int]]:
    return {(head, layer) for head in range(*one.kv_heads) for layer in range(*one.layers)}


@given(shapes(), layouts())
def test_shards_cover_every_head_and_layer_alike(shape: ModelShape, layout: ParallelLayout) -> None:
    counts = Counter(place for one in shards(shape, layout) for place in held(one))
    assert set(counts) == {(h, layer) for h in range(shape.num_kv_heads) for layer in range(shape.num_layers)}
    assert set(counts.values()) == {max(1, layout.tp // shape.num_kv_heads)}


@given(shapes(), layouts(), layouts())
def test_every_head_and_layer_of_every_target_is_filled_once_with_the_right_one(
    shape: ModelShape, source: ParallelLayout, target: ParallelLayout
) -> None:
    sources, targets = shards(shape, source), shards(shape, target)
    filled: list[Counter[tuple[int, int]]] = [Counter() for _ in targets]
    for piece in reshard_plan(shape, source, target):
        giver, taker = sources[piece.source_rank], targets[piece.target_rank]
        assert piece.source_head + piece.num_heads <= giver.num_kv_heads
        assert piece.source_layer + piece.num_layers <= giver.num_layers
        for head in range(piece.num_heads):
            for layer in range(piece.num_layers):
                read = (
                    giver.kv_heads[0] + piece.source_head + head,
                    giver.layers[0] + piece.source_layer + layer,
                )
                written = (
                    taker.kv_heads[0] + piece.target_head + head,
                    taker.layers[0] + piece.target_layer + layer,
                )
                assert read == written
                filled[piece.target_rank][written] += 1
    for taker, counts in zip(targets, filled, strict=True):
        assert set(counts) == held(taker)
        assert set(counts.values()) <= {1}


@given(shapes(), layouts(), layouts())
def test_replicas_share_the_load_evenly(shape: ModelShape, source: ParallelLayout, target: ParallelLayout) -> None:
    """Of the source ranks that hold the same, none reads out more than one target's worth above another."""
    sources, targets = shards(shape, source), shards(shape, target)
    load: Counter[int] = Counter()
    for piece in reshard_plan(shape, source, target):
        load[piece.source_rank] += piece.num_heads * piece.num_layers
    largest_share = max(one.num_kv_heads for one in targets)
    alike: dict[tuple[tuple[int, int], tuple[int, int]], list[Shard]] = {}
    for one in sources:
        alike.setdefault((one.kv_heads, one.layers), []).append(one)
    for replicas in alike.values():
        loads = [load[one.rank] for one in replicas]
        assert max(loads) - min(loads) <= largest_share * replicas[0].num_layers


@given(shapes(), layouts())
def test_equal_layouts_move_each_ranks_whole_slab_in_one_piece(shape: ModelShape, layout: ParallelLayout) -> None:
    places = shards(shape, layout)
    plan = reshard_plan(shape, layout, layout)
    assert [piece.target_rank for piece in plan] == list(range(layout.world_size))
    for piece, one in zip(plan, places, strict=True):
        assert (piece.num_heads, piece.num_layers) == (one.num_kv_heads, one.num_layers)
        assert sources_hold_the_same(places[piece.source_rank], one)


def sources_hold_the_same(one: Shard, other: Shard) -> bool:
    return (one.kv_heads, one.layers) == (other.kv_heads, other.layers)


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (ParallelLayout(3, 1), "tp"),
        (ParallelLayout(5, 1), "tp"),
        (ParallelLayout(6, 1), "tp"),
        (ParallelLayout(64, 1), "tp"),
        (ParallelLayout(1, 5), "pp"),
    ],
)
def test_case_27_an_impossible_layout_is_refused_by_name_on_either_side(layout: ParallelLayout, field: str) -> None:
    shape = ModelShape(num_layers=4, num_kv_heads=4, head_dim=64, num_heads=32)
    fine = ParallelLayout(2, 2)
    for source, target in ((layout, fine), (fine, layout)):
        with pytest.raises(IncompatiblePeer, match=str(getattr(layout, field))) as caught:
            reshard_plan(shape, source, target)
        assert caught.value.numbers["field"] == field


def test_case_27_attention_heads_that_divide_do_not_make_up_for_kv_heads_that_do_not() -> None:
    shape = ModelShape(num_layers=4, num_kv_heads=4, head_dim=64, num_heads=28)
    with pytest.raises(IncompatiblePeer, match="got 7"):
        reshard_plan(shape, ParallelLayout(7, 1), ParallelLayout(1, 1))


def test_replicas_of_four_times_the_heads_give_to_one_target_rank_each() -> None:
    shape = ModelShape(num_layers=2, num_kv_heads=2, head_dim=64, num_heads=8)
    plan = reshard_plan(shape, ParallelLayout(8, 1), ParallelLayout(8, 1))
    assert sorted(piece.source_rank for piece in plan) == list(range(8))
