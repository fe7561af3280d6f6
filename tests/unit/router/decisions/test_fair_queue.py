from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.decisions.fair_queue import FairQueue, Waiting


def waiting(name: str, tenant: str = "t", *, tokens: int = 1, due: float = 0.0) -> Waiting:
    return Waiting(name, tenant, 1, tokens, due)


def names(queue: FairQueue) -> list[str]:
    return [queue.pop().name for _ in range(len(queue))]


def test_within_a_tenant_the_earliest_due_is_first_and_equals_as_they_came() -> None:
    queue = FairQueue()
    for name, due in (("c", 3.0), ("a", 1.0), ("b", 1.0)):
        queue.push(waiting(name, due=due))
    assert queue.head() is not None
    assert names(queue) == ["a", "b", "c"]
    assert queue.head() is None


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
            queue.push(waiting(f"{tenant}{number}", tenant, tokens=tokens, due=float(number)))
    served: Counter[str] = Counter()
    while queue.num_of("a") and queue.num_of("b"):
        its = queue.pop()
        served[its.tenant] += its.num_tokens
        a, b = served["a"] / weights[0], served["b"] / weights[1]
        assert -max(second) / weights[1] <= a - b <= max(first) / weights[0]


def test_who_joins_late_starts_level_and_who_was_alone_owes_nothing() -> None:
    queue = FairQueue()
    for number in range(6):
        queue.push(waiting(f"a{number}", "a", tokens=100))
    assert [queue.pop().name for _ in range(3)] == ["a0", "a1", "a2"]
    for number in range(3):
        queue.push(waiting(f"b{number}", "b", tokens=100))
    assert [its[0] for its in names(queue)] == ["a", "b", "a", "b", "a", "b"]
    queue.push(waiting("b", "b", tokens=1))
    queue.push(waiting("a", "a", tokens=1))
    assert names(queue) == ["b", "a"]  # a new busy period: all accounts are closed


def test_who_leaves_for_a_moment_does_not_come_back_without_its_account() -> None:
    queue = FairQueue()
    queue.push(waiting("a0", "a", tokens=1000))
    for number in range(3):
        queue.push(waiting(f"b{number}", "b", tokens=100))
    assert queue.pop().name == "a0"
    queue.push(waiting("a1", "a", tokens=1000))
    assert names(queue) == ["b0", "b1", "b2", "a1"]


def test_generated_tokens_count_while_others_wait() -> None:
    queue = FairQueue()
    queue.charge("a", 10**9)  # nobody waits: nobody is wronged
    for tenant in "ab":
        queue.push(waiting(tenant, tenant))
    queue.charge("a", 10)
    assert names(queue) == ["b", "a"]


def test_how_many_are_ahead_counts_the_own_and_the_others_turns() -> None:
    queue = FairQueue({"a": 1.0, "b": 2.0})
    for number in range(4):
        queue.push(waiting(f"a{number}", "a", due=float(number)))
    assert queue.num_ahead("a", 1.5) == 2
    assert queue.num_ahead("b", 0.0) == 1
    for number in range(9):
        queue.push(waiting(f"b{number}", "b"))
    assert queue.num_ahead("a", 1.5) == 2 + 6


def test_the_last_of_the_greediest_is_found_by_weight() -> None:
    queue = FairQueue({"big": 10.0})
    assert queue.last_of_the_greediest() is None
    for number in range(5):
        queue.push(waiting(f"big{number}", "big"))
    queue.push(waiting("s0", "small", due=2.0))
    queue.push(waiting("s1", "small", due=1.0))
    last = queue.last_of_the_greediest()
    assert last is not None
    assert last.name == "s0"
    assert queue.remove("s0")
    assert not queue.remove("s0")
    last = queue.last_of_the_greediest()
    assert last is not None
    assert last.name == "s1"


def test_those_who_left_take_no_room_in_memory() -> None:
    queue = FairQueue()
    queue.push(waiting("stays", due=-9.0))
    for number in range(1000):
        queue.push(waiting(f"r{number}", due=float(-number)))
        queue.remove(f"r{number}")
    assert len(queue._heaps["t"]) < 100
    assert names(queue) == ["stays"]
    assert not queue._heaps
    assert not queue._served
