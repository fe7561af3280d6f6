"""Tokens from logits on a CUDA device: where the filters cut, then the draw. Nothing is told to the host."""

import torch
from torch import Tensor

from kernels.ops import DrawNumbers
from kernels.sample import largest, sample
from kernels.sample_floor import sample_floor
from kernels.tuning import Tuning, tuning_of


class CudaDraws:
    """The tokens that workers.ranks.drawing draws by its torch reference, up to the rounding of logarithms."""

    def __init__(self, device: torch.device, tuning: Tuning | None = None) -> None:
        self._tuning = tuning or tuning_of(device)

    def largest(self, logits_SV: Tensor) -> Tensor:
        """Token ids of greedy draws, int64 [S]; of equals, the lowest."""
        token_ids_S = torch.empty(logits_SV.shape[0], dtype=torch.int64, device=logits_SV.device)
        largest(logits_SV, token_ids_S, self._tuning.sample)
        return token_ids_S

    def draw(self, logits_SV: Tensor, numbers: DrawNumbers) -> Tensor:
        """Token ids, int64 [S]."""
        floor_S = torch.full_like(numbers.temperature_S, -torch.inf)
        temperature_S = numbers.temperature_S
        if numbers.filtered:
            min_p_S, top_k_S, top_p_S = numbers.min_p_S, numbers.top_k_S, numbers.top_p_S
            sample_floor(logits_SV, temperature_S, min_p_S, top_k_S, top_p_S, floor_S, self._tuning.sample_floor)
        token_ids_S = torch.empty(logits_SV.shape[0], dtype=torch.int64, device=logits_SV.device)
        sample(logits_SV, numbers.keys, temperature_S, floor_S, token_ids_S, self._tuning.sample)
        return token_ids_S
