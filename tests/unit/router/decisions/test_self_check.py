from dataclasses import replace

import pytest

from router.decisions.self_check import (
    AT_ONCE,
    LOOK_AGAIN_SECONDS,
    PATIENCE_SECONDS,
    RENEW_SECONDS,
    Checks,
    Evidence,
    Outcome,
    Reason,
    Result,
    Verdict,
    decode_result,
    encode_result,
    judge,
)

SOUND = Evidence(96, 0, shown=True, advanced=True, promised=96, second_cached=96, held=True)
PASSED = Verdict(Outcome.PASSED)
FAILED = Verdict(Outcome.FAILED, Reason.KEYS)
UNDECIDED = Verdict(Outcome.UNDECIDED, Reason.REFUSED)


def ready(worker: str, patient: bool) -> bool:
    return True


def test_a_worker_that_finds_what_the_mirror_promised_passes() -> None:
    assert judge(SOUND) == PASSED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"first_cached": 32}, Reason.COLD_HIT),
        ({"shown": False, "promised": 0}, Reason.KEYS),
        ({"second_cached": 0}, Reason.CACHED_TOKENS),
        ({"second_cached": 64}, Reason.CACHED_TOKENS),
        ({"second_cached": 97}, Reason.CACHED_TOKENS),
    ],
)
def test_whoever_says_other_than_it_holds_fails(changes: dict[str, int], reason: Reason) -> None:
    assert judge(replace(SOUND, **changes)) == Verdict(Outcome.FAILED, reason)


def test_a_worker_that_keeps_no_prefix_and_says_so_is_sound() -> None:
    silent = replace(SOUND, shown=False, advanced=False, promised=0, held=False)
    assert judge(replace(silent, second_cached=0)) == Verdict(Outcome.UNCACHED)
    assert judge(silent) == Verdict(Outcome.UNDECIDED, Reason.UNPUBLISHED)


def test_what_was_evicted_meanwhile_proves_nothing() -> None:
    evicted = Verdict(Outcome.UNDECIDED, Reason.EVICTED)
    assert judge(replace(SOUND, second_cached=32, held=False)) == evicted
    assert judge(replace(SOUND, promised=64, second_cached=64)) == evicted
    assert judge(replace(SOUND, shown=False, promised=0, second_cached=0, held=False)) == evicted, "before it was seen"


def test_each_generation_is_checked_once_and_a_result_is_looked_after_later() -> None:
    checks = Checks()
    assert checks.met("a", 1, 0.0)
    assert list(checks.begin(0.0, ready)) == [("a", 1, 1)]
    assert not checks.met("a", 1, 0.1)
    assert not list(checks.begin(0.1, ready))
    assert checks.ended("a", Result(1, 1, PASSED), 1.0)
    assert not checks.met("a", 1, 1.0)
    assert checks.next_due(1.0) == 1.0 + RENEW_SECONDS
    assert checks.met("a", 2, 2.0), "it started anew"
    assert list(checks.begin(2.0, ready)) == [("a", 2, 1)]
    assert not checks.ended("a", Result(1, 2, FAILED), 3.0), "that was of its last life"
    assert checks.verdict("a") is None


@pytest.mark.parametrize("verdict", [FAILED, UNDECIDED])
def test_after_a_failure_it_is_tried_again_ever_more_seldom(verdict: Verdict) -> None:
    checks, now, pauses = Checks(5.0, 60.0), 0.0, []
    checks.met("a", 1, now)
    for attempt in range(1, 7):
        assert list(checks.begin(now, ready)) == [("a", 1, attempt)]
        checks.ended("a", Result(1, attempt, verdict), now)
        due = checks.next_due(now)
        assert due is not None
        assert not checks.met("a", 1, due - 0.1)
        assert not list(checks.begin(due - 0.1, ready))
        assert checks.met("a", 1, due)
        pauses.append(due - now)
        now = due
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    checks.ended("a", Result(1, 2000, verdict), now)
    assert checks.next_due(now) == now + 60.0


def test_a_busy_worker_is_spared_for_a_while() -> None:
    checks = Checks()
    checks.met("a", 1, 0.0)
    assert not list(checks.begin(0.0, lambda worker, patient: not patient))
    assert checks.next_due(0.0) is None, "its next report will say"
    assert list(checks.begin(PATIENCE_SECONDS, lambda worker, patient: not patient))


def test_few_are_checked_at_once() -> None:
    checks = Checks()
    for number in range(3 * AT_ONCE):
        checks.met(f"w{number}", 1, 0.0)
    assert len(list(checks.begin(0.0, ready))) == AT_ONCE
    checks.ended("w0", Result(1, 1, PASSED), 1.0)
    assert [worker for worker, _, _ in checks.begin(1.0, ready)] == [f"w{AT_ONCE}"]


def test_what_another_router_checks_is_looked_for_and_taken_over() -> None:
    checks = Checks()
    checks.met("a", 1, 0.0)
    assert list(checks.begin(0.0, ready))
    checks.taken("a", 1, 0.0)
    assert not list(checks.begin(LOOK_AGAIN_SECONDS - 0.1, ready))
    assert list(checks.begin(LOOK_AGAIN_SECONDS, ready)) == [("a", 1, 1)]
    assert not checks.news("a", Result(2, 1, FAILED))
    assert checks.news("a", Result(1, 1, FAILED))
    checks.ended("a", Result(1, 1, FAILED), 2.0)
    assert not checks.news("a", Result(1, 1, FAILED)), "it is this router's turn to check again"
    assert checks.news("a", Result(1, 2, FAILED))
    assert checks.news("a", Result(1, 1, PASSED))


def test_a_result_survives_its_coding_and_foreign_ones_are_none() -> None:
    for verdict in (PASSED, FAILED, UNDECIDED):
        result = Result(7, 3, verdict, "r1")
        assert decode_result(encode_result(result)) == result
    for raw in (None, b"", b"[]", b"{}", b"\xff", encode_result(Result(1, 1, PASSED)).replace("passed", "fine")):
        assert decode_result(raw) is None
    assert str(FAILED) == "failed: keys"
    assert str(PASSED) == "passed"
