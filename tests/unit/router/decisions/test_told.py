from headrace.values import Load
from router.decisions.told import FEW_ENDS, MAX_OF_A_WORKER, Brought, Told, ToldLoads

LOAD = Brought("d", 100, 60, 1)


def told(name: str, seconds: float = 5.0) -> Told:
    return Told(name, "p", (), seconds, LOAD)


def test_of_more_than_is_kept_of_a_worker_the_oldest_give_way() -> None:
    loads = ToldLoads()
    for number in range(2 * MAX_OF_A_WORKER):
        loads.hear(told(str(number)), LOAD, number)
    assert loads.of("p").num_waiting == loads.of("d").num_waiting == MAX_OF_A_WORKER
    loads.reported("p", 1.5 * MAX_OF_A_WORKER)
    assert loads.of("p").num_waiting == MAX_OF_A_WORKER // 2, "those that were heard since"
    loads.forget("d")
    assert loads.of("d") == Load()


def test_what_no_worker_reports_is_believed_for_as_long_as_it_was_said() -> None:
    loads = ToldLoads()
    loads.hear(told("short", 1.0), LOAD, 0.0)
    loads.hear(told("long", 9.0), LOAD, 0.0)
    loads.drain_changed()
    loads.expire(1.0)
    assert loads.drain_changed() == {"p", "d"}
    assert (loads.of("p").waiting_prefill_tokens, loads.of("d").claimed_tokens) == (60, 100)
    loads.reported("p", 2.0)
    loads.expire(9.0)
    assert loads.of("p") == loads.of("d") == Load()


def test_what_was_reported_is_not_kept_until_it_would_have_ended() -> None:
    """At a thousand placements a second, each said to take ten minutes, 600,000 ends of nothing were kept."""
    loads = ToldLoads()
    loads.hear(told("waits", 9.0), LOAD, 0.0)
    for number in range(1, 5000):
        loads.hear(told(str(number), 600.0), LOAD, number / 1000)
        loads.reported("p", number / 1000 + 1)
        loads.reported("d", number / 1000 + 1)
    assert len(loads._ends) <= FEW_ENDS + 4
    loads.hear(told("last", 9.0), LOAD, 5.0)
    loads.expire(14.0)
    assert loads.of("p") == loads.of("d") == Load(), "what is left still ends at its time"
