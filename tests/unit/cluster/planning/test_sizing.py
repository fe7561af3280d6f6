"""The fewest workers: one fewer does not hold, more load takes more, and what cannot be met is said with figures."""

from dataclasses import replace

import pytest

from cluster.planning.sizing import (
    Idle,
    Length,
    Load,
    Overload,
    Pools,
    Sized,
    Target,
    Unreachable,
    Worker,
    lengths_around,
    predict,
    size,
)
from cluster.simulation import cards, compare
from cluster.simulation.cards import LANDING_SECONDS, MESSAGE_SECONDS
from cluster.simulation.fleet import Fleet
from headrace.costmodel import CostModel
from headrace.goodput import Slo
from headrace.traces import TraceRow

COST = CostModel(
    prefill_base_seconds=0.01,
    prefill_token_seconds=1e-4,
    prefill_token_context_seconds=0.0,
    decode_base_seconds=0.02,
    decode_sequence_seconds=1e-3,
    decode_context_token_seconds=0.0,
    transfer_base_seconds=0.0,
    transfer_bytes_per_second=1e12,
)
WORKER = Worker(COST, kv_tokens=100_000, max_num_seqs=32)
CHAT = [Length(500, 50), Length(2000, 200), Length(1000, 100)]
TARGET = Target(ttft_seconds=1.0, tpot_seconds=0.05)
TOLD = 4 * MESSAGE_SECONDS + LANDING_SECONDS  # submit, ticket, announcement, token; and the step's result


def sized(per_second: float, *, unified: bool = False, worker: Worker = WORKER, target: Target = TARGET) -> Sized:
    found = size(worker, worker, Load(per_second, CHAT), target, unified=unified)
    assert isinstance(found, Sized)
    return found


def test_a_lone_request_takes_the_sum_of_its_terms() -> None:
    found = predict(Pools(1, 1), WORKER, WORKER, Load(1e-9, [Length(1000, 11)]), TARGET)
    assert not isinstance(found, Overload)
    assert found.ttft_mean_seconds == pytest.approx(0.01 + 1000 * 1e-4 + TOLD)
    assert found.tpot_mean_seconds == pytest.approx(0.021), "it is in its own steps"


def test_a_prompt_of_2000_and_a_bit_takes_the_kernel_of_whole_prompts_too() -> None:
    """Lengths of made traffic are no whole numbers, and each was planned without it: 1.2 ms of 50 too long."""
    worker = Worker(cards.load("h200").cost, kv_tokens=1e6)
    found = [
        predict(Pools(1, 1), worker, worker, Load(1e-9, [Length(tokens, 11)]), TARGET)
        for tokens in (2000.0, 2000.3, 2001.0)
    ]
    ttfts = [one.ttft_mean_seconds for one in found if not isinstance(one, Overload)]
    assert ttfts[0] <= ttfts[1] <= ttfts[2]


def test_decode_holds_what_little_says_and_its_steps_take_that_long() -> None:
    """5 requests a second of 200 steps: n = 1000 · τ, τ = 0.02 + 0.0005 · (n + 1), so n = 41 and τ = 0.041."""
    worker = replace(WORKER, max_num_seqs=64, cost=replace(COST, decode_sequence_seconds=5e-4))
    found = predict(Pools(1, 1), worker, worker, Load(5.0, [Length(100, 201)]), TARGET)
    assert not isinstance(found, Overload)
    assert found.sequences == pytest.approx(41)
    assert found.step_seconds == pytest.approx(0.041)


def test_a_worker_whose_steps_cost_by_the_sequence_alone_is_not_free_for_the_only_one() -> None:
    """As a fit may say of a CPU. Steps were of the others alone: no rows were ever taken, and a token took 0 s."""
    worker = replace(WORKER, cost=replace(COST, decode_base_seconds=1e-6, decode_sequence_seconds=0.1))
    found = predict(Pools(1, 1), worker, worker, Load(0.02, [Length(100, 201)]), replace(TARGET, tpot_seconds=0.5))
    assert not isinstance(found, Overload)
    assert found.tpot_mean_seconds == pytest.approx(0.1 / (1 - 0.02 * 200 * 0.1), rel=1e-2)
    assert found.sequences == pytest.approx(0.02 * 200 * 0.1 / (1 - 0.02 * 200 * 0.1), rel=1e-2)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("per_second", [0.01, 8.0, 60.0, 900.0])
