"""Cost models of cards: what was measured is told apart again, and the files say what the benchmarks say."""

import json

import pytest

from cluster.planning.gpus import BASIS, SHEETS
from cluster.planning.speed import TILE_ROWS
from cluster.simulation import cards
from cluster.simulation.cards import measure
from headrace.costmodel import CostModel
from headrace.devicecost import AttentionGrid, DeviceCost, WholeAttention
from headrace.errors import ConfigError

GRID = AttentionGrid(100, cards.NUM_KV_HEADS, cards.TILE_TOKENS)
TRUTH = DeviceCost(
    *(3e-3, 2e-5, 1e-9, 6e-3, 2e-5, 4e-8, 1e-5, 3e11),
    grid=GRID,
    attention_launch_seconds=1e-3,
    whole=WholeAttention(cards.WHOLE_FROM_TOKENS, 5e-4, 6e-10),
)


def _same(found: DeviceCost, other: DeviceCost) -> None:
    assert (found.grid, found.whole.least_tokens) == (other.grid, other.whole.least_tokens)
    for name in CostModel.__dataclass_fields__.keys() | {"attention_launch_seconds", "ridge"}:
        assert getattr(found, name) == pytest.approx(getattr(other, name), rel=1e-9), name
    for name in ("launch_seconds", "token_context_seconds"):
        assert getattr(found.whole, name) == pytest.approx(getattr(other.whole, name), rel=1e-9), name


def test_the_fit_finds_the_model_that_made_the_figures() -> None:
    launches = TRUTH.attention_launch_seconds
    figures = {
        f"decode_b{batch}": batch / TRUTH.decode_step_seconds(batch, batch * cards.DECODE_CONTEXT_TOKENS)
        for batch in cards.DECODE_BATCHES
    }
    for name, (tokens, at) in cards.PAGED.items():
        held = 6 * 400 if name == "prefill_2k_at_14k_tflops" else tokens  # 512 programs are six waves of 400 tokens
        seconds = launches + TRUTH.prefill_token_context_seconds * held * at
        figures[name] = tokens * at * cards.ATTENTION_FLOPS / seconds / 1e12
    for name, (tokens, at) in cards.WHOLE.items():
        seconds = TRUTH.whole.launch_seconds + TRUTH.whole.token_context_seconds * tokens * at
        figures[name] = tokens * at * cards.ATTENTION_FLOPS / seconds / 1e12
    full = TRUTH.prefill_seconds(cards.PREFILL_STEP_TOKENS) - TRUTH.prefill_token_context_seconds * (
        cards.PREFILL_STEP_TOKENS * (cards.PREFILL_STEP_TOKENS / 2 - 512.5)
    )
    figures["prefill_1024"] = cards.PREFILL_STEP_TOKENS / full
    alone = TRUTH.whole.launch_seconds + TRUTH.whole.token_context_seconds * 1024 * 512.5
    lone = TRUTH.prefill_base_seconds - launches + 1024 * TRUTH.prefill_token_seconds + alone
    figures |= {"handover_landed_ms": 0.3, "ttft_1024": lone * 1e3 + 0.3, "multiprocessors": GRID.multiprocessors}
    figures["attention_bytes_per_second"] = cards.KV_BYTES_PER_TOKEN / TRUTH.decode_context_token_seconds
    figures["pull_16mib_gbps"] = 2**24 / TRUTH.transfer_seconds(2**24) / 1e9
    figures["pull_512mib_gbps"] = TRUTH.transfer_bytes_per_second / 1e9
    _same(cards.fit(figures), TRUTH)


@pytest.mark.parametrize("name", measure.NUM_BLOCKS)
def test_a_measured_card_is_what_its_figures_say(name: str) -> None:
    found = cards.load(name)
    assert isinstance(found.cost, DeviceCost)
    _same(found.cost, cards.fit(found.figures))


@pytest.mark.parametrize("name", measure.NUM_BLOCKS)
def test_the_benchmarks_of_now_make_a_sound_card(name: str) -> None:
    """To have them in its file: python -m cluster.simulation.cards.measure"""
    card = measure.measured(name)
    assert card.source == cards.load(name).source
    for batch in cards.DECODE_BATCHES:
        step = card.cost.decode_step_seconds(batch, batch * cards.DECODE_CONTEXT_TOKENS)
        assert step == pytest.approx(batch / card.figures[f"decode_b{batch}"], rel=0.1), batch


def test_an_unknown_card_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no card 'b200': there are h100, h200"):
        cards.load("b200")


def test_a_file_of_a_card_reads_as_the_card_that_was_written() -> None:
    card = measure.measured("h200")
    assert DeviceCost.from_json(json.loads(json.dumps(card.as_json()))["cost"]) == card.cost


def test_the_cards_say_of_the_kernels_what_the_kernels_do() -> None:
    """Planning loads no torch, so it knows the kernels by figures of its own."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from kernels import ahead, cuda
    from kernels.tuning import TUNED

    for name, multiprocessors in measure.MULTIPROCESSORS.items():
        cost = cards.load(name).cost
        assert isinstance(cost, DeviceCost)
        assert ahead.CARDS[name][1] == multiprocessors == SHEETS[name].multiprocessors
        assert cost.grid.multiprocessors == multiprocessors
        rows = json.loads((TUNED / f"{name}.json").read_text(encoding="utf-8"))["prefill"]["rows"]
        assert TILE_ROWS == rows == cards.TILE_TOKENS * BASIS.num_heads // BASIS.num_kv_heads
        assert (cost.grid.most_parts, cost.whole.least_tokens) == (cuda.MOST_SPLITS, cuda.DENSE_FROM_TOKENS)
