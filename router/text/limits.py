"""What one rendering of a chat template may cost. Templates come with checkpoints, and variables with requests: neither
may loop for ever, fill the memory, or hold a thread in one endless operation.

Three bounds are counted where a template can do anything at all: steps (loop rounds, calls, filters, tests, and what
they work on by its size), the size of any one value, and the characters made in all; a fourth is the thread's own CPU
time. No value outgrows its bound, so no single operation on values takes long, and between two operations the steps are
counted. What multiplies (`*`, `**`, padding, replace, join, formats) is estimated before it is done.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_WIDTH = 10_000
MAX_INDENT = 64
MAX_INT_BITS = 4096
MAX_DEPTH = 128
ELEMENT_CHARACTERS = 8
ELEMENTS_PER_STEP = 64
CHARACTERS_PER_STEP = 512
STEPS_PER_LOOK = 256

_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_COSTLESS = frozenset({"length", "count", "first", "last", "default", "d", "string", "safe", "items", "attr"})
_WIDE_FORMAT = re.compile(r"\d{4,}|\*|\{[^{}]*\{")


class OverBudget(Exception):
    """The rendering would cost more than it may."""


class Budget:
    """What is left of one rendering. Mutable; owned by the call that renders, and in force in its thread alone."""

    def __init__(
        self,
        steps: int,
        value_characters: int,
        all_characters: int,
        seconds: float,
        cpu_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        self._max_steps = self._steps = steps
        self._value_characters = value_characters
        self._max_characters = self._characters = all_characters
        self._seconds = seconds
        self._cpu_seconds = cpu_seconds
        self._began = cpu_seconds()
        self._next_look = max(steps - STEPS_PER_LOOK, 0)

    @classmethod
    def brief(cls) -> "Budget":
        """What may be done between two turns of an event loop: some milliseconds."""
        return cls(4000, 2**16, 2**18, 0.02)

    @classmethod
    def full(cls, input_characters: int = 0) -> "Budget":
        """What is spent on one request, on a thread."""
        return cls(2**20, 2**22 + 4 * input_characters, 2**26 + 16 * input_characters, 1.0)

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps >= self._next_look:
            return
        self._next_look = max(self._steps - STEPS_PER_LOOK, 0)
        if self._steps < 0:
            raise OverBudget(f"it takes more than {self._max_steps} steps")
        if self._cpu_seconds() - self._began > self._seconds:
            raise OverBudget(f"it takes more than {self._seconds:g} s")

    def fits(self, characters: int) -> None:
        """A value of so many characters may be."""
        if characters > self._value_characters:
            raise OverBudget(f"it makes a value of more than {self._value_characters} characters")

    def charge(self, characters: int) -> None:
        """So many characters are made."""
        self.fits(characters)
        self._characters -= characters
        if self._characters < 0:
            raise OverBudget(f"it makes more than {self._max_characters} characters")

    def size(self, value: Any) -> int:
        """The characters that `value` takes when it is written out, containers by their elements, however often one is
        in it; counted as steps too. Raises once it is too large or too deep."""
        if isinstance(value, str):
            self.step(len(value) // CHARACTERS_PER_STEP)
            self.fits(len(value))
            return len(value)
        total, level = 0, [value]
        for _ in range(MAX_DEPTH):
            inner: list[Any] = []
            for one in level:
                if isinstance(one, str | bytes):
                    total += len(one)
                elif isinstance(one, int):
                    _check_bits(one.bit_length())
                elif isinstance(one, list | tuple | dict):
                    total += ELEMENT_CHARACTERS * len(one)
                    self.fits(total + ELEMENT_CHARACTERS * len(inner))
                    inner.extend((*one.keys(), *one.values()) if isinstance(one, dict) else one)
            self.fits(total)
            if not inner:
                self.step(total // CHARACTERS_PER_STEP)
                return total
            self.step(len(inner) // ELEMENTS_PER_STEP)
            level = inner
        raise OverBudget(f"it makes a value nested deeper than {MAX_DEPTH}")


def characters_of(values: Iterable[Any], at_most: float = math.inf) -> int:
    """About how much there is to render, of JSON values; counts no further than a little beyond `at_most`."""
    total, waiting = 0, list(values)
    while waiting and total <= at_most:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, list | dict):
            total += ELEMENT_CHARACTERS * len(one)
            if total <= at_most:
                waiting.extend(one.values() if isinstance(one, dict) else one)
    return total


_IN_FORCE: ContextVar[Budget] = ContextVar("template budget")


@contextmanager
def within(budget: Budget) -> Iterator[None]:
    token = _IN_FORCE.set(budget)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


class _Named(Namespace):
    """Shown by its kind alone: namespaces can hold each other, and be as large written out as one likes."""

    def __repr__(self) -> str:
        return "<Namespace>"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox in which everything a template does is counted. Compile with `compile_bounded`, and render `within` a
    budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.globals["namespace"] = _Named

    def bound(self) -> None:
        """To be called once all filters and tests are set."""
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _stepping(test) for name, test in dict[str, Any](self.tests).items()}
        self.filters.update(_headrace_each=_each, _headrace_made=_made, _headrace_joined=_joined)

    def compile_bounded(self, source: str, budget: Budget) -> jinja2.Template:
        with within(budget):
            return self.from_string(_Bounding().visit(self.parse(source)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _IN_FORCE.get()
        budget.step()
        # The sandbox puts its own function around str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        made = isinstance(owner, str | bytes | int)
        if made:
            _check_method(budget, owner, name, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if made:
            budget.charge(budget.size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _IN_FORCE.get()
        budget.step()
        match operator:
            case "*":
                _check_product(budget, left, right)
            case "**" if isinstance(left, int) and isinstance(right, int) and right > 0:
                _check_bits(left.bit_length() * right)
            case "+" if not isinstance(left, int | float):
                budget.fits(budget.size(left) + budget.size(right))
            case "%" if isinstance(left, str | bytes):
                _check_format(budget, left, "%", right)
        result = super().call_binop(context, operator, left, right)
        budget.charge(budget.size(result))
        return result

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what a template, macro or block put out."""
        budget, kept = _IN_FORCE.get(), []
        for part in parts:
            budget.charge(len(part))
            kept.append(part)
        return "".join(kept)


