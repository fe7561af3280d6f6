import pytest

from headrace.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    HeadraceError,
    IncompatiblePeer,
    InternalError,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    WorkerLost,
)
from headrace.values import Load, RequestKey, Role
from router.decisions.placement import Ask, Placed, place
from router.decisions.retry import (
    MAX_ATTEMPTS,
    End,
    PlaceAgain,
    PrefillAgain,
    Progress,
    after_peer_lost,
    after_rejection,
    with_last_resort,
)
from router.decisions.view import View, WorkerView
from tests.null_worker import worker_info


def progress(*, attempt: int = 1, num_tokens: int = 0, excluded: frozenset[str] = frozenset()) -> Progress:
    return Progress(RequestKey("r", attempt), "d", num_tokens, excluded)


@pytest.mark.parametrize("error", [WorkerLost("x"), Overloaded("x"), TransferFailed("x")])
def test_before_the_first_token_a_request_begins_anew_elsewhere(error: HeadraceError) -> None:
    again = after_rejection(progress(excluded=frozenset({"c"})), error)
    assert again == PlaceAgain(RequestKey("r", 2), frozenset({"c", "d"}))


def test_after_tokens_it_ends_with_the_error_and_never_a_finish() -> None:
    error = WorkerLost("x")
    assert after_rejection(progress(num_tokens=1), error) == End(error)


@pytest.mark.parametrize(
    "error", [InvalidRequest("x"), ContextLengthExceeded("x"), DeadlineExceeded("x"), InternalError("x")]
)
def test_what_would_fail_again_is_not_tried_again(error: HeadraceError) -> None:
    assert after_rejection(progress(), error) == End(error)


def test_attempts_are_bounded() -> None:
    error = WorkerLost("x")
    assert after_rejection(progress(attempt=MAX_ATTEMPTS), error) == End(error)
    assert after_peer_lost(progress(attempt=2 * MAX_ATTEMPTS), "p", error) == End(error)


def test_a_lost_peer_is_replaced_also_after_tokens_since_decode_kept_them() -> None:
    again = after_peer_lost(progress(num_tokens=7, excluded=frozenset({"p1"})), "p2", TransferFailed("x"))
    assert again == PrefillAgain(RequestKey("r", 2), frozenset({"p1", "p2"}))


@pytest.mark.parametrize(
    "error",
    [
        TransferFailed("x"),
        Overloaded("x"),
        Draining("x"),
        InvalidRequest("x"),
        IncompatiblePeer("x"),
        InternalError("x"),
    ],
)
def test_what_one_prefill_worker_cannot_do_another_may(error: HeadraceError) -> None:
    assert after_peer_lost(progress(), "p", error) == PrefillAgain(RequestKey("r", 2), frozenset({"p"}))


def test_a_deadline_has_passed_for_every_prefill_worker() -> None:
    error = DeadlineExceeded("x")
    assert after_peer_lost(progress(), "p", error) == End(error)


def test_at_last_decode_prefills_alone() -> None:
    infos = (worker_info("p", Role.PREFILL), worker_info("d", Role.DECODE))
    views = [WorkerView(info, info.role, Load(), info.cost, 100) for info in infos]
    placed = place(Ask(100, 10), View(tuple(views)), 0.0)
    assert isinstance(placed, Placed)
    assert placed.prefill is not None
    assert with_last_resort(placed, MAX_ATTEMPTS - 1) is placed
    assert with_last_resort(placed, MAX_ATTEMPTS).prefill is None
