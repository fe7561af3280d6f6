"""Cost models of cards: what was measured is told apart again, and the files say what the benchmarks say."""

import pytest

from cluster.simulation import cards
from cluster.simulation.cards import measure
from headrace.costmodel import CostModel
from headrace.errors import ConfigError

TRUTH = CostModel(1e-3, 2e-5, 1e-9, 6e-3, 2e-5, 4e-8, 1e-5, 3e11)


def test_the_fit_finds_the_model_that_made_the_figures() -> None:
    unfilled, rest = 1e-6, TRUTH.prefill_token_seconds - 1e-6
    paged = {at: unfilled + TRUTH.prefill_token_context_seconds * at for at in cards.PAGED_CONTEXTS.values()}
    figures = {
        f"decode_b{batch}": batch / TRUTH.decode_step_seconds(batch, batch * cards.DECODE_CONTEXT_TOKENS)
        for batch in cards.DECODE_BATCHES
    }
    figures |= {name: at * cards.ATTENTION_FLOPS / paged[at] / 1e12 for name, at in cards.PAGED_CONTEXTS.items()}
    figures["prefill_1024"] = 1 / (TRUTH.prefill_base_seconds / cards.PREFILL_STEP_TOKENS + rest + paged[512.5])
    figures["prefill_1k_tflops"] = 512.5 * cards.ATTENTION_FLOPS / 1e-6 / 1e12  # dense: 1 µs a token
    figures["handover_landed_ms"] = 0.3
    figures["ttft_1024"] = (TRUTH.prefill_base_seconds + 1024 * (rest + 1e-6)) * 1e3 + 0.3
    figures["attention_bytes_per_second"] = cards.KV_BYTES_PER_TOKEN / TRUTH.decode_context_token_seconds
    figures["pull_16mib_gbps"] = 2**24 / TRUTH.transfer_seconds(2**24) / 1e9
    figures["pull_512mib_gbps"] = TRUTH.transfer_bytes_per_second / 1e9
    found = cards.fit(figures)
    for name in CostModel.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-9), name


@pytest.mark.parametrize("name", measure.NUM_BLOCKS)
def test_a_measured_card_is_what_its_figures_say(name: str) -> None:
    found = cards.load(name)
    fitted = cards.fit(found.figures)
    for name in CostModel.__dataclass_fields__:
        assert getattr(found.cost, name) == pytest.approx(getattr(fitted, name), rel=1e-9), name


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
