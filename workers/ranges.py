"""Names for stretches of a worker's time, as Nsight Systems shows them (NVTX): schedule, run, postprocess, await, pull.

Where `engine.nvtx` is off they are one object that does nothing, made once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from headrace.config import EngineConfig
from headrace.errors import ConfigError


class Ranges(Protocol):
    def __call__(self, name: str) -> AbstractContextManager[None]:
        """The stretch of a `with`, on one thread."""
        ...

    def begin(self, name: str) -> Callable[[], None]:
        """A stretch that ends where the answer is called, on any thread."""
        ...


class _NoRanges:
    def __init__(self) -> None:
        self._nothing = nullcontext()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self._nothing

    def begin(self, name: str) -> Callable[[], None]:
        return _nothing


class _NvtxRanges:
    def __init__(self) -> None:
        from torch.cuda import nvtx

        self._nvtx = nvtx

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self._nvtx.range(name)

    def begin(self, name: str) -> Callable[[], None]:
        started = self._nvtx.range_start(name)
        return lambda: self._nvtx.range_end(started)


def _nothing() -> None:
    pass


NO_RANGES: Ranges = _NoRanges()


def ranges_of(engine: EngineConfig) -> Ranges:
    """As configured; ConfigError where there is no device whose tools would show them."""
    if not engine.nvtx:
        return NO_RANGES
    if engine.device != "cuda":
        raise ConfigError.out_of_range("engine.nvtx", engine.nvtx, "false where engine.device is not cuda")
    return _NvtxRanges()
