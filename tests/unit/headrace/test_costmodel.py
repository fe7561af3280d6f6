import pickle
import random
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costmodel import CostModel, OnlineFit

TRUTH = CostModel(
    prefill_base_seconds=0.004,
    prefill_token_seconds=5e-5,
    prefill_token_context_seconds=2e-9,
    decode_base_seconds=0.006,
    decode_sequence_seconds=4e-5,
    decode_context_token_seconds=3e-8,
    transfer_base_seconds=3e-4,
    transfer_bytes_per_second=2e10,
)


def test_the_formulas_are_what_the_docstring_says() -> None:
    model = CostModel(1.0, 0.1, 0.001, 2.0, 0.5, 0.01, 3.0, 100.0)
    assert model.prefill_seconds(10, 5) == pytest.approx(1 + 0.1 * 10 + 0.001 * 10 * (5 + 5))
    assert model.decode_step_seconds(4, 200) == pytest.approx(2 + 0.5 * 4 + 0.01 * 200)
    assert model.transfer_seconds(50) == pytest.approx(3.5)


def test_a_step_reads_its_weights_once_and_computes_meanwhile() -> None:
    decodes = (8, 8000)
    attention = TRUTH.decode_context_token_seconds * 8000
    products = TRUTH.prefill_base_seconds + TRUTH.prefill_token_seconds * (512 + 8)
    short, long = TRUTH.step_seconds(8, 4.0, *decodes), TRUTH.step_seconds(512, 256.0, *decodes)
    assert short == pytest.approx(TRUTH.decode_step_seconds(*decodes) + 2e-9 * 8 * 4)  # bound by memory
    assert long == pytest.approx(products + attention + 2e-9 * 512 * 256)  # by arithmetic
    assert long < TRUTH.prefill_seconds(512) + TRUTH.decode_step_seconds(*decodes)
    assert TRUTH.step_seconds(512, 256.0) == pytest.approx(TRUTH.prefill_seconds(512))
    assert TRUTH.step_seconds(300, 150.0, padding_tokens=84) == pytest.approx(
        TRUTH.prefill_seconds(300) + 84 * TRUTH.prefill_token_seconds
    )


class Machine:
    """A worker whose steps take what TRUTH says, with noise, and now and then far longer."""

    def __init__(self, truth: CostModel = TRUTH, *, noise: float = 0.05, outliers: float = 0.05, seed: int = 1) -> None:
        self.truth = truth
        self._random = random.Random(seed)
        self._noise = noise
        self._outliers = outliers

    def seconds(self, true_seconds: float) -> float:
        if self._random.random() < self._outliers:
            return true_seconds * self._random.uniform(5, 50)
        return true_seconds * max(self._random.gauss(1, self._noise), 0.1)

    def feed(self, fit: OnlineFit, num_steps: int) -> None:
        draw = self._random
        for _ in range(num_steps):
            tokens, cached = draw.randint(1, 2048), draw.randint(0, 8192)
            fit.add_prefill(tokens, cached + tokens / 2, self.seconds(self.truth.prefill_seconds(tokens, cached)))
            sequences = draw.randint(1, 128)
            context = sequences * draw.randint(10, 4000)
            fit.add_decode(sequences, context, self.seconds(self.truth.decode_step_seconds(sequences, context)))
            size = draw.randint(2**16, 2**28)
            fit.add_transfer(size, self.seconds(self.truth.transfer_seconds(size)))


def worst_error(fitted: CostModel, truth: CostModel) -> float:
    """The largest relative error of a prediction over the range of work."""
    prefills = [(1, 0), (64, 0), (512, 4096), (2048, 0), (2048, 8192)]
    decodes = [(1, 100), (8, 8000), (64, 64_000), (128, 400_000)]
    ratios = [fitted.prefill_seconds(*work) / truth.prefill_seconds(*work) for work in prefills]
    ratios += [fitted.decode_step_seconds(*work) / truth.decode_step_seconds(*work) for work in decodes]
    ratios += [fitted.transfer_seconds(size) / truth.transfer_seconds(size) for size in (2**16, 2**22, 2**28)]
    return max(abs(ratio - 1) for ratio in ratios)


@pytest.mark.parametrize("seed", range(5))
def test_the_truth_is_found_through_noise_and_outliers(seed: int) -> None:
    fit = OnlineFit()
    Machine(seed=seed).feed(fit, 2000)
    assert worst_error(fit.model, TRUTH) < 0.1


def test_without_noise_the_coefficients_themselves_are_found() -> None:
    fit = OnlineFit()
    Machine(noise=0.0, outliers=0.0).feed(fit, 2000)
    assert astuple(fit.model) == pytest.approx(astuple(TRUTH), rel=0.02)


