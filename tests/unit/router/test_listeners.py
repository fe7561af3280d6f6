from headrace import wire
from headrace.values import RequestKey
from router.listeners import Listeners
from router.mailbox import Mailbox, Pacer
from tests.unit.router.mailboxes import box


class _Loop:
    def time(self) -> float:
        return 0.0


def mailbox(request_id: str, attempt: int = 1) -> Mailbox[list[object]]:
    made = box(Pacer(0.0, _Loop()))  # type: ignore[arg-type]
    made.key = RequestKey(request_id, attempt)
    return made  # type: ignore[return-value]


def test_each_sample_has_a_number_of_its_own() -> None:
    listeners, a, b = Listeners(), mailbox("a"), mailbox("b")
    first, second = listeners.add("a", 3, a), listeners.add("b", 1, b)
    found = [listeners.sample(number) for number in range(first, second + 1)]
    assert found == [(a, 0), (a, 1), (a, 2), (b, 0)]


def test_who_left_is_found_by_no_name_and_no_number_and_its_numbers_are_nobodys() -> None:
    listeners, a = Listeners(), mailbox("a")
    number = listeners.add("a", 2, a)
    assert listeners.remove("a") is a
    assert listeners.remove("a") is None
    again = listeners.add("a", 2, mailbox("a"))
    assert listeners.sample(number) is listeners.sample(number + 1) is None
    assert again > number + 1


def test_a_second_attempt_on_the_same_worker_takes_the_place_of_the_first() -> None:
    listeners, again = Listeners(), mailbox("a", attempt=2)
    number = listeners.add("a", 1, mailbox("a"))
    listeners.add("a", 1, again)
    assert listeners.sample(number) is None
    assert listeners.find(wire.key_to_pb(RequestKey("a", 1))) is None
    assert listeners.find(wire.key_to_pb(RequestKey("a", 2))) is again
    assert listeners.computed(wire.key_to_pb(RequestKey("a", 1))) is None
    again.key = RequestKey("a", 3)
    assert listeners.computed(wire.key_to_pb(RequestKey("a", 2))) is again
    assert listeners.computed(wire.key_to_pb(RequestKey("a", 4))) is None
    assert listeners.clear() == [again]
    assert len(listeners) == 0
