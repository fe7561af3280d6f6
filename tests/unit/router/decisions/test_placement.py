from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.values import Load, Role
from router.decisions.candidates import (
    EXPECTED_OUTPUT_TOKENS,
    decode_prices,
    held_tokens,
    most_cached,
    prefill_prices,
    who_decodes,
    who_prefills,
)
from router.decisions.placement import Ask, NoCapacity, Placed, place
from router.decisions.record import Decision
from router.decisions.view import View, WorkerView
from tests.unit.router.decisions.placing import ASK, COST, d, p, placed, u, worker
from tests.unit.router.decisions.strategies import decisions

BUSY_DECODE = d("d", load=Load(num_running=40, context_tokens=40_000))


def refused(ask: Ask, *workers: WorkerView) -> str:
    placement = place(ask, View(workers), 0.0)
    assert isinstance(placement, NoCapacity)
    return placement.reason


def test_one_of_each_makes_a_pair() -> None:
    assert placed(ASK, p("p"), d("d")) == ("d", "p")


def test_the_shorter_queue_prefills_and_the_smaller_batch_decodes() -> None:
    busy_prefill = p("p1", load=Load(waiting_prefill_tokens=5000))
    busy_decode = d("d1", load=Load(num_running=30, context_tokens=30_000))
    assert placed(ASK, busy_prefill, p("p2"), busy_decode, d("d2")) == ("d2", "p2")


def test_a_cached_prefix_attracts_as_far_as_it_saves_computation() -> None:
    ask = replace(ASK, cached_tokens={"p1": 960})
    assert placed(ask, p("p1", load=Load(waiting_prefill_tokens=500)), p("p2"), d("d"))[1] == "p1"
    assert placed(ask, p("p1", load=Load(waiting_prefill_tokens=2000)), p("p2"), d("d"))[1] == "p2"


def test_case_37_a_hot_prefix_does_not_draw_everything_to_one_worker() -> None:
    """Placed one after the other with each counted: the holder of the prefix gets its share, and no more than it can."""
    waiting = {"p1": 0, "p2": 0, "p3": 0}
    for _ in range(60):
        ask = Ask(num_prompt_tokens=4100, max_tokens=50, cached_tokens={"p1": 4096})
        view = [p(name, load=Load(waiting_prefill_tokens=tokens)) for name, tokens in waiting.items()]
        _, prefill = placed(ask, *view, BUSY_DECODE)
        assert prefill is not None
        waiting[prefill] += 4 if prefill == "p1" else 4100
    assert waiting["p2"] == waiting["p3"] == 0
    behind = p("p1", load=Load(waiting_prefill_tokens=5000))
    assert placed(ask, behind, p("p2"), BUSY_DECODE) == ("d", "p2"), "all of the prompt is computed sooner elsewhere"
    for _ in range(60):  # cold prompts beside: they balance
        view = [p(name, load=Load(waiting_prefill_tokens=tokens)) for name, tokens in waiting.items()]
        _, prefill = placed(ASK, *view, BUSY_DECODE)
        assert prefill is not None
        waiting[prefill] += 1000
    assert max(waiting.values()) <= 1.25 * sum(waiting.values()) / 3


def test_what_is_computed_again_is_paid_by_all_who_wait() -> None:
    """The warm worker's queue is longer by more than its cache saves this one prompt, and by less than it saves them."""
    warm = p("warm", load=Load(num_waiting=4, waiting_prefill_tokens=3000))
    cold = p("cold", load=Load(num_waiting=4, waiting_prefill_tokens=2000))
    assert placed(replace(ASK, cached_tokens={"warm": 512}), warm, cold, BUSY_DECODE) == ("d", "warm")
    assert placed(ASK, warm, cold, BUSY_DECODE) == ("d", "cold")


def test_what_must_be_computed_somewhere_is_no_reason_to_wait_where_fewer_wait() -> None:
    """Many short prompts here, a few long ones there. While all that a prompt computes was counted as stall, cold prompts
    beside a hot prefix waited four times as long as they had to: their p99 was 1.25 times round robin's."""
    short = p("short", load=Load(num_waiting=50, waiting_prefill_tokens=1000))
    long = p("long", load=Load(num_waiting=2, waiting_prefill_tokens=4000))
    assert placed(ASK, short, long, BUSY_DECODE) == ("d", "short")


