"""Who is called when: prompts of all lengths, targets and tenants in one queue."""

import heapq
from collections.abc import Iterable

import pytest

from headrace.costmodel import CostModel
from router.decisions.admission import (
    BYPASS_RATIO,
    Admission,
    Admitted,
    Entrant,
    Queued,
    Rules,
)
from router.decisions.room import WORKER_BACKLOG
from router.decisions.tenants import Targets, Tenant
from tests.unit.router.decisions.admitting import FULL, ONE_FREE, TOKEN_SECONDS, bounded, offer, view

LONG, SHORT = 8192, 64


def served(
    admission: Admission, arrivals: Iterable[tuple[float, Entrant]], until: float
) -> tuple[dict[str, float], list[str]]:
    """One server behind the real queue, that computes a prompt at a time, TOKEN_SECONDS a token: when each one's turn came,
    counted from its arrival, and in which order."""
    came: dict[str, tuple[float, Entrant]] = {}
    waits: dict[str, float] = {}
    order: list[str] = []
    events = [(at, number, entrant) for number, (at, entrant) in enumerate(arrivals)]
    heapq.heapify(events)
    running: str | None = None

    def begin(name: str, now: float) -> None:
        nonlocal running
        at, entrant = came[name]
        waits[name], running = now - at, name
        order.append(name)
        heapq.heappush(events, (now + entrant.num_prompt_tokens * TOKEN_SECONDS, -1, entrant))

    while events and events[0][0] <= until:
        now, number, entrant = heapq.heappop(events)
        if number < 0:
            admission.ended(entrant, 0, ran=True)
            running = None
            for name in admission.admit(ONE_FREE, now):
                begin(name, now)
            continue
        came[entrant.name] = (now, entrant)
        decision = admission.offer(entrant, FULL if running else ONE_FREE, now)
        if isinstance(decision, Admitted):
            begin(entrant.name, now)
    return waits, order


def flow(name: str, tokens: int, load: float, seconds: float, *, start: float = 0.0) -> list[tuple[float, Entrant]]:
    """Prompts that arrive evenly, at `load` times what the server computes."""
    gap = tokens * TOKEN_SECONDS / load
    return [(start + at * gap, Entrant(f"{name}{at}", tokens)) for at in range(int(seconds / gap))]


@pytest.mark.parametrize("load", [0.9, 1.2, 3.0])
def test_one_8k_prompt_among_endless_short_ones_meets_its_bound(load: float) -> None:
    """What stood before it when it came, and ten times its own tokens: however many short ones come after it."""
    arrivals = [*flow("short", SHORT, load, 40.0), (10.0, Entrant("long", LONG))]
    waits, order = served(bounded(100_000), sorted(arrivals, key=lambda each: each[0]), 200.0)
    stood_before = max(load - 1, 0) * 10.0
    assert waits["long"] <= stood_before + BYPASS_RATIO * LONG * TOKEN_SECONDS + 2 * SHORT * TOKEN_SECONDS
    passed = [name for name in order[: order.index("long")] if int(name[5:]) * SHORT * TOKEN_SECONDS / load > 10.0]
    assert load < 1 or len(passed) in (1279, 1280), "short ones go before it while they may"


@pytest.mark.parametrize("load", [0.9, 1.2, 3.0])
def test_one_short_prompt_among_endless_8k_ones_meets_its_bound(load: float) -> None:
    """It waits for the one that runs, however many wait."""
    arrivals = [*flow("long", LONG, load, 60.0), (30.0, Entrant("short", SHORT)), (31.0, Entrant("other", SHORT))]
    waits, _ = served(bounded(100_000), sorted(arrivals, key=lambda each: each[0]), 200.0)
    assert max(waits["short"], waits["other"]) <= LONG * TOKEN_SECONDS + SHORT * TOKEN_SECONDS
    assert waits["long40"] > 5 * LONG * TOKEN_SECONDS or load < 2


def test_no_prompt_lets_pass_more_than_is_computed_in_the_time_of_the_rules() -> None:
    admission, passing = Admission(Rules(99, max_bypass_seconds=3.0)), int(1.4 / TOKEN_SECONDS)
    offer(admission, "huge", FULL, num_prompt_tokens=10_000_000)
    for name in ("a", "b", "c"):
        offer(admission, name, FULL, num_prompt_tokens=passing)
    assert admission.admit(view(0), 0.0) == ["a", "b", "huge", "c"]


def test_targets_order_a_queue_by_the_time_that_they_leave() -> None:
    """The strict class goes before the patient one though it is longer; of two of one class the shorter, while the longer
    has time; and none passes one that would miss its target by it."""
    admission, strict = bounded(99), Targets(ttft_seconds=2.0)
    offer(admission, "patient", FULL, targets=Targets(ttft_seconds=60.0), num_prompt_tokens=100)
    offer(admission, "long", FULL, targets=strict, num_prompt_tokens=9000)
    offer(admission, "short", FULL, targets=strict, num_prompt_tokens=4000)
    offer(admission, "tight", FULL, targets=strict, num_prompt_tokens=8000)
    assert admission.admit(view(0), 0.0) == ["short", "long", "tight", "patient"]


def test_who_has_missed_its_target_already_waits_like_one_without() -> None:
    admission, target = bounded(99), Targets(ttft_seconds=0.5)
    offer(admission, "hopeless", FULL, targets=target, num_prompt_tokens=9000)
    assert offer(admission, "short", FULL, targets=target, num_prompt_tokens=100) == Queued(0)


def test_a_fit_by_which_tokens_cost_nothing_orders_as_any_other() -> None:
    """Where steps are short the fit finds all of their time in the base."""
    full = view(4 + WORKER_BACKLOG, cost=CostModel(prefill_token_seconds=0.0))
    admission = bounded(9)
    for name, tokens in (("long", 1000), ("short", 10)):
        assert isinstance(offer(admission, name, full, num_prompt_tokens=tokens, targets=Targets(2.0)), Queued)
    assert admission.admit(view(0), 0.0) == ["short", "long"]


def test_two_who_always_wait_get_their_weights_share_of_the_tokens_whatever_their_lengths() -> None:
    admission = bounded(100_000, Tenant("a", weight=1.0), Tenant("b", weight=3.0))
    arrivals = [
        (0.0, Entrant(f"{tenant}{at}", tokens, tenant=tenant))
        for tenant, tokens in (("a", LONG), ("b", SHORT))
        for at in range(int(400_000 / tokens))
    ]
    waits, order = served(admission, arrivals, 40.0)
    tokens = {"a": LONG, "b": SHORT}
    first = order[: max(at for at, name in enumerate(order) if name[0] == "a" and at < len(order) // 2)]
    shares = {tenant: sum(tokens[tenant] for name in first if name[0] == tenant) for tenant in "ab"}
    assert abs(shares["b"] / 3 - shares["a"]) <= LONG + SHORT
    assert len(waits) > 100