def test_one_worker_fewer_of_either_pool_does_not_hold(per_second: float, unified: bool) -> None:
    found = sized(per_second, unified=unified)
    pools, load = found.pools, Load(per_second, CHAT)
    assert found.prediction.attainment >= TARGET.attainment
    for pool in ("prefill", "decode", "unified"):
        if getattr(pools, pool) > 1:
            less = predict(replace(pools, **{pool: getattr(pools, pool) - 1}), WORKER, WORKER, load, TARGET)
            assert (
                isinstance(less, Overload)
                or less.attainment < TARGET.attainment
                or max(less.prefill_busy, less.decode_busy) > 0.9
            )
            assert f"{pool} {getattr(pools, pool)}: with {getattr(pools, pool) - 1}" in found.reason


def test_more_load_never_takes_fewer_workers() -> None:
    numbers = [sized(per_second).pools.num_workers for per_second in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 20 * numbers[0]


def test_bursts_take_more_workers_than_their_mean() -> None:
    smooth, bursty = (size(WORKER, WORKER, Load(20.0, CHAT, gap_scv=scv), TARGET) for scv in (1.0, 12.0))
    assert isinstance(smooth, Sized)
    assert isinstance(bursty, Sized)
    assert bursty.pools.prefill > smooth.pools.prefill


def test_cached_tokens_take_fewer_prefill_workers() -> None:
    cold, warm = (
        size(WORKER, WORKER, Load(60.0, lengths_around(1000, 100, hit_rate=rate)), TARGET) for rate in (0.0, 0.8)
    )
    assert isinstance(cold, Sized)
    assert isinstance(warm, Sized)
    assert warm.pools.prefill < cold.pools.prefill / 2


def test_lengths_that_were_guessed_keep_their_means() -> None:
    lengths = lengths_around(1000, 100, cv=1.5)
    assert sum(length.input_tokens for length in lengths) / len(lengths) == pytest.approx(1000)
    assert sum(length.output_tokens for length in lengths) / len(lengths) == pytest.approx(100, rel=0.01)


def test_nothing_to_do_is_idle_and_not_a_size() -> None:
    assert size(WORKER, WORKER, Load(0.0, CHAT), TARGET) == Idle()


@pytest.mark.parametrize("unified", [False, True])
def test_case_55_an_slo_below_one_requests_own_latency_is_reported_and_not_sized(unified: bool) -> None:
    found = size(WORKER, WORKER, Load(5.0, CHAT), replace(TARGET, ttft_seconds=0.05), unified=unified)
    assert isinstance(found, Unreachable)
    assert found.attainment == 0.0
    assert found.ttft_seconds == pytest.approx(0.01 + 0.2 + TOLD, rel=0.1)
    assert "have the pools to themselves" in found.reason
    tpot = size(WORKER, WORKER, Load(5.0, CHAT), replace(TARGET, tpot_seconds=0.01), unified=unified)
    assert isinstance(tpot, Unreachable)
    assert tpot.tpot_seconds == pytest.approx(0.02, rel=0.1)


def test_case_55_time_in_queues_is_part_of_what_is_predicted() -> None:
    """At 90 % of what the pool can do a request waits longer than it computes, decode workers helping or not."""
    load = Load(0.9 / 0.127, CHAT)  # a mean prompt takes 0.127 s
    found = predict(Pools(1, 4), WORKER, WORKER, load, TARGET)
    assert not isinstance(found, Overload)
    assert found.ttft_mean_seconds > 2 * 0.127


def test_too_few_rows_or_too_little_kv_is_named() -> None:
    found = predict(Pools(9, 1), WORKER, replace(WORKER, kv_tokens=3000), Load(5.0, CHAT), TARGET)
    assert isinstance(found, Overload)
    assert found.pool == "decode"
    assert "3,000 tokens of KV" in found.reason


def test_the_prediction_is_what_the_production_router_then_does() -> None:
    """H200 with the 8B shape, equal prompts at equal distances: no chance in it, so the two agree closely."""
    card = cards.load("h200")
    worker = Worker(card.cost, card.num_blocks * 32, kv_bytes_per_token=card.block_bytes / 32)
    rows = [TraceRow(number, number / 8, 1500, 60) for number in range(40)]
    found = predict(Pools(1, 1), worker, worker, Load(8.0, [Length(1500, 60)], gap_scv=0.0), TARGET)
    assert not isinstance(found, Overload)
    summary, _ = compare.run(Fleet(card, prefill=1, decode=1), "ours", rows, slo=Slo(1.0, 0.05))
    assert summary.tpot_seconds["p50"] == pytest.approx(found.tpot_seconds["p50"], rel=0.05)
    assert summary.ttft_seconds["p50"] == pytest.approx(found.ttft_seconds["p50"], rel=0.05)