def test_decode_prefills_alone_where_all_who_prefill_are_busy_for_longer_than_it_takes() -> None:
    busy, decode = (
        Load(num_waiting=4, waiting_prefill_tokens=4000),
        d("d", load=Load(num_running=2, context_tokens=2000)),
    )
    assert placed(ASK, p("p1", load=busy), p("p2", load=busy), decode) == ("d", None)
    assert placed(ASK, p("p1", load=busy), p("p2"), decode) == ("d", "p2")
    assert placed(ASK, p("p1", load=busy), p("p2", load=busy), BUSY_DECODE)[1] is not None, "it would stall too many"
    assert placed(replace(ASK, num_prompt_tokens=8000), p("p1", load=busy), decode) == ("d", "p1"), "too long for it"


def test_a_short_remainder_is_prefilled_where_it_decodes() -> None:
    ask = replace(ASK, cached_tokens={"d": 960, "p": 960}, local_prefill_max_tokens=64)
    assert placed(ask, p("p"), d("d")) == ("d", None)
    assert placed(replace(ask, local_prefill_max_tokens=0), p("p"), d("d")) == ("d", "p")


def test_decode_prefills_alone_where_it_holds_more_than_any_prefill_worker() -> None:
    ask = replace(ASK, cached_tokens={"d": 960})
    assert placed(ask, p("p"), d("d")) == ("d", None)
    holds_more_but_stalls_many = d("d", load=Load(num_running=60, context_tokens=1))
    assert placed(ask, p("p"), holds_more_but_stalls_many) == ("d", "p")


def test_what_decode_holds_and_prefill_lacks_is_pulled_where_that_is_quicker_than_to_compute_it() -> None:
    """Three ways: prefill computes all, prefill pulls and computes the rest, decode does the rest alone."""
    ask = Ask(num_prompt_tokens=4096, max_tokens=100, cached_tokens={"d": 2048, "p": 512})
    busy = Load(num_running=8, context_tokens=8000)

    def chosen(decode: WorkerView) -> tuple[str | None, int, int, int]:
        placement = place(ask, View((p("p"), decode)), 0.0)
        assert isinstance(placement, Placed)
        assert placement.why.chosen is not None
        assert placement.pulls == (placement.why.chosen.pulled_tokens > 0)
        prefill = placement.why.chosen.prefill
        return prefill, placement.why.chosen.pulled_tokens, placement.cached_tokens, placement.prefill_tokens

    assert chosen(d("d")) == (None, 0, 2048, 2048)
    assert chosen(d("d", load=busy)) == ("p", 1536, 2048, 2048)
    slow_link = replace(COST, transfer_bytes_per_second=1e5)
    assert chosen(d("d", load=busy, cost=slow_link)) == ("p", 0, 512, 3584)


def test_what_one_prefill_worker_holds_is_not_pulled_by_another_that_is_as_good_as_equal() -> None:
    quick = replace(COST, transfer_base_seconds=1e-6, transfer_bytes_per_second=1e12)
    ask = Ask(num_prompt_tokens=4096, max_tokens=100, cached_tokens={"d": 2048, "p1": 2048})
    busy = d("d", load=Load(num_running=8, context_tokens=8000), cost=quick)
    for tie in (0.0, 0.5, 0.99):
        assert placed(replace(ask, tie=tie), p("p1"), p("p2"), busy) == ("d", "p1")
    queue = Load(waiting_prefill_tokens=4000)
    assert placed(ask, p("p1", load=queue), p("p2"), busy) == ("d", "p2")


def test_a_prompt_that_decode_holds_whole_leaves_prefill_its_last_block_to_compute() -> None:
    ask = Ask(num_prompt_tokens=1024, max_tokens=100, cached_tokens={"d": 1024})
    placement = place(ask, View((p("p"), d("d", load=Load(num_running=60, context_tokens=1)))), 0.0)
    assert isinstance(placement, Placed)
    assert placement.why.chosen is not None
    pair = next(pair for pair in placement.why.pairs if pair.prefill == "p")
    assert pair.pulled_tokens == 1024 - 32


def test_without_prefill_workers_decode_prefills_alone_and_why_says_so() -> None:
    placement = place(ASK, View((d("d"), p("gone", draining=True))), 0.0)
    assert isinstance(placement, Placed)
    assert placement.prefill is None
    assert placement.why.reason == "no_prefill_workers"
    assert [(c.worker_id, c.refused) for c in placement.why.candidates if c.refused] == [("gone", "draining")]


