"""Numbers that the host makes in every step, on their way to the device: one pinned buffer, one transfer, nothing
awaited. The buffer is taken from, and goes back to, torch's cache of pinned memory, which reuses it after the transfer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT_BYTES = 16


def to_device(device: torch.device, arrays: Sequence[Array]) -> list[Tensor]:
    """Each array as a tensor. On a CPU they share their memory; elsewhere all are views of one buffer."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
