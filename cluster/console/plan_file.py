"""The plan that a console lays beside reality: a file of `headrace plan --json`, read again when it changes."""

import json
import pathlib
from typing import Any

from headrace.errors import ConfigError

MAX_BYTES = 16 * 2**20


class PlanFile:
    """Owns what was last read."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._read_at: int | None = None
        self._plan: dict[str, Any] | ConfigError = {}

    def read(self) -> dict[str, Any] | ConfigError:
        """The plan, or why there is none: a console goes on without."""
        try:
            status = self._path.stat()
            if status.st_mtime_ns != self._read_at:
                self._read_at, self._plan = status.st_mtime_ns, self._load(status.st_size)
        except OSError as error:
            self._read_at, self._plan = None, ConfigError(f"console.plan: cannot read {self._path}: {error.strerror}")
        return self._plan

    def _load(self, num_bytes: int) -> dict[str, Any] | ConfigError:
        if num_bytes > MAX_BYTES:
            return ConfigError(f"console.plan: {self._path} has {num_bytes} bytes, a plan at most {MAX_BYTES}")
        try:
            plan = json.loads(self._path.read_text(encoding="utf-8"))
        except ValueError as error:
            return ConfigError(f"console.plan: {self._path} is no JSON: {error}")
        return plan if isinstance(plan, dict) else ConfigError(f"console.plan: {self._path} is no plan")
