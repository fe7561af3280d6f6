from router.decisions.truth import HALF_LIFE_SECONDS, Truth


def told(truth: Truth, promised: int, actual: int, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        truth.found("a", promised, actual, 32, now)


def test_a_worker_that_lacks_what_it_promises_is_distrusted_and_one_miss_is_not_enough() -> None:
    truth = Truth()
    told(truth, 1024, 0, 2)
    assert truth.distrusted(0.0) == set()
    told(truth, 1024, 0, 1)
    assert truth.distrusted(0.0) == {"a"}
    assert truth.error("a") > 0.9
    assert truth.error("b") == 0.0


def test_true_promises_bring_it_back_and_not_at_the_first() -> None:
    truth = Truth()
    told(truth, 1024, 0, 20)
    told(truth, 1024, 1024, 1)
    assert truth.distrusted(0.0) == {"a"}
    told(truth, 1024, 1024, 20)
    assert truth.distrusted(0.0) == set()


def test_time_brings_it_back_too_and_a_lie_then_counts_anew() -> None:
    truth = Truth()
    told(truth, 1024, 0, 20)
    assert truth.distrusted(HALF_LIFE_SECONDS) == {"a"}
    assert truth.distrusted(10 * HALF_LIFE_SECONDS) == set()
    told(truth, 1024, 0, 3, now=10 * HALF_LIFE_SECONDS)
    assert truth.distrusted(10 * HALF_LIFE_SECONDS) == {"a"}


def test_a_new_generation_begins_without_a_record() -> None:
    truth = Truth()
    told(truth, 1024, 0, 20)
    truth.forget("a")
    assert (truth.distrusted(0.0), truth.error("a")) == (set(), 0.0)


def test_the_last_block_and_more_than_was_promised_are_no_errors() -> None:
    truth = Truth()
    told(truth, 32, 0, 20)
    told(truth, 64, 32, 20)
    told(truth, 64, 4096, 20)
    assert truth.error("a") == 0.0


def test_an_honest_worker_that_evicts_now_and_then_is_believed() -> None:
    truth = Truth()
    for number in range(100):
        truth.found("a", 1024, 0 if number % 4 == 0 else 1024, 32, 0.0)
        assert truth.distrusted(0.0) == set()
