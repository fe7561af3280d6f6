from hypothesis import given
from hypothesis import strategies as st

from router.decisions.overlay import Overlay


def expected(overlay: Overlay, worker: str = "a") -> set[int]:
    return set(overlay.expecting.get(worker, ()))


def test_an_entry_ends_block_by_block_as_events_confirm_it() -> None:
    overlay = Overlay()
    overlay.expect("r", "a", (1, 2, 3), capacity=10, expires=5.0)
    overlay.confirm("a", (1, 9))
    overlay.confirm("b", (2,))
    assert expected(overlay) == {2, 3}
    overlay.confirm("a", (2, 3))
    overlay.withdraw("r")
    assert (expected(overlay), overlay.num_blocks) == (set(), 0)


def test_an_entry_ends_with_its_request_and_leaves_what_another_expects_too() -> None:
    overlay = Overlay()
    overlay.expect("r", "a", (1, 2), capacity=10, expires=5.0)
    overlay.expect("s", "a", (1, 3), capacity=10, expires=5.0)
    overlay.withdraw("r")
    overlay.withdraw("r")
    assert expected(overlay) == {1, 3}


def test_an_entry_ends_at_its_time_and_sooner_once_its_prompt_is_computed() -> None:
    overlay = Overlay()
    overlay.expect("r", "a", (1,), capacity=10, expires=5.0)
    overlay.expect("s", "a", (2,), capacity=10, expires=9.0)
    overlay.expire(4.9)
    assert expected(overlay) == {1, 2}
    overlay.settle("s", 6.0)
    overlay.expire(5.0)
    assert expected(overlay) == {2}
    overlay.expire(6.0)
    assert (expected(overlay), overlay.num_blocks) == (set(), 0)


def test_a_worker_that_lost_its_cache_holds_nothing_to_come() -> None:
    overlay = Overlay()
    for worker in ("a", "b"):
        overlay.expect("r", worker, (1,), capacity=10, expires=5.0)
    overlay.forget("a")
    assert (expected(overlay, "a"), expected(overlay, "b")) == (set(), {1})


def test_case_38_the_oldest_gives_way_at_the_workers_capacity_and_at_the_whole_overlays() -> None:
    overlay = Overlay(max_blocks=10)
    for number in range(100):
        overlay.expect(f"r{number}", "a", range(number * 3, number * 3 + 3), capacity=7, expires=5.0)
        overlay.expect(f"r{number}", "b", range(number * 3, number * 3 + 3), capacity=100, expires=5.0)
        assert overlay.num_blocks <= 10
        assert len(expected(overlay, "a")) <= 7
    overlay.expect("long", "a", range(1000, 1050), capacity=7, expires=5.0)
    assert expected(overlay, "a") == set(range(1000, 1007))
    roomy = Overlay()
    for number in range(100):
        roomy.expect(f"r{number}", "a", range(number * 3, number * 3 + 3), capacity=7, expires=5.0)
    assert expected(roomy, "a") == set(range(294, 300))


def test_who_expects_a_prompt_is_found_by_its_first_block_as_long_as_an_entry_lasts() -> None:
    overlay = Overlay()
    overlay.expect("r", "a", (1, 2), capacity=10, expires=5.0)
    overlay.expect("s", "a", (1, 3), capacity=10, expires=6.0)
    overlay.expect("s", "b", (1, 3), capacity=10, expires=6.0)
    assert list(overlay.rooted(1)) == ["a", "b"]
    assert not list(overlay.rooted(2))
    overlay.expire(5.0)
    assert list(overlay.rooted(1)) == ["a", "b"]
    overlay.withdraw("s")
    assert not list(overlay.rooted(1))


DEEDS = st.one_of(
    st.tuples(st.just("expect"), st.integers(0, 5), st.lists(st.integers(0, 9), max_size=5), st.integers(0, 20)),
    st.tuples(st.just("withdraw"), st.integers(0, 5), st.just([]), st.just(0)),
    st.tuples(st.just("confirm"), st.just(0), st.lists(st.integers(0, 9), max_size=5), st.just(0)),
    st.tuples(st.just("expire"), st.just(0), st.just([]), st.integers(0, 20)),
    st.tuples(st.just("forget"), st.integers(0, 1), st.just([]), st.just(0)),
)


@given(st.lists(DEEDS, max_size=40))
def test_whatever_happens_it_stays_bounded_and_ends_empty(deeds: list[tuple[str, int, list[int], int]]) -> None:
    overlay = Overlay(max_blocks=12)
    for deed, number, halves, at in deeds:
        worker = "ab"[number % 2]
        match deed:
            case "expect":
                overlay.expect(f"r{number}", worker, tuple(halves), capacity=8, expires=float(at))
            case "withdraw":
                overlay.withdraw(f"r{number}")
            case "confirm":
                overlay.confirm(worker, halves)
            case "expire":
                overlay.expire(float(at))
            case "forget":
                overlay.forget(worker)
        assert overlay.num_blocks <= 12
        assert sum(len(expected(overlay, name)) for name in "ab") <= overlay.num_blocks
    overlay.expire(21.0)
    assert overlay.num_blocks == 0
    assert not any(expected(overlay, name) for name in "ab")
    assert not any(tuple(overlay.rooted(half)) for half in range(20))
