"""Which implementation of the operations a device gets. Triton is imported for a CUDA device alone."""

from typing import TYPE_CHECKING

import torch

from kernels.ops import Ops
from kernels.reference import ReferenceOps
from kernels.reference_fixed import FixedReferenceOps

if TYPE_CHECKING:
    from kernels.draws import CudaDraws


def choose(device: torch.device, *, deterministic: bool = False) -> Ops:
    """The implementation for a device; made once, at start-up. `deterministic`: a row's results do not depend, to the bit,
    on what is computed beside it."""
    if device.type == "cuda":
        from kernels.cuda import CudaOps
        from kernels.cuda_fixed import FixedCudaOps

        return FixedCudaOps(device) if deterministic else CudaOps(device)
    return FixedReferenceOps() if deterministic else ReferenceOps()


def choose_draws(device: torch.device) -> "CudaDraws | None":
    """The kernels that draw on a device; None where the sampler's own torch code does."""
    if device.type == "cuda":
        from kernels.draws import CudaDraws

        return CudaDraws(device)
    return None