def test_a_hundred_steps_already_predict_usefully() -> None:
    fit = OnlineFit()
    Machine().feed(fit, 100)
    assert worst_error(fit.model, TRUTH) < 0.4


def test_few_samples_keep_the_start_line_by_line() -> None:
    start = CostModel(prefill_base_seconds=0.123)
    fit = OnlineFit(start)
    for _ in range(OnlineFit.MIN_SAMPLES - 1):
        fit.add_prefill(100, 50.0, 9.0)
    assert fit.model == start
    fit.add_prefill(100, 50.0, 9.0)
    assert fit.model.prefill_seconds(100) == pytest.approx(9.0, rel=0.05)
    assert (
        replace(
            fit.model,
            prefill_base_seconds=start.prefill_base_seconds,
            prefill_token_seconds=start.prefill_token_seconds,
            prefill_token_context_seconds=start.prefill_token_context_seconds,
        )
        == start
    )


def test_one_odd_step_among_the_first_bends_nothing() -> None:
    fit = OnlineFit()
    for number in range(40):
        fit.add_decode(4, 400, 5.0 if number == 3 else 0.01)
    assert fit.model.decode_step_seconds(4, 400) == pytest.approx(0.01, rel=0.1)


def test_a_machine_that_slows_down_is_followed() -> None:
    fit = OnlineFit()
    Machine().feed(fit, 1000)
    slow = replace(
        TRUTH,
        decode_base_seconds=3 * TRUTH.decode_base_seconds,
        decode_sequence_seconds=3 * TRUTH.decode_sequence_seconds,
        decode_context_token_seconds=3 * TRUTH.decode_context_token_seconds,
    )
    Machine(slow).feed(fit, 3000)
    assert fit.model.decode_step_seconds(64, 64_000) == pytest.approx(slow.decode_step_seconds(64, 64_000), rel=0.15)


def test_a_machine_that_is_another_one_after_a_pause_is_learned_in_a_few_steps() -> None:
    """By number alone what hundreds of slow steps taught takes hundreds to forget, and a slow worker gets none."""
    slow = replace(TRUTH, prefill_token_seconds=5 * TRUTH.prefill_token_seconds)
    error = {}
    for pause in (0.0, 600.0):
        clock = [0.0]
        fit = OnlineFit(now=lambda clock=clock: clock[0])  # type: ignore[misc]
        Machine(slow).feed(fit, 1000)
        clock[0] += pause
        Machine().feed(fit, 40)
        error[pause] = fit.model.prefill_seconds(2048) / TRUTH.prefill_seconds(2048) - 1
    assert error[600.0] < 0.3
    assert error[0.0] > 1.0


def test_one_odd_step_after_a_pause_bends_nothing() -> None:
    clock = [0.0]
    fit = OnlineFit(now=lambda: clock[0])
    Machine(outliers=0.0).feed(fit, 1000)
    clock[0] += 3600.0
    fit.add_prefill(1024, 512.0, 20 * TRUTH.prefill_seconds(1024))
    assert worst_error(fit.model, TRUTH) < 0.3


def test_hours_of_one_kind_of_work_do_not_unlearn_the_others() -> None:
    fit = OnlineFit()
    machine = Machine()
    machine.feed(fit, 2000)
    for _ in range(5000):
        fit.add_decode(8, 8000, machine.seconds(TRUTH.decode_step_seconds(8, 8000)))
    for sequences, context in ((1, 100), (128, 400_000)):
        expected = TRUTH.decode_step_seconds(sequences, context)
        assert fit.model.decode_step_seconds(sequences, context) == pytest.approx(expected, rel=0.3)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.floats(0, 1e5), st.one_of(st.floats(0, 1e4), st.just(0.0))),
        min_size=8,
        max_size=80,
    )
)
def test_whatever_was_measured_no_coefficient_is_negative_or_not_a_number(
    samples: list[tuple[int, float, float]],
) -> None:
    fit = OnlineFit()
    for size, context, seconds in samples:
        fit.add_prefill(size, context, seconds)
        fit.add_decode(size, int(context), seconds)
        fit.add_transfer(size, seconds)
    model = fit.model
    assert all(0 <= value < float("inf") for value in astuple(model))
    assert model.transfer_bytes_per_second > 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_step_that_cannot_have_been_is_an_error(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot have taken"):
        OnlineFit().add_decode(1, 1, seconds)


def test_ten_thousand_samples_are_no_more_to_keep_than_two_hundred() -> None:
    fit = OnlineFit()
    Machine().feed(fit, 200)
    before = len(pickle.dumps(fit._decode))
    for number in range(10_000):
        fit.add_decode(1 + number % 64, 1000, 0.01)
    assert abs(len(pickle.dumps(fit._decode)) - before) < 64
