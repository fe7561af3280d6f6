from collections import Counter
from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.decisions.fair_queue import FairQueue, Waiting

STEP = 1000.0


def push(
    queue: FairQueue, name: str, tenant: str = "t", *, tokens: int = 1, most_owed: float = inf, **fields: Any
) -> int:
    its = Waiting(name, tenant, 1, tokens, **fields)
    place = queue.place(its, 0.0, STEP)
    queue.push(its, place, most_owed)
    return place


def names(queue: FairQueue) -> list[str]:
    return [queue.pop().name for _ in range(len(queue))]


def test_a_newcomer_passes_the_longer_ones_that_bear_it() -> None:
    queue = FairQueue()
    push(queue, "long", tokens=100, patience=25)
    assert push(queue, "short", tokens=10, patience=5) == 0
    assert push(queue, "shorter", tokens=5) == 0
    assert push(queue, "late", tokens=11) == 3
    assert names(queue) == ["shorter", "short", "long", "late"]
    assert queue.head() is None


def test_who_stands_behind_one_that_bears_no_more_waits_though_it_is_short() -> None:
    queue = FairQueue()
    push(queue, "first", tokens=100, patience=0)
    push(queue, "second", tokens=100, patience=100)
    assert push(queue, "short", tokens=10) == 1


def test_the_more_urgent_passes_though_it_is_longer() -> None:
    queue = FairQueue()
    push(queue, "patient", tokens=10, patience=1000, latest=60.0)
    push(queue, "none", tokens=10, patience=1000)
    assert push(queue, "urgent", tokens=500, latest=1.0, patience=9) == 0
    assert push(queue, "next", tokens=500, latest=1.0, patience=9) == 1
    assert push(queue, "too much", tokens=500, latest=1.0) == 4


def test_who_is_too_late_for_its_target_lets_those_pass_that_are_not_and_no_more_than_it_must() -> None:
    queue = FairQueue()
    push(queue, "late", tokens=10, latest=1.0)

    def come(name: str, latest: float) -> int:
        its = Waiting(name, "t", 1, 40, latest=latest)
        place = queue.place(its, 5.0, STEP, late_patience=100.0)
        queue.push(its, place)
        return place

    assert come("in time", 9.0) == 0
    assert come("late too", 4.0) == 2
    assert come("without a target", inf) == 3
    queue.remove("late too")
    queue.remove("without a target")
    assert come("second", 9.0) == 1
    assert come("third", 9.0) == 3, "100 tokens have nearly passed"


def test_a_step_of_priority_is_worth_its_tokens_and_lower_ones_pass_nobody() -> None:
    queue = FairQueue()
    push(queue, "normal", tokens=10)
    assert push(queue, "low", tokens=1, priority=-1) == 1
    assert push(queue, "high", tokens=900, priority=1) == 0
    assert push(queue, "again", tokens=900, priority=1) == 2, "one step is spent"
    assert push(queue, "higher", tokens=900, priority=2) == 0


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(-2, 2), st.booleans()), min_size=1, max_size=80))
def test_nobody_is_passed_by_more_than_its_patience_and_what_priorities_are_worth(
    arrivals: list[tuple[int, int, bool]],
) -> None:
    queue = FairQueue()
    came: dict[str, tuple[int, int, int]] = {}
    order: list[str] = []
    for number, (tokens, priority, serves) in enumerate(arrivals):
        push(queue, f"r{number}", tokens=tokens, patience=3 * tokens, priority=priority, latest=float(tokens % 7))
        came[f"r{number}"] = (number, tokens, priority)
        if serves:
            order.append(queue.pop().name)
    order += names(queue)
    for at, name in enumerate(order):
        number, tokens, priority = came[name]
        later = [came[other] for other in order[:at] if came[other][0] > number]
        most = max((other[2] for other in later), default=priority)
        assert sum(other[1] for other in later) <= 3 * tokens + (most - priority) * STEP
        assert all(other[2] >= priority for other in later)


