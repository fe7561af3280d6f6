"""Draws a token a row: the largest of scaled logits plus the noise of (seed, sample, position, token), nothing sorted and
nothing told to the host. The noise is kernels.noise's, bit for bit until its logarithms.

S draws, V vocabulary, X logits of a program.
"""

# The kernel language has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import noise
from kernels.tuning import RowTile

FIRST_MULTIPLIER = tl.constexpr(noise.MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(noise.MULTIPLIERS[1])
SERIES_BELOW = tl.constexpr(noise.SERIES_BELOW)
LARGEST_UNIFORM = tl.constexpr(noise.LARGEST_UNIFORM)


def sample(
    logits_SV: Tensor, keys: noise.Keys, temperature_S: Tensor, floor_S: Tensor, out_S: Tensor, tile: RowTile
) -> None:
    """Writes token ids (int64) to `out_S`; of equals, the lowest. `temperature_S` 0 is greedy: no noise, no floor.
    `floor_S` is the least (logit − largest) / temperature that may be drawn; −inf lets all in (kernels.sample_floor)."""
    num_draws, vocabulary = logits_SV.shape
    parts = triton.cdiv(vocabulary, tile.elements)
    device = logits_SV.device
    largest_SP = torch.empty(num_draws, parts, dtype=torch.float32, device=device)
    best_SP = torch.empty(num_draws, parts, dtype=torch.float32, device=device)
    token_SP = torch.empty(num_draws, parts, dtype=torch.int32, device=device)
    shared = {
        "V": vocabulary,
        "X": tile.elements,
        "PARTS": triton.next_power_of_2(parts),
        "num_warps": tile.num_warps,
    }
    _largest[(parts, num_draws)](logits_SV, largest_SP, logits_SV.stride(0), **shared)
    _draw[(parts, num_draws)](
        logits_SV, *keys, temperature_S, floor_S, largest_SP, best_SP, token_SP, logits_SV.stride(0), **shared
    )
    _choose[(num_draws,)](best_SP, token_SP, out_S, parts, PARTS=shared["PARTS"])


def largest(logits_SV: Tensor, out_S: Tensor, tile: RowTile) -> None:
    """Writes the ids (int64) of the largest logits to `out_S`; of equals, the lowest."""
    num_draws, vocabulary = logits_SV.shape
    parts = triton.cdiv(vocabulary, tile.elements)
    best_SP = torch.empty(num_draws, parts, dtype=torch.float32, device=logits_SV.device)
    token_SP = torch.empty(num_draws, parts, dtype=torch.int32, device=logits_SV.device)
    _greedy[(parts, num_draws)](
        logits_SV, best_SP, token_SP, logits_SV.stride(0), V=vocabulary, X=tile.elements, num_warps=tile.num_warps
    )
    _choose[(num_draws,)](best_SP, token_SP, out_S, parts, PARTS=triton.next_power_of_2(parts))


@triton.jit
def _greedy(LOGITS, BEST, TOKEN, stride, V: tl.constexpr, X: tl.constexpr):
    part = tl.program_id(0)
    draw = tl.program_id(1).to(tl.int64)
    token = part * X + tl.arange(0, X)
    logits = tl.load(LOGITS + draw * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    best, index = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(BEST + draw * tl.num_programs(0) + part, best)
    tl.store(TOKEN + draw * tl.num_programs(0) + part, part * X + index)


@triton.jit
def _largest(LOGITS, LARGEST, stride, V: tl.constexpr, X: tl.constexpr, PARTS: tl.constexpr):
    part = tl.program_id(0)
    draw = tl.program_id(1).to(tl.int64)
    token = part * X + tl.arange(0, X)
    logits = tl.load(LOGITS + draw * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    tl.store(LARGEST + draw * tl.num_programs(0) + part, tl.max(logits, 0))


@triton.jit
def _draw(
    LOGITS,
    FIRST,
    SECOND,
    TEMPERATURE,
    FLOOR,
    LARGEST,
    BEST,
    TOKEN,
    stride,
    V: tl.constexpr,
    X: tl.constexpr,
    PARTS: tl.constexpr,
):
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    draw = tl.program_id(1).to(tl.int64)
    token = part * X + tl.arange(0, X)
    scores = tl.load(LOGITS + draw * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    temperature = tl.load(TEMPERATURE + draw)
    if temperature > 0:
        every = tl.arange(0, PARTS)
        largest = tl.max(tl.load(LARGEST + draw * parts + every, mask=every < parts, other=float("-inf")), 0)
        scaled = (scores - largest) / temperature
        first = tl.load(FIRST + draw).to(tl.uint32)
        second = tl.load(SECOND + draw).to(tl.uint32)
        noisy = scaled + _gumbel(_mix(_mix(token.to(tl.uint32) ^ first) + second))
        scores = tl.where(scaled >= tl.load(FLOOR + draw), noisy, float("-inf"))
        scores = tl.where(token < V, scores, float("-inf"))
    best, index = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(BEST + draw * parts + part, best)
    tl.store(TOKEN + draw * parts + part, part * X + index)


@triton.jit
def _choose(BEST, TOKEN, OUT, parts, PARTS: tl.constexpr):
    draw = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, PARTS)
    best = tl.load(BEST + draw * parts + every, mask=every < parts, other=float("-inf"))
    _, part = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(OUT + draw, tl.load(TOKEN + draw * parts + part).to(tl.int64))


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= tl.full([], FIRST_MULTIPLIER, tl.uint32)
    x ^= x >> 15
    x *= tl.full([], SECOND_MULTIPLIER, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _gumbel(bits):
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, LARGEST_UNIFORM)
    series = v + v * v * 0.5 + v * v * v * (1.0 / 3.0)
    return -tl.log(tl.where(v < SERIES_BELOW, series, -tl.log(1.0 - v)))
