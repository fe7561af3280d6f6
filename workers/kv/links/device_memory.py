"""Device memory that another process on the host can map: allocated exportable, handed over as a file descriptor.

Needs no process group and no view of the peer's device: each process sees its own GPU alone. A mapping outlives its
owner's process: what is read then is stale, and the epoch words say so (design 5.3).
"""

import array
import os
import socket
from typing import Any

from cuda.bindings import driver

_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class MappedMemory:
    """`num_bytes` of device memory at `address`, readable and writable by kernels of device `device_index` of this
    process. The owner of an instance closes it when no kernel can touch it any more; `close` is idempotent."""

    def __init__(self, handle: Any, num_bytes: int, device_index: int) -> None:
        self.num_bytes = num_bytes
        self._handle = handle
        self.address = int(_checked(driver.cuMemAddressReserve(num_bytes, 0, 0, 0)))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device_index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _checked(driver.cuMemMap(self.address, num_bytes, 0, handle, 0))
        _checked(driver.cuMemSetAccess(self.address, num_bytes, [access], 1))

    @classmethod
    def allocate(cls, least_bytes: int, device_index: int) -> "MappedMemory":
        """Fresh memory on `device_index`, rounded up to what the device can map; its current context must exist."""
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device_index
        properties.requestedHandleTypes = _DESCRIPTOR
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = int(_checked(driver.cuMemGetAllocationGranularity(properties, recommended)))
        num_bytes = -(-least_bytes // step) * step
        return cls(_checked(driver.cuMemCreate(num_bytes, properties, 0)), num_bytes, device_index)

    @classmethod
    def of_descriptor(cls, descriptor: int, num_bytes: int, device_index: int) -> "MappedMemory":
        """A peer's memory; closes the descriptor."""
        try:
            handle = _checked(driver.cuMemImportFromShareableHandle(descriptor, _DESCRIPTOR))
        finally:
            os.close(descriptor)
        return cls(handle, num_bytes, device_index)

    def export(self) -> int:
        """A file descriptor of this memory, which the caller closes."""
        return int(_checked(driver.cuMemExportToShareableHandle(self._handle, _DESCRIPTOR, 0)))

    def close(self) -> None:
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        _checked(driver.cuMemUnmap(self.address, self.num_bytes))
        _checked(driver.cuMemAddressFree(self.address, self.num_bytes))
        _checked(driver.cuMemRelease(handle))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Bytes, for torch.as_tensor; the tensor keeps this object alive. Our own memory only: torch looks for the
        device that the memory lies on."""
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "strides": None,
        }


def send_memory(connection: socket.socket, memory: MappedMemory) -> None:
    """Over a Unix socket: the size, and with it the descriptor."""
    descriptor = memory.export()
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        connection.sendmsg([memory.num_bytes.to_bytes(8, "little")], rights)
    finally:
        os.close(descriptor)


def receive_memory(connection: socket.socket, device_index: int) -> MappedMemory:
    """The other end of `send_memory`."""
    size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(array.array("i").itemsize))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: descriptors.itemsize])
    if len(size) != 8 or len(descriptors) != 1:
        raise ConnectionError(f"wanted 8 bytes and one descriptor, got {len(size)} and {len(descriptors)}")
    return MappedMemory.of_descriptor(descriptors[0], int.from_bytes(size, "little"), device_index)


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or RuntimeError with the driver's name of what went wrong."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if values else None
