"""JSON from clients: bounded in depth, so that nothing that walks it later meets Python's recursion limit. Pure."""

import json
from typing import Any

from headrace.errors import InvalidRequest

MAX_DEPTH = 128


def parse_json(what: str, raw: bytes | str, field: str | None = None) -> Any:
    """The value; InvalidRequest when `raw` is no JSON, or nested deeper than MAX_DEPTH."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} must be JSON: {error}", field=field) from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return value
    raise InvalidRequest(f"{what} must be JSON nested at most {MAX_DEPTH} deep", field=field)


def _within(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inner if isinstance(one, dict | list)]