class _Bounding(NodeTransformer):
    """Has loops, literals, slices, comparisons and `~` counted: what the environment has no hook for."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_headrace_each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_headrace_joined")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _counted(node.expr)
        for operand in node.ops:
            operand.expr = _counted(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _counted(node) if isinstance(node.arg, nodes.Slice) else node

    def _literal(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        return _counted(node)

    visit_List = visit_Dict = visit_Tuple = _literal


def _counted(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, "_headrace_made")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _each(context: Context, items: Any) -> Iterator[Any]:
    step = _IN_FORCE.get().step
    for item in items:
        step()
        yield item


@jinja2.pass_context
def _made(context: Context, value: Any) -> Any:
    budget = _IN_FORCE.get()
    budget.step()
    if isinstance(value, str | list | tuple | dict):
        budget.size(value)
    return value


@jinja2.pass_context
def _joined(context: Context, values: list[Any]) -> str:
    budget = _IN_FORCE.get()
    budget.charge(budget.size(values))
    return "".join(map(str, values))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    @wraps(function)
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _IN_FORCE.get()
        budget.step()
        if name not in _COSTLESS:
            if name in ("join", "list", "sum", "sort", "unique") and not isinstance(value, str | list | tuple):
                value = list(_each(context, value))
            budget.size(value)
            _check_filter(budget, name, value, args, kwargs)
        first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        result = function(*first.get(wanted or "", ()), value, *args, **kwargs)
        if name not in _COSTLESS and isinstance(result, str | list | tuple | dict):
            budget.charge(budget.size(result))
        return result

    bounded.jinja_pass_arg = jinja2.pass_context(lambda: None).jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


def _stepping(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        budget = _IN_FORCE.get()
        budget.step()
        for given in args[1:]:
            budget.size(given)
        return test(*args, **kwargs)

    return stepping


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise OverBudget(f"it makes an integer of more than {MAX_INT_BITS} bits")


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int) or isinstance(right, int):
        count, value = (left, right) if isinstance(left, int) else (right, left)
        budget.fits(max(count, 0) * budget.size(value))


def _check_format(budget: Budget, pattern: Any, mark: str, given: Any) -> None:
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


def _check_method(budget: Budget, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
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
        _check_format(budget, owner, "{", [*args, dict(kwargs)])
    elif name == "translate":
        raise OverBudget("it translates by a table")


def _check_filter(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    given = (*args, *kwargs.values())
    match name:
        case "replace":
            _check_replace(budget, value, given)
        case "join":
            _check_join(budget, given[0] if given else "", value)
        case "format":
            _check_format(budget, value, "%", list(given))
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
