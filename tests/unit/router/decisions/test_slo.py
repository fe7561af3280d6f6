from headrace.values import Load
from router.decisions.placement import Ask, Pair, Placed, place
from router.decisions.slo import TTFT_MARGIN, costed
from router.decisions.view import View
from tests.unit.router.decisions.test_placement import ASK, d, p, placed


def pair(name: str, *, ttft: float, tpot: float = 0.01, wait: float = 0.0, stall: float = 0.0) -> Pair:
    return Pair(name, None, ttft, 0.0, tpot, stall, ttft + 100 * tpot + stall, 0, wait)


def best(pairs: list[Pair], ttft: float | None, tpot: float | None) -> tuple[str, str]:
    costs, verdict = costed(pairs, ttft, tpot, 100)
    return min(costs, key=lambda each: each[0])[1].decode, verdict


def test_without_targets_the_price_decides() -> None:
    assert best([pair("a", ttft=2.0), pair("b", ttft=1.0)], None, None) == ("b", "")


def test_the_cheapest_of_those_that_meet_both_targets() -> None:
    late = pair("late", ttft=0.7, tpot=0.001)
    slow = pair("slow", ttft=0.1, tpot=0.03)
    good = pair("good", ttft=0.5, tpot=0.02)
    assert best([late, slow, good], 1.0, 0.02) == ("good", "met")
    assert late.ttft_seconds > TTFT_MARGIN


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
    assert best([late, slow], 1.0, 0.02) == ("late", "missed")  # 1 s late against 100 × 0.03 s slow
    assert best([late, slow], -5.0, 0.1)[0] == "slow"  # missed already: the sooner the better
    assert best([late, pair("stalls", ttft=1.4, stall=1.0)], 1.0, None)[0] == "late"


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
