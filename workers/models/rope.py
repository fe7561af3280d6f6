"""Rotation tables: for every position the cos and sin of each dimension pair's angle, by the checkpoint's scaling.

Shape suffixes as in kernels.ops; F = E / 2 frequencies. float32 throughout, as models were trained.
"""

import math
from typing import assert_never

import torch
from torch import Tensor

from workers.models.config import DefaultRope, LinearRope, Llama3Rope, Rope, YarnRope


def cos_sin_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """[P, E]: cos in the first half of the last axis, sin in the second."""
    angles_PF = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies(rope, head_dim)
    table_PE = torch.cat((angles_PF.cos(), angles_PF.sin()), -1)
    if isinstance(rope, YarnRope):
        table_PE *= rope.attention_factor
    return table_PE.to(device)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each dimension pair, [F]."""
    plain_F = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope:
        case DefaultRope():
            return plain_F
        case LinearRope():
            return plain_F / rope.factor
        case Llama3Rope():
            return _llama3(rope, plain_F)
        case YarnRope():
            return _yarn(rope, plain_F, head_dim)
        case _:
            assert_never(rope)


def _llama3(rope: Llama3Rope, plain_F: Tensor) -> Tensor:
    """Waves that fit the original context high_freq_factor times are kept, those that do not fit low_freq_factor times
    are stretched, and those between are mixed."""
    turns_F = rope.original_context * plain_F / (2 * math.pi)
    kept_F = ((turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept_F) * plain_F / rope.factor + kept_F * plain_F


def _yarn(rope: YarnRope, plain_F: Tensor, head_dim: int) -> Tensor:
    """As llama3, but mixed linearly over the dimensions between those of beta_fast and beta_slow turns."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    stretched_F = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain_F / rope.factor * stretched_F + plain_F * (1 - stretched_F)
