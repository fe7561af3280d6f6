"""Which implementation of the operations a device gets. Triton is imported for a CUDA device alone."""

from typing import TYPE_CHECKING

import torch

from kernels.ops import Ops
from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from kernels.draws import CudaDraws


def choose(device: torch.device) -> Ops:
    """The implementation for a device; made once, at start-up."""
    if device.type == "cuda":
        from kernels.cuda import CudaOps

        return CudaOps(device)
    return ReferenceOps()


def choose_draws(device: torch.device) -> "CudaDraws | None":
    """The kernels that draw on a device; None where the sampler's own torch code does."""
    if device.type == "cuda":
        from kernels.draws import CudaDraws

        return CudaDraws(device)
    return None
