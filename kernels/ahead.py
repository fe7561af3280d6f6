"""Compiles kernels for a card that is not here, into the cache that a process with such a card looks them up in.

`without_device` stands in for the driver: whatever is launched while it lasts is compiled for the card as it would be for
this launch (types, alignments, constants, options), and nothing runs. Tensors may be on torch's meta device, whose
addresses are those of memory that begins aligned.

A cache that is shipped, such as an image's, is read where it lies, and may be read-only; what it lacks is compiled into
TRITON_CACHE_DIR as ever. Triton is told by two variables, before it is imported:

    TRITON_CACHE_MANAGER=kernels.shipped:ShippedCache  HEADRACE_KERNELS=/opt/headrace/kernels
"""

# Triton has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

WARP = 32
CARDS = {"h100": (90, 132), "h200": (90, 132)}  # capability, multiprocessors


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel as one launch needs it. `arguments`: what Triton knows of each, in their order. `cached`: it was there
    before; None where nothing was compiled."""

    kernel: str
    arguments: str
    cached: bool | None = None


class _Unloaded:
    """In the place of what Triton compiles for the host."""

    def __getattr__(self, name: str) -> Any:
        return None


class _NoDevice(DriverBase):
    """A driver that names a card, and has none."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return str(nvidia.ty_to_cpp(ty))

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self):
        raise RuntimeError("nothing runs here")

    def get_benchmarker(self):
        raise RuntimeError("nothing runs here")


@contextmanager
def without_device(capability: int, say: Callable[[Launched], None], *, compile_them: bool = True) -> Iterator[None]:
    """Launches compile, each kernel once, or are only listed; `say` hears of each. For a process that launches nothing
    else."""
    run, compile_one = JITFunction.run, JITFunction._do_compile
    cached: list[bool] = []
    launched: set[JITFunction] = set()

    def warm(self, *args, grid, warmup, **kwargs):
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def compiled(self, key, signature, device, constexprs, options, attrs, warmup):
        kernel, arguments = f"{self.__module__}.{self.__name__}", f"{key}"
        launched.add(self)
        if not compile_them:
            self.device_caches[device][0][key] = listed = SimpleNamespace()
            say(Launched(kernel, arguments))
            return listed
        found = compile_one(self, key, signature, device, constexprs, options, attrs, warmup)
        say(Launched(kernel, arguments, cached.pop()))
        if hasattr(nvidia, "make_launcher"):  # later versions have one for all kernels
            nvidia.CudaLauncher(found.src, found.metadata)
        return found

    before = knobs.compilation.listener
    knobs.compilation.listener = lambda *, cache_hit, **_: cached.append(cache_hit)
    JITFunction.run, JITFunction._do_compile = warm, compiled
    driver.set_active(_NoDevice(GPUTarget("cuda", capability, WARP)))
    try:
        with _launchers_unloaded():
            if compile_them:
                nvidia.CudaUtils()
            yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_one
        knobs.compilation.listener = before
        for kernel in launched:
            kernel.device_caches.clear()


@contextmanager
def _launchers_unloaded() -> Iterator[None]:
    """What Triton compiles for the host, to launch a kernel and to look at the card, is linked against an empty library in
    the driver's place, kept, and not loaded: it would not find what the driver has."""
    load = build._load_module_from_path
    build._load_module_from_path = lambda name, path: _Unloaded()
    before = os.environ.get("TRITON_LIBCUDA_PATH")
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "libcuda.so.1")
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc"  # as Triton finds it
        command = [compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, "-x", "c", "-"]
        subprocess.run(command, input=b"", check=True)
        knobs.nvidia.libcuda_path = folder
        nvidia.libcuda_dirs.cache_clear()
        nvidia.library_dirs.cache_clear()
        try:
            yield
        finally:
            build._load_module_from_path = load
            knobs.nvidia.libcuda_path = before
            nvidia.libcuda_dirs.cache_clear()
            nvidia.library_dirs.cache_clear()
