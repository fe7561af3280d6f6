from hypothesis import given
from hypothesis import strategies as st

from headrace.values import Load
from router.decisions.ledger import LIFE_TOKENS, Beside, Ledger


def test_a_pair_weighs_on_both_workers_until_the_first_token_and_then_on_decode_alone() -> None:
    ledger = Ledger()
    ledger.open("r", decode="d", prefill="p", num_prompt_tokens=100, prefill_tokens=60, n=2)
    assert ledger.own("p") == Load(num_waiting=1, waiting_prefill_tokens=60)
    assert ledger.own("d") == Load(num_waiting=2, claimed_tokens=100)
    ledger.first_token("r")
    ledger.first_token("r")
    assert ledger.own("p") == Load()
    assert ledger.own("d") == Load(num_running=2, context_tokens=100)
    ledger.grew("r", 64)
    assert ledger.own("d").context_tokens == 164
    ledger.close("r")
    ledger.close("r")
    assert ledger.own("d") == Load()
    assert len(ledger) == 0


def test_alone_the_decode_worker_has_the_prompt_to_compute() -> None:
    ledger = Ledger()
    ledger.open("r", decode="d", prefill=None, num_prompt_tokens=100, prefill_tokens=100, n=1)
    assert ledger.own("d") == Load(num_waiting=1, waiting_prefill_tokens=100, claimed_tokens=100)


def test_a_request_that_is_placed_again_moves() -> None:
    ledger = Ledger()
    ledger.open("r", decode="d", prefill="p", num_prompt_tokens=10, prefill_tokens=10, n=1)
    ledger.first_token("r")
    ledger.open("r", decode="e", prefill=None, num_prompt_tokens=10, prefill_tokens=4, n=1)
    assert [ledger.own(worker) for worker in "dp"] == [Load(), Load()]
    assert ledger.own("e").waiting_prefill_tokens == 4


def test_growth_of_what_is_unknown_or_waits_counts_nothing() -> None:
    ledger = Ledger()
    ledger.grew("nobody", 5)
    ledger.first_token("nobody")
    ledger.open("r", decode="d", prefill=None, num_prompt_tokens=10, prefill_tokens=10, n=1)
    ledger.grew("r", 5)
    assert ledger.own("d").context_tokens == 0


def test_what_is_computed_beside_streams_is_what_comes_in_a_mean_life() -> None:
    ledger = Ledger()
    for number, prefill in enumerate(("p", None, None)):
        ledger.open(f"{number}", decode="d", prefill=prefill, num_prompt_tokens=90, prefill_tokens=60, n=1)
        assert ledger.beside("d") == Beside(), "what waits has met nobody yet"
    for number in range(3):
        ledger.first_token(f"{number}")
    assert ledger.beside("d") == Beside(120 / LIFE_TOKENS / 3, LIFE_TOKENS)
    ledger.grew("1", 600)
    assert ledger.beside("d") == Beside(120 / 200 / 3, 200.0), "they turned out longer"
    ledger.close("1")
    ledger.close("2")
    assert ledger.beside("d") == Beside()


STEPS = st.tuples(st.integers(0, 5), st.sampled_from(["open", "first", "grew", "close"]), st.sampled_from("ab"))


@given(st.lists(STEPS))
def test_when_all_are_closed_nothing_is_left(steps: list[tuple[int, str, str]]) -> None:
    ledger = Ledger()
    for number, step, worker in steps:
        match step:
            case "open":
                prefill = None if number % 2 else "p"
                ledger.open(str(number), decode=worker, prefill=prefill, num_prompt_tokens=9, prefill_tokens=5, n=2)
            case "first":
                ledger.first_token(str(number))
            case "grew":
                ledger.grew(str(number), 3)
            case "close":
                ledger.close(str(number))
        assert all(value >= 0 for name in "abp" for value in vars_of(ledger.own(name)))
    for number in range(6):
        ledger.close(str(number))
    assert all(ledger.own(name) == Load() for name in "abp")
    assert not ledger._sums


def vars_of(load: Load) -> list[int]:
    return [load.num_waiting, load.num_running, load.waiting_prefill_tokens, load.context_tokens, load.claimed_tokens]
