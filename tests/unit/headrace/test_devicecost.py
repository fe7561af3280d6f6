"""Steps of a device: waves of programs, parts of a context, the corner of the roofline."""

import json
from dataclasses import asdict, replace

import pytest

from headrace.costmodel import CostModel
from headrace.devicecost import AttentionGrid, DeviceCost, WholeAttention

GRID = AttentionGrid(132, 8, 32)
COST = DeviceCost(
    *(2e-3, 2e-5, 1e-9, 5e-3, 1e-5, 3e-8, 1e-5, 3e11),
    grid=GRID,
    attention_launch_seconds=1e-3,
    whole=WholeAttention(512, 5e-4, 6e-10),
)


def test_a_wave_that_is_not_full_takes_as_long_as_one_that_is() -> None:
    """192 programs of 132 at a time are two waves, as 256 are; 264, of 33 tiles, are two as well, and 272 are three."""
    assert GRID.attended(768, 768) == GRID.attended(1024, 1024) == GRID.attended(33 * 32, 1056) == 2 * 528
    assert GRID.attended(33 * 32 + 1, 1057) == 3 * 528
    assert GRID.attended(384, 384) == GRID.attended(512, 512) == 528


def test_programs_that_are_too_few_share_contexts_as_the_whole_step_calls_for() -> None:
    assert [GRID.parts(tokens) for tokens in (16, 64, 128, 192, 256, 288, 512, 4096)] == [16, 8, 4, 2, 2, 1, 1, 1]
    apart = replace(GRID, parts_slower=1.0)
    assert [apart.attended(tokens, tokens) for tokens in (128, 192, 256)] == [132, 264, 264]
    assert GRID.attended(256, 256) == pytest.approx(264 * GRID.parts_slower)
    # 144 tokens beside 48 that decode replay the graph of 192: two parts, though five tiles alone would have had three.
    assert apart.attended(144, 192) == 264 > apart.attended(144, 144)


@pytest.mark.parametrize(("heads", "tokens"), [(8, 384), (4, 768), (1, 3072)])
def test_a_rank_of_fewer_heads_needs_more_tokens_to_fill_the_device(heads: int, tokens: int) -> None:
    grid = replace(GRID, num_heads=heads)
    assert grid.attended(tokens, tokens) / tokens == pytest.approx(GRID.attended(384, 384) / 384)


def test_an_impossible_grid_is_refused_by_name_and_value() -> None:
    with pytest.raises(ValueError, match="multiprocessors must be at least 1, got 0"):
        AttentionGrid(0, 8, 32)


def test_a_deep_chunk_that_does_not_fill_the_device_costs_more_than_a_line_says() -> None:
    line = CostModel(*(getattr(COST, name) for name in CostModel.__dataclass_fields__))
    for tokens, by in ((384, 1.2), (768, 1.2), (1024, 1.0)):
        assert COST.step_seconds(tokens, 24_000.0) / line.step_seconds(tokens, 24_000.0) == pytest.approx(by, abs=0.06)


def test_launches_come_on_top_of_weights_and_the_corner_is_round() -> None:
    """128 tokens compute for 3.56 ms and weights are read for 5: 5.04, launches, and attention of a part of a wave."""
    attention = 132 * GRID.parts_slower * 1e-9 * 1000.0
    products = (5e-3**8 + 3.56e-3**8) ** (1 / 8)
    assert COST.step_seconds(128, 1000.0) == pytest.approx(products + 1e-3 + attention)
    decodes = COST.step_seconds(128, 1000.0, 10, 20_000) - COST.step_seconds(128, 1000.0)
    assert decodes > 20_000 * 3e-8 + 10 * 1e-5 * 0.9
    sharp = replace(COST, ridge=100.0)
    assert sharp.step_seconds(128, 1000.0) == pytest.approx(6e-3 + attention, rel=1e-3)


def test_a_prompt_that_is_alone_and_whole_has_a_kernel_of_its_own() -> None:
    whole, behind = COST.step_seconds(1024, 512.0), COST.step_seconds(1024, 513.0)
    assert behind - whole == pytest.approx(5e-4 + 1056 * 513 * 1e-9 - 1024 * 512 * 6e-10)
    assert COST.step_seconds(500, 250.0) == pytest.approx(COST.step_seconds(500, 250.0001), rel=1e-4)
    assert COST.step_seconds(1024, 512.0, 1, 0) > behind, "not alone"


def test_it_reads_as_it_was_written() -> None:
    assert DeviceCost.from_json(json.loads(json.dumps(asdict(COST)))) == COST
