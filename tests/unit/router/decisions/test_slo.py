from dataclasses import replace

import pytest

from headrace.values import Load
from router.decisions.ledger import Beside
from router.decisions.placement import Ask, Pair, Placed, place
from router.decisions.slo import MISS_SECONDS, TTFT_SAFE, costed, expected
from router.decisions.streams import beside, tpot_beside
from router.decisions.view import View, WorkerView
from tests.unit.router.decisions.placing import ASK, COST, d, p, placed


def pair(
    name: str, *, ttft: float, tpot: float = 0.01, wait: float = 0.0, stall: float = 0.0, missed: float = 0.0
) -> Pair:
    return Pair(name, None, ttft, 0.0, tpot, stall, ttft + 100 * tpot + stall, 0, wait, missed)


def best(pairs: list[Pair], ttft: float | None, tpot: float | None) -> tuple[str, str]:
    chosen = min(costed(pairs, ttft, tpot), key=lambda each: each[0])[1]
    return chosen.decode, expected(chosen, ttft, tpot)


def test_without_targets_the_price_decides() -> None:
    assert best([pair("a", ttft=2.0), pair("b", ttft=1.0)], None, None) == ("b", "")


def test_the_cheapest_of_those_that_meet_both_targets() -> None:
    late = pair("late", ttft=0.9, tpot=0.001)
    slow = pair("slow", ttft=0.1, tpot=0.03)
    good = pair("good", ttft=0.5, tpot=0.02)
    assert best([late, slow, good], 1.0, 0.02) == ("good", "met")
    assert late.ttft_seconds > TTFT_SAFE


def test_within_its_target_own_waiting_costs_little_and_others_stall_all() -> None:
    """A patient request queues behind the warm worker, and leaves the idle one to those who cannot wait."""
    warm = pair("warm", ttft=3.0, wait=2.9)
    idle = pair("idle", ttft=1.0, wait=0.0)
    assert best([warm, idle], None, None)[0] == "idle"
    assert best([warm, idle], 60.0, None) == ("warm", "met")
    assert best([warm, idle], 6.0, None)[0] == "idle"  # half of 2.9 s is more than what it saves
    stalling = pair("stalling", ttft=0.5, stall=2.0)
    assert best([stalling, idle], 60.0, None)[0] == "idle"


def test_where_none_meets_them_it_hurts_least() -> None:
    late = pair("late", ttft=1.5, tpot=0.01)
    slow = pair("slow", ttft=0.5, tpot=0.05)
    assert best([late, slow], 1.0, 0.02) == ("late", "missed")  # 1 s later against 100 × 0.04 s slower
    assert best([late, pair("sooner", ttft=0.5, tpot=0.01)], -5.0, 0.1)[0] == "sooner"  # missed already
    assert best([late, pair("stalls", ttft=1.4, stall=1.0)], 1.0, None)[0] == "late"


def test_what_is_met_at_the_price_of_others_is_no_gain() -> None:
    late, early = pair("late", ttft=1.5), pair("early", ttft=0.1, missed=0.4)
    assert best([late, early], 1.0, 0.02)[0] == "early"  # four tenths of a stream for one request
    assert best([late, pair("early", ttft=0.1, missed=2.0)], 1.0, 0.02)[0] == "late"
    nearly = pair("nearly", ttft=0.6)  # a fifth of a miss
    assert best([nearly, pair("early", ttft=0.1, missed=0.2 + 0.4 / MISS_SECONDS)], 1.0, 0.02)[0] == "early"
    assert best([nearly, pair("early", ttft=0.1, missed=0.2 + 0.6 / MISS_SECONDS)], 1.0, 0.02)[0] == "nearly"


