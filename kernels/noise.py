"""The randomness of sampling: a hash of (seed, sample index, position, token id), so that any worker, in any layout or
batch, draws the same token. The definition is this file; a kernel computes the same bits and formulas.

Adding this noise to log-probabilities and taking the largest draws a token with its probability (the Gumbel-max trick).
All integers are 32-bit and unsigned, held in int64 tensors, or in arrays of the host; S draws, N noises.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Words = TypeVar("Words", Tensor, np.ndarray[Any, np.dtype[np.int64]])

MASK = 0xFFFFFFFF
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
STARTS = (0x9E3779B9, 0x243F6A88)
SERIES_BELOW = 2.0**-10
LARGEST_UNIFORM = 1.0 - 2.0**-24


class Keys(NamedTuple):
    """Two words for each draw that its seed, sample index and position are folded into."""

    first_S: Tensor
    second_S: Tensor

    def at(self, draws_N: Tensor) -> "Keys":
        return Keys(self.first_S[draws_N], self.second_S[draws_N])

    def column(self) -> "Keys":
        """To be spread over the tokens of a row."""
        return Keys(self.first_S.unsqueeze(1), self.second_S.unsqueeze(1))


def mix(x: Words) -> Words:
    """A bijection of 32-bit words in which every input bit moves every output bit. Works in place."""
    x ^= x >> 16
    x *= MULTIPLIERS[0]  # what overflows 64 bits does not reach the lower 32
    x &= MASK
    x ^= x >> 15
    x *= MULTIPLIERS[1]
    x &= MASK
    x ^= x >> 16
    return x


def keys(seeds_S: Tensor, sample_indices_S: Tensor, positions_S: Tensor) -> Keys:
    """`seeds` are 64-bit, as int64 of the same bits; `positions` are of the token to be drawn."""
    return Keys(*placed(*seeded(seeds_S, sample_indices_S), positions_S))


def seeded(seeds_S: Words, sample_indices_S: Words) -> tuple[Words, Words]:
    """The part of the keys that a sequence keeps. For one, arrays take a fraction of the time of tensors."""
    first_S, second_S = ((seeds_S & 0) + start for start in STARTS)
    for word_S in (seeds_S & MASK, (seeds_S >> 32) & MASK, sample_indices_S & MASK):
        first_S = mix(first_S ^ word_S)
        second_S = mix(second_S ^ word_S)
    return first_S, second_S


def placed(first_S: Words, second_S: Words, positions_S: Words) -> tuple[Words, Words]:
    """What `seeded` gave, with the positions."""
    word_S = positions_S & MASK
    return mix(first_S ^ word_S), mix(second_S ^ word_S)


def bits(key: Keys, token_ids: Tensor) -> Tensor:
    """32 random bits for each token id; key and ids broadcast."""
    x = mix(token_ids ^ key.first_S)
    x += key.second_S
    x &= MASK
    return mix(x)


def gumbel(key: Keys, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32: −log(−log(1 − v)) for v uniform in (0, 1).

    The large noises, which decide, come from small v, where float32 is dense: a token of probability 2⁻³⁰ still has its
    chance. There −log(1 − v) is its series, since 1 − v would lose v's digits.
    """
    v = bits(key, token_ids).to(torch.float32)
    v += 0.5
    v *= 2.0**-32
    v.clamp_(max=LARGEST_UNIFORM)
    exponential = torch.where(v < SERIES_BELOW, v + v * v * 0.5 + v * v * v * (1.0 / 3.0), -torch.log(1.0 - v))
    return exponential.log_().neg_()
