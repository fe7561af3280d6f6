"""Who waits, in order; who is passed too often is next, and two who are do not hold up each other."""

from headrace.blocks import BlockHasher
from headrace.values import Request, RequestKey, SamplingParams
from workers.scheduling.backlog import Backlog
from workers.scheduling.sequence import Kind, RequestState


def waiting(order: int, kind: Kind = Kind.LOCAL, priority: int = 0) -> RequestState:
    return RequestState(
        Request(RequestKey(f"r{order}"), (1,), SamplingParams(max_tokens=1), priority=priority),
        kind,
        order=order,
        now=0.0,
        hasher=BlockHasher(revision="r", kv_format="f", block_size=4),
        eos_token_ids=frozenset(),
        max_context_tokens=9,
    )


def filled(*states: RequestState, max_bypass: int = 2) -> Backlog:
    backlog = Backlog(max_bypass)
    for state in states:
        backlog.add(state)
    return backlog


def test_prompts_are_tried_by_priority_then_arrival() -> None:
    low, high, later = waiting(1), waiting(2, priority=1), waiting(3)
    backlog = filled(low, later, high, waiting(4, Kind.EXPECTED))
    assert list(backlog.candidates()) == [high, low, later]
    assert len(backlog) == 4


def test_who_was_passed_as_often_as_may_be_is_tried_first_and_nothing_starts_before() -> None:
    first, second, *others = (waiting(order) for order in range(1, 7))
    backlog = filled(first, second, *others)
    for passing in others[:2]:
        assert backlog.may_start(passing)
        backlog.started(passing)
    assert list(backlog.candidates()) == [first, second, *others[2:]]
    assert backlog.may_start(first)
    assert not backlog.may_start(second), "the older of two that starve goes first"
    assert not backlog.may_start(others[2])
    backlog.started(first)
    assert backlog.may_start(second)
    backlog.discard(second)
    assert backlog.may_start(others[2])


def test_an_expected_request_is_passed_only_once_it_asked() -> None:
    expected, silent = waiting(1, Kind.EXPECTED), waiting(2, Kind.EXPECTED)
    expected.asked = True
    backlog = filled(expected, silent, max_bypass=1)
    backlog.started(waiting(3))
    assert (expected.bypassed, silent.bypassed) == (1, 0)
    assert not backlog.may_start(waiting(4))


def test_who_starves_for_pins_holds_up_tickets_alone() -> None:
    ticket = waiting(1, Kind.TICKET)
    ticket.pin_blocked = True
    backlog = filled(ticket, max_bypass=1)
    backlog.started(waiting(2))
    assert backlog.may_start(waiting(3))
    assert not backlog.may_pin(waiting(3, Kind.TICKET))
    assert backlog.may_pin(ticket)
