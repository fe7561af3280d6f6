"""A draw in torch: noise on what the filters leave, of which the largest is drawn. What a CPU does, and what the kernels
are compared with.

Shape suffixes: S draws of a step, V vocabulary, C candidates, N survivors of the filters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.values import SamplingParams
from kernels import noise
from workers.ranks.drawn import Draw

CANDIDATES = 1024
LEAST_TEMPERATURE = 1e-30


def perturb(logits_SV: Tensor, draws: Sequence[Draw], sampling: Sequence[SamplingParams]) -> Tensor:
    """Scores whose largest is a draw from softmax(logits / temperature) as filtered; −inf where filtered out."""
    device = logits_SV.device
    temperature_S1 = _column([max(s.temperature, LEAST_TEMPERATURE) for s in sampling], device)
    logits_SV = logits_SV.float()
    scaled_SV = logits_SV.sub(logits_SV.amax(-1, keepdim=True)).div_(temperature_S1)
    key = noise.keys(
        torch.tensor([as_int64(s.seed) for s in sampling], device=device),
        torch.tensor([draw.sample_index for draw in draws], device=device),
        torch.tensor([draw.position for draw in draws], device=device),
    )
    if all(s.top_p == 1 and s.top_k == 0 and s.min_p == 0 for s in sampling):
        token_ids_V = torch.arange(scaled_SV.shape[1], device=device)
        return scaled_SV.add_(noise.gumbel(key.column(), token_ids_V))
    draws_N, token_ids_N = (scaled_SV >= floor(scaled_SV, sampling)).nonzero(as_tuple=True)
    scores_SV = torch.full_like(scaled_SV, -torch.inf)
    scores_N = scaled_SV[draws_N, token_ids_N] + noise.gumbel(key.at(draws_N), token_ids_N)
    scores_SV[draws_N, token_ids_N] = scores_N
    return scores_SV


def floor(scaled_SV: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """[S, 1]: the least logit that min-p, then top-k, then top-p leave in; all that equal it stay in.

    Each filter sees the distribution that the one before left. Mostly few candidates hold the mass, and sorting those is
    enough; the answer is the same either way.
    """
    device, size = scaled_SV.device, scaled_SV.shape[1]
    floor_S1 = scaled_SV.amax(-1, keepdim=True) + _column([s.min_p for s in sampling], device).log()
    top_k_S1 = torch.tensor([[min(s.top_k or size, size)] for s in sampling], device=device)
    top_p_S1 = _column([s.top_p for s in sampling], device)
    by_mass_S1, by_rank_S1 = top_p_S1 < 1, top_k_S1 < size
    if not bool((by_mass_S1 | by_rank_S1).any()):
        return floor_S1
    left_SV = scaled_SV.masked_fill(scaled_SV < floor_S1, -torch.inf)
    total_S1 = left_SV.double().logsumexp(-1, keepdim=True)
    for width in sorted({min(CANDIDATES, size), size}):
        best_SC = left_SV.topk(width, -1).values
        best_SC.masked_fill_(torch.arange(width, device=device) >= top_k_S1, -torch.inf)
        limited_S1 = torch.where(by_rank_S1, best_SC.double().logsumexp(-1, keepdim=True), total_S1)
        mass_SC = (best_SC - limited_S1).exp()
        before_SC = mass_SC.cumsum(-1) - mass_SC
        reached_S1 = before_SC[:, -1:] + mass_SC[:, -1:] >= top_p_S1
        enough_S1 = ~by_rank_S1 & (~by_mass_S1 | reached_S1) | by_rank_S1 & (top_k_S1 <= width)
        if width == size or bool(enough_S1.all()):
            kept_SC = ((before_SC < top_p_S1) | ~by_mass_S1) & (best_SC > -torch.inf)
            least_S1 = best_SC.masked_fill(~kept_SC, torch.inf).amin(-1, keepdim=True)
            floor_S1 = torch.where(by_mass_S1 | by_rank_S1, least_S1, floor_S1)
            break
    return floor_S1


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def as_int64(seed: int) -> int:
    """The signed number of the same 64 bits."""
    return seed - 2**64 if seed >= 2**63 else seed