def test_a_pool_of_unified_workers_hands_nothing_off() -> None:
    assert placed(ASK, u("u1", load=Load(num_running=9, context_tokens=900)), u("u2")) == ("u2", None)


def test_a_prompt_is_computed_anew_up_to_its_last_token_even_when_all_is_held() -> None:
    placement = place(replace(ASK, cached_tokens={"u": 1000}), View((u("u"),)), 0.0)
    assert isinstance(placement, Placed)
    assert (placement.cached_tokens, placement.prefill_tokens) == (999, 1)


def test_case_61_only_compatible_workers_are_paired() -> None:
    assert placed(ASK, p("p1", revision="old"), p("p2"), d("d")) == ("d", "p2")
    assert placed(ASK, p("p1", revision="old"), d("d")) == ("d", None)


def test_case_11_cache_does_not_override_health() -> None:
    ask = replace(ASK, cached_tokens={"p1": 960})
    ejected = p("p1", ejected_until=10.0)
    assert placed(ask, ejected, p("p2"), d("d"), now=9.0) == ("d", "p2")
    assert placed(ask, ejected, p("p2"), d("d"), now=10.0) == ("d", "p1")


def test_where_all_are_ejected_refusing_everyone_would_help_nobody() -> None:
    assert placed(ASK, p("p", ejected_until=9.0), d("d", ejected_until=9.0)) == ("d", "p")