def test_place_looks_at_the_targets_of_the_request() -> None:
    busy = d("busy", load=Load(num_running=30, context_tokens=1000))
    empty = d("empty")
    quick, slow = p("quick"), p("slow", load=Load(num_waiting=1, waiting_prefill_tokens=1500))
    held = {"slow": 992}
    ask = Ask(1000, 100, cached_tokens=held)
    assert placed(ask, busy, empty, quick, slow) == ("empty", "quick")
    assert placed(Ask(1000, 100, cached_tokens=held, ttft_seconds=60.0), busy, empty, quick, slow) == ("empty", "slow")
    strict = Ask(1000, 100, cached_tokens=held, ttft_seconds=2.2, tpot_seconds=0.02)
    placement = place(strict, View((busy, empty, quick, slow)), 0.0)
    assert isinstance(placement, Placed)
    assert placement.why.slo == "met"
    assert placement.why.chosen is not None
    assert (placement.why.chosen.decode, placement.why.chosen.prefill) == ("empty", "quick")
    assert placement.why.chosen.wait_seconds < 0.1


def test_a_request_without_targets_says_so_and_one_that_cannot_meet_them_too() -> None:
    view = View((p("p"), d("d")))
    assert place(ASK, view, 0.0).why.slo == ""
    assert place(Ask(1000, 100, ttft_seconds=0.01), view, 0.0).why.slo == "missed"


# -- what decode computes beside its streams


def decoding(tokens_beside: float = 0.0, num_running: int = 40) -> WorkerView:
    """Steps of 50 ms and 1 ms for each stream and each thousandth of their context, in chunks of 512."""
    load = Load(num_running=num_running, context_tokens=1000 * num_running)
    view = d("d", load=load, cost=replace(COST, decode_base_seconds=0.05))
    view.beside = Beside(tokens_beside / max(num_running, 1), 128.0)
    return view


def placed_on(worker: WorkerView, tpot: float | None) -> str | None:
    """Where a prompt is computed that would be 20 s late on the prefill worker."""
    behind = p("p", load=Load(num_waiting=9, waiting_prefill_tokens=20_000))
    ask = Ask(1000, 100, ttft_seconds=5.0, tpot_seconds=tpot)
    placement = place(ask, View((behind, worker)), 0.0)
    assert isinstance(placement, Placed)
    return placement.prefill.worker_id if placement.prefill is not None else None


def test_case_disagg_a_prompt_beside_streams_is_priced_by_what_it_does_to_them() -> None:
    """It counted as met by its own targets alone, with a step as if nothing was computed beside it: all that was late went
    to decode workers, whose streams all missed. By the model, at 38 requests/s of Azure's on 1P1D of H200, 16 a second and
    GPU met TTFT 1 s and TPOT 12 ms, and 20 where placement knew no target."""
    step = decoding().tpot_seconds(1, 1000)
    assert placed_on(decoding(), 3 * step) is None, "they have time"
    assert placed_on(decoding(), 1.01 * step) == "p", "it would push them over"
    assert placed_on(decoding(0.0, num_running=0), 1.01 * decoding(0.0, 0).tpot_seconds(1, 1000)) is None, (
        "nobody is there"
    )
    assert placed_on(decoding(tokens_beside=1000), 3 * step) == "p", "others' prompts have used their time up"


def test_a_chunk_costs_streams_what_their_step_takes_longer() -> None:
    worker = decoding(num_running=10)
    step, chunk = worker.cost.decode_step_seconds(10, 10_000), worker.max_step_tokens - 10
    one, two = (beside(worker, step, tokens, 0, 1.0) for tokens in (chunk, 2 * chunk))
    assert one.added_seconds == worker.cost.step_seconds(chunk, chunk / 2, 10, 10_000) - step
    assert two.added_seconds == pytest.approx(2 * one.added_seconds)
    assert two.compute_seconds == pytest.approx(two.added_seconds + 2 * step)
    assert one.tpot_seconds == pytest.approx(step + one.added_seconds / 128)
    assert 0 < one.num_missed < two.num_missed < 10
    assert beside(worker, step, chunk, 0, step).num_missed == pytest.approx(10), "they had no time left"
    assert beside(decoding(num_running=0), step, chunk, 0, 1.0).num_missed == 0
    assert tpot_beside(worker, step) == step
    busy = decoding(tokens_beside=50, num_running=10)
    assert tpot_beside(busy, step) == pytest.approx(step + 50 * beside(worker, step, 512, 0, 1.0).added_seconds / 512)
