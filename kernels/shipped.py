"""Triton's cache where compiled kernels are shipped: theirs first, read where they lie; all else as ever.

By TRITON_CACHE_MANAGER=kernels.shipped:ShippedCache and HEADRACE_KERNELS, a folder that `headrace kernels compile` filled.
It may be read-only, and at another path than where it was filled.
"""

# Triton has no types.
# mypy: disable-error-code="no-untyped-call,misc"

import json
import os
from contextlib import suppress
from pathlib import Path

from triton.runtime.cache import FileCacheManager


class ShippedCache(FileCacheManager):
    """One key's files. Nothing is written into what is shipped; a key is wholly of one place."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        folder = os.environ.get("HEADRACE_KERNELS", "")
        here = Path(folder) / key if folder else None
        self._shipped = here if here is not None and here.is_dir() else None
        try:
            super().__init__(key, override, dump)
        except OSError:  # it makes a folder for what may have to be compiled, which of this key is nothing
            if self._shipped is None:
                raise

    def has_file(self, filename: str) -> bool:
        return self._of_shipped(filename) is not None or bool(super().has_file(filename))

    def get_file(self, filename: str) -> str | None:
        found: str | None = self._of_shipped(filename) or super().get_file(filename)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        """A group lists the paths that its files had: of those shipped, only names count. Where one of them is missing or
        the list is broken, as after a copy that ended early, the kernel is none of those shipped."""
        if self._shipped is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                listed = (self._shipped / f"__grp__{filename}").read_text(encoding="utf-8")
                paths = {name: self._of_shipped(name) for name in json.loads(listed)["child_paths"]}
                whole = {name: path for name, path in paths.items() if path is not None}
                if whole and len(whole) == len(paths):
                    return whole
            self._shipped = None
        found: dict[str, str] | None = super().get_group(filename)
        return found

    def _of_shipped(self, filename: str) -> str | None:
        path = self._shipped / filename if self._shipped is not None else None
        return str(path) if path is not None and path.is_file() else None
