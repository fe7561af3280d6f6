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
    RequestCancelled,
    TransferFailed,
    WorkerLost,
)
from router.decisions.health import Health


def fail(health: Health, times: int, now: float = 0.0, error: HeadraceError | None = None) -> None:
    for _ in range(times):
        health.failed("w", error or InternalError("x"), now)


def test_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    health = Health(max_failures=3, eject_seconds=5)
    fail(health, 2)
    health.succeeded("w")
    fail(health, 2)
    assert health.ejected_until("w") == 0
    fail(health, 1, now=10)
    assert health.ejected_until("w") == 15


def test_after_its_time_one_more_failure_ejects_for_twice_as_long_and_one_success_forgives() -> None:
    health = Health(max_failures=3, eject_seconds=5, max_eject_seconds=12)
    fail(health, 3, now=0)
    fail(health, 5, now=1)  # what was in flight already
    assert health.ejected_until("w") == 5
    fail(health, 1, now=6)
    assert health.ejected_until("w") == 16
    fail(health, 1, now=20)
    assert health.ejected_until("w") == 32
    health.succeeded("w")
    fail(health, 2, now=40)
    assert health.ejected_until("w") == 0


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("x"),
        ContextLengthExceeded("x"),
        Overloaded("x"),
        Draining("x"),
        DeadlineExceeded("x"),
        RequestCancelled("x"),
    ],
)
def test_case_10_what_is_no_fault_of_the_worker_never_counts(error: HeadraceError) -> None:
    health = Health(max_failures=1)
    fail(health, 20, error=error)
    assert health.ejected_until("w") == 0


@pytest.mark.parametrize("error", [InternalError("x"), TransferFailed("x"), WorkerLost("x")])
def test_what_a_sound_worker_would_not_do_counts(error: HeadraceError) -> None:
    health = Health(max_failures=1)
    fail(health, 1, error=error)
    assert health.ejected_until("w") > 0


def test_a_new_generation_begins_without_a_record() -> None:
    health = Health(max_failures=1)
    fail(health, 1)
    health.forget("w")
    assert health.ejected_until("w") == 0


def test_two_that_fail_each_other_are_not_paired_for_a_while_though_both_are_sound() -> None:
    health = Health(max_failures=3, eject_seconds=5)
    for _ in range(3):
        health.peer_failed("d", "p", TransferFailed("x"), 0.0)
        health.served("e", "p", handed_off=True)
        health.served("d", "q", handed_off=True)
    assert (health.ejected_until("p"), health.ejected_until("d")) == (0, 0)
    assert (health.unlinked("d"), health.unlinked("e")) == ({"p": 5}, None)
    version = health.version
    health.peer_failed("d", "p", TransferFailed("x"), 6.0)
    assert health.unlinked("d") == {"p": 16}
    health.served("d", "p", handed_off=False)  # decode had the prompt: nothing passed between them
    assert health.unlinked("d") == {"p": 16}
    health.served("d", "p", handed_off=True)
    assert health.unlinked("d") is None
    assert health.version == version + 2
    for gone in ("d", "p"):
        for _ in range(3):
            health.peer_failed("d", "p", TransferFailed("x"), 20.0)
        health.forget(gone)
        assert health.unlinked("d") is None


def test_two_versions_that_refuse_each_other_are_not_paired_again_and_neither_has_failed() -> None:
    """While a deployment is rolled over, old prefill workers were ejected for old decode workers, too."""
    health = Health(max_failures=3, eject_seconds=5)
    for new in ("d1", "d2", "d3", "d4"):
        health.peer_failed(new, "p", IncompatiblePeer("cut"), 0.0)
        assert health.unlinked(new) == {"p": 5}
    assert health.ejected_until("p") == 0
    assert health.unlinked("d-old") is None
    health.peer_failed("d1", "p", IncompatiblePeer("cut"), 6.0)
    assert health.unlinked("d1") == {"p": 16}
    health.forget("p")
    assert health.unlinked("d1") is None
