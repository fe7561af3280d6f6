"""workers.ranks.sampler: what each parameter does to the distribution, and what a draw depends on."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.values import SamplingParams
from workers.ranks import sampler as module
from workers.ranks.drawing import floor, perturb
from workers.ranks.drawn import Draw
from workers.ranks.sampler import Sampler
from workers.scheduling.plan import RowStart

pytestmark = pytest.mark.torch

VOCAB = 12
EOS = 3


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **values})


def sampler_of(
    *sampling: SamplingParams, vocab: int = VOCAB, prompt: tuple[int, ...] = (1, 2), **options: Any
) -> Sampler:
    """Row i has sampling[i]."""
    made = Sampler(8, vocab, (EOS,), torch.device("cpu"), **options)
    for row, s in enumerate(sampling):
        made.start(RowStart(row, prompt, (), s))
    return made


def one(sampler: Sampler, logits: list[float], position: int = 2, row: int = 0) -> int:
    drawn = sampler.sample(torch.tensor([logits]), sampler.draws(row, position, 1))
    return int(drawn.token_ids_S[0])


def logits_of(count: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def allowed(scaled: Tensor, **values: Any) -> list[int]:
    """The tokens that the filters leave in."""
    return (scaled >= floor(scaled.unsqueeze(0), [params(temperature=1.0, **values)])[0]).nonzero().flatten().tolist()


class TestGreedy:
    def test_takes_the_largest_logit(self) -> None:
        logits = logits_of(4)
        sampler = sampler_of(*[params()] * 4)
        drawn = sampler.sample(logits, [Draw(row, 0, 2) for row in range(4)])
        assert (drawn.logprobs, drawn.margins) == ((), ())
        assert drawn.token_ids_S.tolist() == logits.argmax(-1).tolist()

    def test_does_not_pay_for_random_neighbours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []
        plain = module.perturb

        def counting(logits_SV: Tensor, *rest: Any) -> Tensor:
            seen.append(len(logits_SV))
            return plain(logits_SV, *rest)

        monkeypatch.setattr(module, "perturb", counting)
        logits = logits_of(4)
        sampler = sampler_of(params(), params(temperature=1.0, seed=4), params(), params())
        drawn = sampler.sample(logits, [Draw(row, 0, 2) for row in range(4)])
        assert seen == [1]
        assert drawn.token_ids_S[[0, 2, 3]].tolist() == logits[[0, 2, 3]].argmax(-1).tolist()


class TestRandom:
    def test_draws_follow_the_distribution(self) -> None:
        """Chi-square over 20,000 positions, 6 sigma."""
        logits = logits_of(1)[0]
        count = 20_000
        draws = [Draw(0, 0, position) for position in range(count)]
        scores = perturb(logits.expand(count, -1), draws, [params(temperature=0.7, seed=11)] * count)
        expected = (logits / 0.7).softmax(-1).double() * count
        found = torch.bincount(scores.argmax(-1), minlength=VOCAB).double()
        chi_square = ((found - expected) ** 2 / expected).sum().item()
        assert chi_square < VOCAB - 1 + 6 * math.sqrt(2 * (VOCAB - 1))

    def test_a_draw_does_not_depend_on_its_batch(self) -> None:
        """Alone, among others, in another row: the same token for (seed, sample index, position)."""
        logits = logits_of(5, vocab=3000)
        sampling = [
            params(temperature=1.0, seed=1),
            params(temperature=0.8, seed=2**64 - 1, top_p=0.9),
            params(temperature=1.3, seed=3, top_k=40, presence_penalty=1.0),
            params(temperature=1.0, seed=4, min_p=0.05),
            params(),
        ]
        together = sampler_of(*sampling, vocab=3000).sample(logits, [Draw(row, 0, 7) for row in range(5)]).token_ids_S
        for row, s in enumerate(sampling):
            alone = sampler_of(s, vocab=3000).sample(logits[row : row + 1], [Draw(0, 0, 7)])
            assert alone.token_ids_S.item() == together[row].item()

    def test_seed_sample_and_position_each_change_the_draw(self) -> None:
        logits = torch.zeros(1, 5000)
        keys = [(1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6), (1 + 2**32, 0, 5)]
        tokens = {
            int(perturb(logits, [Draw(0, sample, position)], [params(temperature=1.0, seed=seed)]).argmax())
            for seed, sample, position in keys
        }
        assert len(tokens) == len(keys)

    def test_samples_of_one_prompt_differ_and_are_those_of_rows_of_their_own(self) -> None:
        logits = torch.zeros(1, 5000)
        sampling = params(temperature=1.0, seed=8)
        first = sampler_of(sampling, vocab=5000)
        drawn = first.sample(logits.expand(3, -1), first.draws(0, 2, 3)).token_ids_S.tolist()
        assert len(set(drawn)) == 3
        for index, token in enumerate(drawn):
            other = Sampler(1, 5000, (), torch.device("cpu"))
            other.start(RowStart(0, (1, 2), (), sampling, sample_index=index))
            assert other.sample(logits, other.draws(0, 2, 1)).token_ids_S.item() == token

    @pytest.mark.parametrize("temperature", [1e-40, 1e-6, 100.0])
    def test_extreme_temperatures_stay_finite(self, temperature: float) -> None:
        logits = logits_of(1)[0].tolist()
        token = one(sampler_of(params(temperature=temperature, seed=1)), logits)
        assert temperature > 1 or token == max(range(VOCAB), key=logits.__getitem__)


class TestFilters:
    scaled = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()

    def test_off_leaves_all(self) -> None:
        assert allowed(self.scaled) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize(("top_k", "left"), [(1, [0]), (3, [0, 1, 2]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4])])
    def test_top_k(self, top_k: int, left: list[int]) -> None:
        assert allowed(self.scaled, top_k=top_k) == left

    @pytest.mark.parametrize(
        ("top_p", "left"), [(0.01, [0]), (0.39, [0]), (0.41, [0, 1]), (0.72, [0, 1, 2]), (0.999, [0, 1, 2, 3, 4])]
    )
    def test_top_p_keeps_the_fewest_that_reach_it(self, top_p: float, left: list[int]) -> None:
        assert allowed(self.scaled, top_p=top_p) == left

    @pytest.mark.parametrize(
        ("min_p", "left"), [(0.1, [0, 1, 2, 3, 4]), (0.2, [0, 1, 2, 3]), (0.5, [0, 1]), (1.0, [0])]
    )
    def test_min_p_is_relative_to_the_best(self, min_p: float, left: list[int]) -> None:
        assert allowed(self.scaled, min_p=min_p) == left

    def test_each_filter_sees_what_the_one_before_left(self) -> None:
        """Of the first two, 0.4 / 0.7 = 0.57 is enough for 0.55, but not 0.4 of all five."""
        assert allowed(self.scaled, top_k=2, top_p=0.55) == [0]
        assert allowed(self.scaled, top_p=0.55) == [0, 1]
        assert allowed(self.scaled, min_p=0.7, top_p=0.55) == [0]

    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 1000),
        top_k=st.sampled_from([0, 1, 5, 40, 1024, 1025, 2500]),
        top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.01, 0.3]),
        spread=st.sampled_from([0.05, 1.0, 6.0]),
    )
    def test_filters_are_those_of_a_plain_loop(
        self, seed: int, top_k: int, top_p: float, min_p: float, spread: float
    ) -> None:
        """Whether the candidates suffice or the whole vocabulary is sorted."""
        vocab = 2048
        scaled = logits_of(1, vocab, seed)[0] * spread
        found = allowed(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
        assert found == sorted(plain_filter(scaled, top_k, top_p, min_p))


def plain_filter(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    probabilities = scaled.double().softmax(-1).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    left = [token for token in order if probabilities[token] >= min_p * probabilities[order[0]] * (1 - 1e-6)]
    left = left[: top_k or None]
    total = sum(probabilities[token] for token in left)
    before = itertools.accumulate((probabilities[token] / total for token in left), initial=0.0)
    return [token for token, mass in zip(left, before, strict=False) if top_p == 1 or mass < top_p - 1e-9]


class TestAdjustments:
    def test_presence_and_frequency_count_output_alone(self) -> None:
        sampler = sampler_of(params(presence_penalty=1.0, frequency_penalty=0.6), prompt=(7, 7))
        logits = [0.0] * VOCAB
        logits[7], logits[5] = 3.0, 2.0
        assert [one(sampler, logits, position) for position in range(2, 6)] == [7, 5, 7, 7]

    def test_repetition_counts_the_prompt_too(self) -> None:
        logits = [-4.0] * VOCAB
        logits[1], logits[6] = 3.0, 2.0
        assert one(sampler_of(params(repetition_penalty=2.0), prompt=(1, 2)), logits) == 6
        assert one(sampler_of(params(repetition_penalty=2.0), prompt=(2,)), logits) == 1
        below = [-4.0] * VOCAB
        below[1], below[6] = -1.0, -1.5
        assert one(sampler_of(params(repetition_penalty=2.0), prompt=(1, 2)), below) == 6

    def test_state_is_rebuilt_from_the_output_so_far(self) -> None:
        """A sequence that resumes, or comes from another worker, goes on as if it had never moved."""
        sampling = params(temperature=1.0, seed=3, frequency_penalty=1.5, presence_penalty=0.4, repetition_penalty=1.3)
        logits = logits_of(12).unsqueeze(1)
        whole = sampler_of(sampling)
        drawn = [int(whole.sample(logits[i], [Draw(0, 0, 2 + i)]).token_ids_S[0]) for i in range(12)]
        moved = Sampler(4, VOCAB, (EOS,), torch.device("cpu"))
        moved.start(RowStart(3, (1, 2), tuple(drawn[:5]), sampling))
        rest = [int(moved.sample(logits[i], [Draw(3, 0, 2 + i)]).token_ids_S[0]) for i in range(5, 12)]
        assert drawn[5:] == rest

    def test_a_row_forgets_the_sequence_before(self) -> None:
        sampler = sampler_of(params(frequency_penalty=2.0), prompt=(7,))
        logits = [0.0] * VOCAB
        logits[7] = 1.0
        assert one(sampler, logits) == 7
        assert one(sampler, logits) != 7
        sampler.end(0)
        sampler.start(RowStart(0, (7,), (), params(frequency_penalty=2.0)))
        assert one(sampler, logits) == 7

    def test_logit_bias(self) -> None:
        logits = [0.0] * VOCAB
        logits[4] = 5.0
        assert one(sampler_of(params(logit_bias=((4, -100.0), (9, 1.0)))), logits) == 9

    def test_min_tokens_forbids_what_would_end_the_sequence(self) -> None:
        sampler = sampler_of(params(min_tokens=2, stop_token_ids=(5,)))
        logits = [0.0] * VOCAB
        logits[EOS], logits[5], logits[8] = 9.0, 8.0, 7.0
        assert [one(sampler, logits, position) for position in (2, 3, 4)] == [8, 8, EOS]

    def test_min_tokens_with_ignore_eos_lets_eos_be_a_token_like_others(self) -> None:
        logits = [0.0] * VOCAB
        logits[EOS], logits[5], logits[8] = 8.0, 9.0, 7.0
        assert one(sampler_of(params(min_tokens=2, stop_token_ids=(5,), ignore_eos=True)), logits) == EOS

    def test_min_tokens_yields_where_nothing_else_is_left(self) -> None:
        sampler = Sampler(1, 2, (0, 1), torch.device("cpu"))
        sampler.start(RowStart(0, (0,), (), params(min_tokens=3)))
        assert one(sampler, [1.0, 2.0], 1) == 1

    def test_adjustments_leave_the_logits_and_other_rows_alone(self) -> None:
        logits = logits_of(2)
        before = logits.clone()
        sampler = sampler_of(params(logit_bias=((0, 50.0),)), params())
        drawn = sampler.sample(logits, [Draw(0, 0, 2), Draw(1, 0, 2)])
        assert drawn.token_ids_S.tolist() == [0, before[1].argmax().item()]
        assert torch.equal(logits, before)


class TestReports:
    def test_logprobs_are_the_models_own(self) -> None:
        """Before temperature, penalties, bias and filters."""
        logits = logits_of(2)
        sampler = sampler_of(params(logit_bias=((0, 90.0),), num_logprobs=3), params())
        drawn = sampler.sample(logits, [Draw(0, 0, 2), Draw(1, 0, 2)])
        expected = logits[0].log_softmax(-1)
        found = drawn.logprobs[0]
        assert found is not None
        assert drawn.logprobs[1] is None
        assert found.token_id == 0
        assert found.logprob == pytest.approx(expected[0].item(), abs=1e-6)
        assert [token for token, _ in found.top] == expected.topk(3).indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-6)

    def test_rows_get_as_many_top_logprobs_as_each_asked_for(self) -> None:
        sampler = sampler_of(params(num_logprobs=0), params(num_logprobs=20))
        drawn = sampler.sample(logits_of(2), [Draw(0, 0, 2), Draw(1, 0, 2)])
        assert [len(found.top) for found in drawn.logprobs if found is not None] == [0, VOCAB]

    def test_margins_are_between_the_best_two_of_what_was_drawn_from(self) -> None:
        logits = logits_of(3)
        sampling = (params(logit_bias=((1, 4.0),)), params(temperature=0.5, seed=6), params(temperature=1.0, top_k=1))
        drawn = sampler_of(*sampling, record_margins=True).sample(logits, [Draw(row, 0, 2) for row in range(3)])
        biased = logits[0].clone()
        biased[1] += 4.0
        scores = perturb(logits[1:2], [Draw(1, 0, 2)], sampling[1:2])[0]
        tops = [values.topk(2).values for values in (biased, scores)]
        assert drawn.margins[:2] == pytest.approx([(top[0] - top[1]).item() for top in tops])
        assert drawn.margins[2] == math.inf


def test_a_row_that_never_started_is_an_error() -> None:
    with pytest.raises(LookupError, match="row 3"):
        sampler_of(params()).draws(3, 2, 1)


def test_all_tokens_of_a_flat_distribution_are_drawn_sooner_or_later() -> None:
    logits = torch.zeros(600, VOCAB)
    scores = perturb(logits, [Draw(0, 0, p) for p in range(600)], [params(temperature=1.0, seed=2)] * 600)
    assert len(Counter(scores.argmax(-1).tolist())) == VOCAB
