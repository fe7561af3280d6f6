"""What all ranks were asked, without ranks."""

import pytest

from headrace.errors import InternalError, LinkClosed, WorkerLost
from workers.ranks.answers import Answers
from workers.ranks.messages import Stepped
from workers.scheduling.plan import StepResult

RESULT = StepResult(1, (7,))


def two_ranks() -> Answers:
    return Answers(frozenset({0, 1}), 2)


def test_a_step_is_done_when_every_rank_has_done_it_and_took_as_long_as_the_slowest() -> None:
    answers = two_ranks()
    future = answers.begin_step(1, 0.0)
    answers.stepped(0, Stepped(1, RESULT, 0.5, ahead_seconds=-0.1), 1.0)
    assert not future.done()
    answers.stepped(1, Stepped(1, None, 2.0, ahead_seconds=0.3), 1.0)
    assert future.result().seconds == 2.0
    assert future.result().ahead_seconds == -0.1, "on the rank that launched it last"


def test_a_step_more_in_flight_than_may_be_is_refused_until_one_is_done() -> None:
    answers = two_ranks()
    for number in (1, 2):
        answers.begin_step(number, 0.0)
    with pytest.raises(ValueError, match="at most 2 steps"):
        answers.begin_step(3, 0.0)
    for rank in (0, 1):
        answers.stepped(rank, Stepped(1, RESULT, 0.5), 1.0)
    answers.begin_step(3, 1.0)


def test_a_step_that_nobody_has_a_result_of_is_an_error_for_the_worker_and_for_who_waits() -> None:
    answers = two_ranks()
    future = answers.begin_step(1, 0.0)
    answers.stepped(0, Stepped(1, None, 0.5), 1.0)
    with pytest.raises(InternalError, match="plan 1"):
        answers.stepped(1, Stepped(1, None, 0.5), 1.0)
    assert isinstance(future.exception(), WorkerLost)


def test_a_task_is_over_when_every_rank_has_said_its_part_and_an_error_of_one_is_its_outcome() -> None:
    """A pull that counted as over with the first rank would free blocks that the second still writes."""
    answers = two_ranks()
    task, future = answers.begin_task(sorted)
    answers.answered(1, task, "b")
    assert not future.done()
    answers.answered(0, task, "a")
    assert future.result(0) == ["a", "b"]

    def refuse(parts: list[str]) -> None:
        raise LinkClosed(f"of {len(parts)}")

    task, failing = answers.begin_task(refuse)
    for rank in (0, 1):
        answers.answered(rank, task, "part")
    with pytest.raises(LinkClosed, match="of 2"):
        failing.result(0)


def test_the_first_step_after_an_idle_hour_is_not_late() -> None:
    answers = two_ranks()
    assert answers.late_step(3600.0, 60.0) is None
    answers.begin_step(1, 3600.0)
    assert answers.late_step(3660.0, 60.0) is None
    answers.begin_step(2, 3660.0)
    assert answers.late_step(3661.0, 60.0) == (1, {0, 1})
    answers.stepped(0, Stepped(1, RESULT, 0.5), 3661.0)
    assert answers.late_step(3661.0, 60.0) == (1, {1})
    answers.stepped(1, Stepped(1, None, 0.5), 3661.0)
    assert answers.late_step(3662.0, 60.0) is None


def test_a_loss_answers_what_waits_and_all_that_is_asked_later_with_its_first_reason() -> None:
    answers = two_ranks()
    _, waiting = answers.begin_task(list)
    assert answers.lose(WorkerLost("rank 1 is gone"))
    assert not answers.lose(WorkerLost("closed"))
    _, later = answers.begin_task(list)
    for future in (waiting, later, answers.begin_step(1, 0.0), answers.started):
        with pytest.raises(WorkerLost, match="rank 1 is gone"):
            future.result(0)
