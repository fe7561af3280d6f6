"""Which implementation of the operations a device gets. Triton is imported for a CUDA device alone."""

import torch

from kernels.ops import Ops
from kernels.reference import ReferenceOps


def choose(device: torch.device) -> Ops:
    """The implementation for a device; made once, at start-up."""
    if device.type == "cuda":
        from kernels.cuda import CudaOps

        return CudaOps(device)
    return ReferenceOps()