@given(
    st.tuples(st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([1.0, 2.0])),
    st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    st.lists(st.integers(1, 1000), min_size=1, max_size=60),
)
def test_while_both_wait_neither_gets_ahead_of_its_share_by_more_than_a_prompt(
    weights: tuple[float, float], first: list[int], second: list[int]
) -> None:
    queue = FairQueue({"a": weights[0], "b": weights[1]})
    for tenant, lengths in (("a", first), ("b", second)):
        for number, tokens in enumerate(lengths):
            push(queue, f"{tenant}{number}", tenant, tokens=tokens)
    served: Counter[str] = Counter()
    while queue.num_of("a") and queue.num_of("b"):
        its = queue.pop()
        served[its.tenant] += its.num_tokens
        a, b = served["a"] / weights[0], served["b"] / weights[1]
        assert -max(second) / weights[1] <= a - b <= max(first) / weights[0]


def test_who_joins_late_starts_level_and_who_was_alone_owes_nothing() -> None:
    queue = FairQueue()
    for number in range(6):
        push(queue, f"a{number}", "a", tokens=100)
    assert [queue.pop().name for _ in range(3)] == ["a0", "a1", "a2"]
    for number in range(3):
        push(queue, f"b{number}", "b", tokens=100)
    assert [its[0] for its in names(queue)] == ["a", "b", "a", "b", "a", "b"]
    push(queue, "b", "b", tokens=1)
    push(queue, "a", "a", tokens=1)
    assert names(queue) == ["b", "a"]  # a new busy period: all accounts are closed


def test_who_leaves_for_a_moment_does_not_come_back_without_its_account() -> None:
    queue = FairQueue()
    push(queue, "a0", "a", tokens=1000)
    for number in range(3):
        push(queue, f"b{number}", "b", tokens=100)
    assert queue.pop().name == "a0"
    push(queue, "a1", "a", tokens=1000)
    assert names(queue) == ["b0", "b1", "b2", "a1"]


def test_generated_tokens_count_while_others_wait() -> None:
    queue = FairQueue()
    queue.charge("a", 10**9)  # nobody waits: nobody is wronged
    for tenant in "ab":
        push(queue, tenant, tenant)
    queue.charge("a", 10)
    assert names(queue) == ["b", "a"]


def test_a_tenant_whose_short_prompts_need_no_turn_has_one_for_its_long_prompt() -> None:
    """What was generated for them was owed for ever: while that went on faster than others were served, it starved."""
    queue = FairQueue()
    push(queue, "c", "c", tokens=100, most_owed=1000.0)
    queue.charge("a", 10**7)
    push(queue, "long", "a", tokens=100, most_owed=1000.0)
    turns = 0
    while (head := queue.head()) is not None and head.name != "long" and turns < 100:
        push(queue, f"c{turns}", "c", tokens=100, most_owed=1000.0)  # somebody of c waits all the time
        queue.pop()
        queue.charge("a", 500)
        turns += 1
    assert turns == 11, "what it owes at most, and no more"


def test_how_many_are_ahead_counts_the_own_and_the_others_turns() -> None:
    queue = FairQueue({"a": 1.0, "b": 2.0})
    for number in range(4):
        push(queue, f"a{number}", "a", tokens=7)
    assert (queue.num_ahead("a", 2), queue.tokens_ahead("a", 2)) == (2, 14)
    assert (queue.num_ahead("b", 0), queue.tokens_ahead("b", 0)) == (1, 0)
    for number in range(9):
        push(queue, f"b{number}", "b")
    assert queue.num_ahead("a", 2) == 2 + 6


def test_the_last_of_the_greediest_is_found_by_weight() -> None:
    queue = FairQueue({"big": 10.0})
    assert queue.last_of_the_greediest() is None
    for number in range(5):
        push(queue, f"big{number}", "big")
    push(queue, "s0", "small")
    push(queue, "s1", "small")
    last = queue.last_of_the_greediest()
    assert last is not None
    assert last.name == "s1"
    assert queue.remove("s1")
    assert not queue.remove("s1")
    last = queue.last_of_the_greediest()
    assert last is not None
    assert last.name == "s0"


def test_nothing_is_left_of_those_who_left() -> None:
    queue = FairQueue()
    push(queue, "stays")
    for number in range(100):
        push(queue, f"r{number}", f"t{number % 3}")
        queue.remove(f"r{number}")
    assert names(queue) == ["stays"]
    assert not queue._lines
    assert not queue._served