def test_nobody_is_a_closed_set_of_reasons() -> None:
    assert refused(ASK) == "no_workers"
    assert refused(ASK, p("p")) == "no_workers"
    assert refused(ASK, p("p"), d("d", draining=True)) == "draining"
    assert refused(replace(ASK, excluded=frozenset({"d"})), d("d")) == "excluded"
    assert refused(replace(ASK, max_tokens=10**6), d("d")) == "context"
    small = d("small")
    held = replace(small.info.capacity, num_blocks=(ASK.num_prompt_tokens + ASK.max_tokens - 2) // 32)
    assert refused(ASK, replace(small, info=replace(small.info, capacity=held))) == "context", "its blocks hold less"


def test_two_without_a_link_are_not_paired_until_it_is_time_to_try_again() -> None:
    torn = replace(d("d"), unlinked={"p1": 5.0})
    view = [p("p1"), p("p2", load=Load(waiting_prefill_tokens=300))]
    assert placed(ASK, *view, torn, now=4.0) == ("d", "p2")
    assert placed(ASK, *view, torn, now=5.0) == ("d", "p1")
    assert placed(ASK, p("p1"), torn, now=4.0) == ("d", None)


def test_a_pinned_decode_worker_is_kept_and_only_the_prefill_is_placed() -> None:
    ask = replace(ASK, decode="d1", excluded=frozenset({"p1"}))
    busy = d("d1", load=Load(num_running=60, context_tokens=60_000), draining=True, ejected_until=9.0)
    assert placed(ask, p("p1"), p("p2"), busy, d("d2")) == ("d1", "p2")
    assert placed(ask, p("p1"), busy, d("d2")) == ("d1", None)


def test_a_full_worker_waits_for_room_and_the_price_says_so() -> None:
    full = d("d1", load=Load(num_running=4, context_tokens=400), max_num_seqs=4)
    assert placed(ASK, p("p"), full, d("d2", load=Load(num_running=4, context_tokens=400)))[0] == "d2"
    no_blocks = d("d1", free_blocks=2)
    assert placed(ASK, p("p"), no_blocks, d("d2", load=Load(num_running=20, context_tokens=2000)))[0] == "d2"


def test_near_equals_are_drawn_by_the_callers_number() -> None:
    workers = (p("p"), d("d1"), d("d2"), d("d3"))
    chosen = [placed(replace(ASK, tie=tie), *workers)[0] for tie in (0.0, 0.34, 0.67, 0.999)]
    assert chosen == ["d1", "d2", "d3", "d3"]


def test_of_many_equals_every_pair_is_drawn_alike() -> None:
    """More of them than the best few: the same few must not get everything."""
    workers = [p(f"p{n}") for n in range(12)] + [d(f"d{n}") for n in range(12)]
    draws = 12 * 12 * 4 * 4
    found = Counter(placed(replace(ASK, tie=(n + 0.5) / draws), *workers) for n in range(draws))
    for side in (0, 1):
        each = Counter[str | None]()
        for pair, count in found.items():
            each[pair[side]] += count
        assert set(each.values()) == {draws // 12}
    assert len(found) == 144, "every pair has its chance"


def test_near_equals_may_be_among_the_best_few_and_others_not() -> None:
    cost = replace(COST, decode_base_seconds=COST.decode_base_seconds + 1e-7)
    workers = [p("p"), *(d(f"d{n}", cost=cost) for n in range(8)), d("d8"), d("busy", load=Load(num_running=8))]
    found = {placed(replace(ASK, tie=n / 500), *workers)[0] for n in range(500)}
    assert found == {f"d{n}" for n in range(9)}


def test_why_holds_what_it_takes_to_decide_again() -> None:
    view = View((p("p1"), p("p2", load=Load(waiting_prefill_tokens=300)), d("d1"), d("d2")))
    placement = place(replace(ASK, tie=0.7), view, 0.0)
    assert isinstance(placement, Placed)
    why = placement.why
    assert {(c.worker_id, c.role) for c in why.candidates} == {
        ("p1", "prefill"),
        ("p2", "prefill"),
        ("d1", "decode"),
        ("d2", "decode"),
    }
    assert {(pair.decode, pair.prefill) for pair in why.pairs} == {(a, b) for a in ("d1", "d2") for b in ("p1", "p2")}
    best = min(why.pairs, key=lambda pair: pair.price_seconds)
    near = [pair for pair in why.pairs if pair.price_seconds <= best.price_seconds + 0.05 * best.ttft_seconds + 1e-3]
    assert why.num_near_equals == len(near)
    assert why.chosen == near[int(0.7 * len(near))]


@given(decisions())
def test_the_prices_of_all_workers_are_those_that_why_shows(decision: Decision) -> None:
    """They are worked out apart: a number for each worker, a Candidate for the few that are compared."""
    ask, view, now = decision.why.ask, decision.view, decision.now
    decodes, prefills = who_decodes(ask, view, now), who_prefills(ask, view, now)
    taken = [candidate for candidate in decision.why.candidates if candidate.refused is None]
    assert decode_prices(ask, decodes) == pytest.approx(
        [c.wait_seconds + EXPECTED_OUTPUT_TOKENS * c.tpot_seconds for c in taken if c.role == "decode"]
    )
    held = held_tokens(ask, prefills)
    most = most_cached(ask, held_tokens(ask, decodes), held)
    assert prefill_prices(ask, prefills, held, most) == pytest.approx(
        [c.wait_seconds + c.prefill_seconds + c.stall_seconds for c in taken if c.role == "prefill"]
    )


ROLES = st.sampled_from(Role)
LOADS = st.builds(
    Load,
    num_waiting=st.integers(0, 100),
    num_running=st.integers(0, 100),
    waiting_prefill_tokens=st.integers(0, 10**6),
    context_tokens=st.integers(0, 10**6),
    claimed_tokens=st.integers(0, 10**6),
)


@given(
    st.lists(st.tuples(ROLES, LOADS, st.integers(0, 1000), st.booleans(), st.integers(0, 2000)), max_size=8),
    st.integers(1, 5000),
    st.floats(0, 1, exclude_max=True),
)
def test_whatever_the_view_a_placement_is_sound(
    drawn: list[tuple[Role, Load, int, bool, int]], num_prompt_tokens: int, tie: float
) -> None:
    workers = [
        worker(f"w{at}", role, load, free_blocks=free, draining=draining)
        for at, (role, load, free, draining, _) in enumerate(drawn)
    ]
    cached = {f"w{at}": tokens // 32 * 32 for at, (*_, tokens) in enumerate(drawn)}
    ask = Ask(num_prompt_tokens, max_tokens=64, cached_tokens=cached, tie=tie)
    match place(ask, View(tuple(workers)), 0.0):
        case Placed() as result:
            assert result.decode.role.decodes
            assert not result.decode.draining
            assert result.prefill is None or (result.prefill.role.prefills and not result.prefill.draining)
            assert result.prefill is not result.decode
            assert result.cached_tokens + result.prefill_tokens == num_prompt_tokens
            assert result.prefill_tokens >= 1
            assert all(pair.price_seconds > 0 for pair in result.why.pairs)
        case NoCapacity():
            assert not any(w.role.decodes and not w.draining for w in workers)
