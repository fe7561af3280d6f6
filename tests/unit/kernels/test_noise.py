"""kernels.noise: the same bits everywhere and for ever, and such as chance would give."""

import math

import pytest
import torch

from kernels import noise

pytestmark = pytest.mark.torch

MASK = 2**32 - 1
DRAWS = ((0, 0, 0), (1, 0, 5), (2**64 - 1, 3, 1_000_000), (2**63 - 1, 1, 7))
TOKENS = (0, 1, 49151, 2**31 - 1)
GOLDEN = (
    (0xE81AA8B2, 0xF322ADBB, 0x097283C8, 0xEF17DBCB),
    (0x7F6D7961, 0x47D3735C, 0x82C9F616, 0xE9702144),
    (0x8DFEE479, 0x81340B5B, 0x634EC94B, 0xAF84BD96),
    (0x1FDDF063, 0x2A2767A3, 0xE907456A, 0xC5B61C8F),
)


def keys_of(draws: tuple[tuple[int, int, int], ...]) -> noise.Keys:
    seeds = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed, _, _ in draws])
    return noise.keys(seeds, *(torch.tensor([draw[i] for draw in draws]) for i in (1, 2)))


def plain_mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & MASK
    x = (x ^ x >> 15) * 0x846CA68B & MASK
    return x ^ x >> 16


def plain_bits(seed: int, sample: int, position: int, token: int) -> int:
    first, second = 0x9E3779B9, 0x243F6A88
    for word in (seed & MASK, seed >> 32, sample, position):
        first, second = plain_mix(first ^ word), plain_mix(second ^ word)
    return plain_mix((plain_mix(token ^ first) + second) & MASK)


def test_bits_are_the_golden_ones() -> None:
    """These never change: a change breaks every promise that a seed gives the same answer."""
    assert noise.bits(keys_of(DRAWS).column(), torch.tensor(TOKENS)).tolist() == [list(row) for row in GOLDEN]


def test_bits_are_those_of_plain_integers() -> None:
    expected = [[plain_bits(*draw, token) for token in TOKENS] for draw in DRAWS]
    assert expected == [list(row) for row in GOLDEN]


def test_noise_of_a_token_does_not_depend_on_its_neighbours() -> None:
    key = keys_of(DRAWS)
    whole = noise.gumbel(key.column(), torch.arange(1000))
    picked = noise.gumbel(key.at(torch.tensor([2, 0, 3])), torch.tensor([999, 0, 17]))
    assert picked.tolist() == [whole[2, 999].item(), whole[0, 0].item(), whole[3, 17].item()]


@pytest.mark.parametrize("part", range(4), ids=["seed", "sample index", "position", "token id"])
def test_noise_is_uniform_along_every_part_of_its_key(part: int) -> None:
    """Chi-square over 256 bins of the high and of the low byte, with 2¹⁶ values: 255 degrees of freedom, 6 sigma."""
    count = 2**16
    parts = [torch.full((count,), value) for value in (12345, 0, 77, 321)]
    parts[part] = torch.arange(count)
    bits = noise.bits(noise.keys(*parts[:3]), parts[3])
    for shift in (0, 24):
        found = torch.bincount(bits >> shift & 0xFF, minlength=256).double()
        chi_square = ((found - count / 256) ** 2 / (count / 256)).sum().item()
        assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)


def test_noise_of_neighbouring_draws_is_independent() -> None:
    """Correlation between one position's noise and the next's, over 2¹⁶ tokens: 6 sigma."""
    count = 2**16
    here, there = noise.gumbel(keys_of(((9, 0, 40), (9, 0, 41))).column(), torch.arange(count))
    correlation = torch.corrcoef(torch.stack((here, there)))[0, 1].item()
    assert abs(correlation) < 6 / math.sqrt(count)


def test_noise_is_standard_gumbel_and_finite() -> None:
    """Mean is Euler's constant, variance π² / 6."""
    values = noise.gumbel(keys_of(((5, 0, 1),)).column(), torch.arange(2**18))[0].double()
    assert bool(values.isfinite().all())
    assert values.mean().item() == pytest.approx(0.5772157, abs=0.02)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, rel=0.03)


def test_extreme_words_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "bits", lambda key, token_ids: torch.tensor([0, 1, 2**22, 2**31, MASK - 1, MASK]))
    values = noise.gumbel(keys_of(((0, 0, 0),)), torch.zeros(1, dtype=torch.int64))
    exact = [-math.log(-math.log1p(-(word + 0.5) * 2.0**-32)) for word in (0, 1, 2**22, 2**31)]
    assert values[:4].tolist() == pytest.approx(exact, rel=1e-5)
    assert bool(values.isfinite().all())
