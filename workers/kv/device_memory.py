"""Device memory that another process on the machine can map: allocated exportable, handed over as a file descriptor.

Needs no process group and no view of the peer's device: each process sees its own GPU alone. A mapping outlives its
owner's process: what is read then is what it was, and the memory is free only when its last reader has let go.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from cuda.bindings import driver

_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class MappedMemory:
    """`num_bytes` of device memory at `address`, readable and writable by kernels of device `device_index` of this
    process. Let go by close(), or with the last reference to it: our own once the device has done what it was given; of
    a peer's, who closes it has waited for what reads it."""

    def __init__(self, handle: Any, num_bytes: int, device_index: int, *, own: bool) -> None:
        self.num_bytes = num_bytes
        self._handle = handle
        with on_device(device_index):
            self._map(handle, num_bytes, device_index, own)

    def _map(self, handle: Any, num_bytes: int, device_index: int, own: bool) -> None:
        self.address = int(checked(driver.cuMemAddressReserve(num_bytes, 0, 0, 0)))
        checked(driver.cuMemMap(self.address, num_bytes, 0, handle, 0))
        self._release = weakref.finalize(self, _let_go, handle, self.address, num_bytes, device_index, own)
        self._release.atexit = False
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device_index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            checked(driver.cuMemSetAccess(self.address, num_bytes, [access], 1))
        except RuntimeError:
            self.close()
            raise

    @classmethod
    def allocate(cls, least_bytes: int, device_index: int) -> "MappedMemory":
        """Fresh memory on `device_index`, rounded up to what the device can map."""
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device_index
        properties.requestedHandleTypes = _DESCRIPTOR
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        with on_device(device_index):
            step = int(checked(driver.cuMemGetAllocationGranularity(properties, recommended)))
            num_bytes = -(-least_bytes // step) * step
            handle = checked(driver.cuMemCreate(num_bytes, properties, 0))
        return cls(handle, num_bytes, device_index, own=True)

    @classmethod
    def of_descriptor(cls, descriptor: int, num_bytes: int, device_index: int) -> "MappedMemory":
        """A peer's memory; closes the descriptor. RuntimeError where this device cannot reach the peer's."""
        try:
            with on_device(device_index):
                handle = checked(driver.cuMemImportFromShareableHandle(descriptor, _DESCRIPTOR))
        finally:
            os.close(descriptor)
        return cls(handle, num_bytes, device_index, own=False)

    def export(self) -> int:
        """A file descriptor of this memory, which the caller closes."""
        return int(checked(driver.cuMemExportToShareableHandle(self._handle, _DESCRIPTOR, 0)))

    def close(self) -> None:
        """Idempotent; nothing may be launched on the memory any more."""
        self._release()

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


class DeviceWord:
    """An int64 word of host memory, which `owner` keeps, that the device writes too: in the order of a stream."""

    def __init__(self, owner: object, address: int, num_bytes: int, word: int, device_index: int) -> None:
        """`word` is the address of the word, in the `num_bytes` from `address` on that the device is to see."""
        with on_device(device_index):
            checked(driver.cuMemHostRegister(address, num_bytes, driver.CU_MEMHOSTREGISTER_DEVICEMAP))
            self._there = int(checked(driver.cuMemHostGetDevicePointer(word, 0)))
        # Whoever lets go of the memory first takes it from under the device: it is kept until then.
        self._release = weakref.finalize(self, _unregister, owner, address, device_index)
        self._release.atexit = False

    def write(self, value: int, stream: int) -> None:
        """Once the stream has done what it was given: its writes are visible before the word is."""
        checked(driver.cuStreamWriteValue64(stream, self._there, value % 2**64, 0))  # negative: of a warm-up


def _unregister(owner: object, address: int, device_index: int) -> None:
    with on_device(device_index):
        checked(driver.cuCtxSynchronize())
        checked(driver.cuMemHostUnregister(address))


def _let_go(handle: Any, address: int, num_bytes: int, device_index: int, own: bool) -> None:
    with on_device(device_index):
        if own:
            checked(driver.cuCtxSynchronize())
        checked(driver.cuMemUnmap(address, num_bytes))
        checked(driver.cuMemAddressFree(address, num_bytes))
        checked(driver.cuMemRelease(handle))


@contextmanager
def on_device(device_index: int) -> Iterator[None]:
    """The device's context is the calling thread's: any thread may let go of memory."""
    checked(driver.cuCtxPushCurrent(_context(device_index)))
    try:
        yield
    finally:
        checked(driver.cuCtxPopCurrent())


@cache
def _context(device_index: int) -> Any:
    """The one that torch uses too; kept for the life of the process, as its memory is."""
    checked(driver.cuInit(0))
    return checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device_index))))


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or RuntimeError with the driver's name of what went wrong."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if values else None
