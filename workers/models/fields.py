"""One JSON file of a checkpoint, read field by field: every complaint names the file, the field and what is allowed."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from headrace.errors import CheckpointError


class Fields:
    """The object in a file, or a section of it (`prefix` then ends in a dot)."""

    def __init__(self, path: pathlib.Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    @classmethod
    def read(cls, path: pathlib.Path) -> "Fields":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return cls(path, values)

    def wrong(self, name: str, allowed: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {self.prefix}{name} must be {allowed}, got {self.values.get(name)!r}",
            file=self.path,
            field=self.prefix + name,
        )

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.values.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= above:
            raise self.wrong(name, f"a number above {above}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def section(self, name: str) -> "Fields | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids given as nothing, one or a list."""
        value = self.values.get(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in listed):
            raise self.wrong(name, "a token id or a list of token ids")
        return tuple(listed)
