from headrace.errors import InvalidRequest, NoWorkers, Overloaded
from headrace.values import Load, Role
from router.decisions.admission import WORKER_BACKLOG, Admission, Admitted, Queued, Shed, free_slots
from router.decisions.view import View, WorkerView
from tests.null_worker import worker_info


def view(*running: int, role: Role = Role.UNIFIED, max_num_seqs: int = 4, draining: bool = False) -> View:
    """A worker for each number of sequences that it runs."""
    return View(
        tuple(
            WorkerView(
                info := worker_info(f"w{at}", role, max_num_seqs=max_num_seqs),
                role,
                Load(num_running=number),
                info.cost,
                100,
                draining,
            )
            for at, number in enumerate(running)
        )
    )


FULL = view(4 + WORKER_BACKLOG)


def offer(admission: Admission, name: str, at: View, *, n: int = 1, priority: int = 0, now: float = 0.0) -> object:
    return admission.offer(name, num_sequences=n, priority=priority, view=at, now=now)


def test_room_is_what_decoding_workers_run_and_a_little_more() -> None:
    assert free_slots(view(0, 3)) == 4 + 1 + 2 * WORKER_BACKLOG
    assert free_slots(view(500)) == 0
    assert free_slots(view(0, role=Role.PREFILL)) == 0
    assert free_slots(view(0, draining=True)) == 0


def test_nobody_who_decodes_is_refused_at_once() -> None:
    for nobody in (view(), view(0, role=Role.PREFILL), view(0, draining=True)):
        decision = offer(Admission(4), "a", nobody)
        assert isinstance(decision, Shed)
        assert decision.reason == "no_workers"
        assert isinstance(decision.error, NoWorkers)


def test_admitted_while_there_is_room_counting_what_is_admitted_and_not_placed_yet() -> None:
    admission = Admission(4)
    at = view(4 + WORKER_BACKLOG - 2)
    assert offer(admission, "a", at) == Admitted()
    assert offer(admission, "b", at) == Admitted()
    assert offer(admission, "c", at) == Queued(0)
    admission.begun(1)
    assert admission.admit(at, 0.0) == ["c"]


def test_more_samples_than_any_worker_runs_hold_up_nobody() -> None:
    admission, busy = Admission(4), view(4)
    decision = offer(admission, "a", busy, n=4 + WORKER_BACKLOG + 1)
    assert isinstance(decision, Shed)
    assert isinstance(decision.error, InvalidRequest)
    assert decision.error.field == "n"
    assert isinstance(offer(admission, "b", busy, n=5), Shed)
    assert offer(admission, "c", busy) == Admitted()


def test_higher_priority_first_and_first_come_first_served_within_it() -> None:
    admission = Admission(9)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        offer(admission, name, FULL, priority=priority)
    assert offer(admission, "e", FULL, priority=1) == Queued(2)
    order = []
    for _ in range(5):
        order += admission.admit(view(4 + WORKER_BACKLOG - 1), 0.0)
        admission.begun(1)
    assert order == ["b", "d", "e", "a", "c"]
    assert len(admission) == 0


def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    admission = Admission(9)
    offer(admission, "a", FULL)
    assert isinstance(offer(admission, "b", view(0)), Queued)
    assert admission.admit(view(0), 0.0) == ["a", "b"]


def test_case_54_beyond_the_cap_requests_are_shed_with_the_numbers_and_a_time() -> None:
    admission = Admission(2)
    offer(admission, "a", FULL)
    offer(admission, "b", FULL)
    decision = offer(admission, "c", FULL)
    assert isinstance(decision, Shed)
    assert isinstance(decision.error, Overloaded)
    assert decision.error.numbers == {"limit": "2", "actual": "2"}
    assert decision.error.retry_after_seconds == decision.retry_after_seconds == 1.0


def test_retry_after_is_how_long_the_queue_takes_at_the_pace_of_late() -> None:
    admission = Admission(8)
    for at in range(5):
        assert offer(admission, f"r{at}", view(0), now=10.0 * at) == Admitted()
        admission.begun(1)
    for at in range(8):
        offer(admission, f"q{at}", FULL, now=50.0)
    decision = offer(admission, "late", FULL, now=50.0)
    assert isinstance(decision, Shed)
    assert decision.retry_after_seconds == 60.0
    assert decision.retry_after_seconds >= 1.0


def test_many_samples_run_when_they_fit_or_when_nothing_else_does() -> None:
    """Those who waited for a larger worker, which has left since: they, too, do not wait for ever."""
    admission, n = Admission(8), 4 + WORKER_BACKLOG + 1
    assert isinstance(offer(admission, "big", view(n - 1, max_num_seqs=n), n=n), Queued)
    offer(admission, "small", view(1))
    assert admission.admit(view(1), 0.0) == []  # and the small one does not pass it for ever
    assert admission.admit(view(0), 0.0)[0] == "big"


def test_whoever_leaves_is_not_called_and_who_was_called_has_left() -> None:
    admission = Admission(8)
    offer(admission, "a", FULL)
    offer(admission, "b", FULL)
    assert admission.leave("a")
    assert not admission.leave("a")
    assert admission.admit(view(0), 0.0) == ["b"]
    assert not admission.leave("b")


def test_those_who_left_take_no_room_in_memory() -> None:
    admission = Admission(2)
    offer(admission, "stays", FULL, priority=9)
    for at in range(1000):
        offer(admission, f"r{at}", FULL)
        admission.leave(f"r{at}")
    assert len(admission._heap) < 100
    assert admission.admit(view(0), 0.0) == ["stays"]
