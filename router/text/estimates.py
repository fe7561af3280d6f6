"""Whether what an operation of a template makes would be too large, asked before it is done: of what multiplies (`*`,
padding, replace, join, formats). Each raises OverBudget."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from router.text.budget import Budget, OverBudget, check_bits

MAX_WIDTH = 10_000
MAX_INDENT = 64
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_WIDE_FORMAT = re.compile(r"\d{4,}|\*|\{[^{}]*\{")


def check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int) or isinstance(right, int):
        count, value = (left, right) if isinstance(left, int) else (right, left)
        budget.fits(max(count, 0) * budget.size(value))


def check_format(budget: Budget, pattern: Any, mark: str, given: Any) -> None:
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else str(pattern)
    if _WIDE_FORMAT.search(text):
        raise OverBudget("it formats to a width of its own")
    budget.fits(len(text) + text.count(mark) * (1000 + budget.size(given)))


def _check_widths(values: Iterable[Any], most: int = MAX_WIDTH) -> None:
    for value in values:
        if (isinstance(value, int) and abs(value) > most) or (isinstance(value, str) and len(value) > most):
            raise OverBudget(f"it pads by more than {most} characters")


def _check_replace(budget: Budget, text: Any, args: tuple[Any, ...]) -> None:
    if len(args) >= 2:
        old, new = args[:2]
        if isinstance(text, bytes):
            count = text.count(old)
        else:
            text, old, new = str(text), str(old), str(new)
            count = text.count(old)
        budget.fits(len(text) + count * len(new))


def _check_join(budget: Budget, separator: Any, items: Any) -> None:
    if isinstance(items, list | tuple | str):
        budget.fits(budget.size(items) + len(items) * budget.size(separator))


def check_method(budget: Budget, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A method of a text or a number: whether what it makes can be too large."""
    if name in _PADDING:
        _check_widths((*args, *kwargs.values()), MAX_INDENT if name == "expandtabs" else MAX_WIDTH)
    elif name == "replace":
        _check_replace(budget, owner, (*args, *kwargs.values()))
    elif name == "join" and args:
        items = list(args[0]) if isinstance(args[0], Mapping) else args[0]
        if not isinstance(items, list | tuple | str):
            raise OverBudget("it joins what cannot be counted; pass it through the list filter")
        _check_join(budget, owner, items)
    elif name in ("format", "format_map"):
        check_format(budget, owner, "{", [*args, dict(kwargs)])
    elif name == "translate":
        raise OverBudget("it translates by a table")


def check_filter(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    given = (*args, *kwargs.values())
    match name:
        case "replace":
            _check_replace(budget, value, given)
        case "join":
            _check_join(budget, given[0] if given else "", value)
        case "format":
            check_format(budget, value, "%", list(given))
        case "sum":
            if any(isinstance(one, list | tuple) for one in (*given, *(value if isinstance(value, list) else ()))):
                raise OverBudget("it adds up lists")
        case "map" | "select" | "reject" | "selectattr" | "rejectattr" | "groupby":
            pass
        case "tojson":
            _check_widths(given, MAX_INDENT)
            if kwargs.get("indent") or len(args) > 1:
                budget.fits(MAX_INDENT * budget.size(value))
        case "indent":
            _check_widths(given, MAX_INDENT)
            budget.fits(len(str(value)) + MAX_INDENT * (1 + str(value).count("\n")))
        case "urlize" | "wordwrap" | "xmlattr" | "pprint":
            _check_widths(given, MAX_INDENT)
        case _:
            _check_widths(given)
