"""The sandbox of chat templates: whatever one does is counted against the budget that is in force."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from router.text.budget import Budget, check_bits, in_force, within
from router.text.estimates import check_filter, check_format, check_method, check_product

_COSTLESS = frozenset({"length", "count", "first", "last", "default", "d", "string", "safe", "items", "attr"})


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
        budget = in_force()
        budget.step()
        # The sandbox puts its own function around str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        made = isinstance(owner, str | bytes | int)
        if made:
            check_method(budget, owner, name, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if made:
            budget.charge(budget.size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = in_force()
        budget.step()
        match operator:
            case "*":
                check_product(budget, left, right)
            case "**" if isinstance(left, int) and isinstance(right, int) and right > 0:
                check_bits(left.bit_length() * right)
            case "+" if not isinstance(left, int | float):
                budget.fits(budget.size(left) + budget.size(right))
            case "%" if isinstance(left, str | bytes):
                check_format(budget, left, "%", right)
        result = super().call_binop(context, operator, left, right)
        budget.charge(budget.size(result))
        return result

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what a template, macro or block put out."""
        budget, kept = in_force(), []
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
    step = in_force().step
    for item in items:
        step()
        yield item


@jinja2.pass_context
def _made(context: Context, value: Any) -> Any:
    budget = in_force()
    budget.step()
    if isinstance(value, str | list | tuple | dict):
        budget.size(value)
    return value


@jinja2.pass_context
def _joined(context: Context, values: list[Any]) -> str:
    budget = in_force()
    budget.charge(budget.size(values))
    return "".join(map(str, values))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    @wraps(function)
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = in_force()
        budget.step()
        if name not in _COSTLESS:
            if name in ("join", "list", "sum", "sort", "unique") and not isinstance(value, str | list | tuple):
                value = list(_each(context, value))
            budget.size(value)
            check_filter(budget, name, value, args, kwargs)
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
        budget = in_force()
        budget.step()
        for given in args[1:]:
            budget.size(given)
        return test(*args, **kwargs)

    return stepping
