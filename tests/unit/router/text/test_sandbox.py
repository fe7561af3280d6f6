"""Templates that would loop for ever, or fill the memory, end with a 400 instead. Each is a kind, in its shortest form."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from headrace.errors import CheckpointError, InvalidRequest
from router.text.budget import Budget, OverBudget
from router.text.templates import ChatTemplates

BIG = "{% set ns = namespace(x='ab', s=[1]) %}{% for i in range(40) %}"
EXPLOSIVE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long range": "{% for a in range(10**9) %}{% endfor %}",
    "a loop that filters": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a tower of powers": "{{ 9**(9**9) }}",
    "a power of products": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a long text": "{{ 'x' * 10**10 }}",
    "the other way round": "{{ 10**10 * 'x' }}",
    "a long list": "{{ [1] * 10**10 }}",
    "doubled by +": BIG + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "doubled by ~": BIG + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "doubled by %": BIG + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubled by format": BIG + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubled by the format filter": BIG + "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}{% endfor %}",
    "doubled by replace": BIG + "{% set ns.x = ns.x.replace('b', ns.x) %}{% endfor %}",
    "doubled by the replace filter": BIG + "{% set ns.x = ns.x|replace('b', ns.x) %}{% endfor %}",
    "doubled by join": BIG + "{% set ns.x = ns.x.join(['', ns.x, '']) %}{% endfor %}",
    "doubled by the join filter": BIG + "{% set ns.x = ['', ns.x, '']|join(ns.x) %}{% endfor %}",
    "doubled by a block": BIG + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "doubled by a macro": "{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}" + BIG + "{% set ns.x = m(ns.x) %}{% endfor %}",
    "doubled by a list in itself": BIG + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "doubled by a dict in itself": BIG + "{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s|tojson }}",
    "doubled by + of lists": BIG + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "lists compared": BIG + "{% set ns.s = (ns.s, ns.s) %}{% endfor %}{{ ns.s == ns.s }}",
    "deep lists": "{% set ns = namespace(s=[]) %}{% for i in range(99999) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}",
    "one text many times": "{% set x = 'x' * 10**6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "literal text many times": "{% for i in range(99999) %}" + "x" * 10**4 + "{% endfor %}",
    "a long text many times in a list": "{{ ([('x' * 10**6)] * 10**5)|join }}",
    "a wide center": "{{ 'x'.center(10**10) }}",
    "a wide center filter": "{{ 'x'|center(1000000000) }}",
    "a wide ljust": "{{ 'x'.ljust(10**10) }}",
    "a wide zfill": "{{ '1'.zfill(10**10) }}",
    "wide tabs": "{{ ('\t' * 10**4).expandtabs(10**6) }}",
    "a wide number": "{{ (1).to_bytes(10**10, 'big') }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide format by argument": "{{ '%*d' % (10**10, 1) }}",
    "a wide str.format": "{{ '{:10000000000}'.format(1) }}",
    "a wide str.format by argument": "{{ '{:{}}'.format(1, 10**10) }}",
    "a wide indent": "{{ ('\n' * 10**6)|indent(10**6, true, true) }}",
    "an indent of text": "{{ ('\n' * 10**6)|indent('x' * 10**6, true, true) }}",
    "a wide JSON": "{{ range(9999)|list|tojson(indent=10**9) }}",
    "a precise round": "{{ 2|round(10**10) }}",
    "batches": "{{ [1]|batch(10**10, 'x')|list }}",
    "slices": "{{ [1]|slice(10**10)|list }}",
    "a sum of lists": "{{ ([[1, 2, 3]] * 10**4)|sum(start=[]) }}",
    "a search in a long list": "{% set l = range(99999)|list %}{{ l|select('in', l[:1] + l)|list|length }}",
    "a membership in a loop": "{% set l = range(99999)|list %}{% for a in l %}{{ -1 in l }}{% endfor %}",
    "slices in a loop": "{% set x = 'x' * 10**6 %}{% for a in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "namespaces in each other": "{% set ns = namespace(a=namespace(), b=1) %}{% for i in range(40) %}"
    "{% set n = namespace(a=ns.a, b=ns.a) %}{% set ns.a = n %}{% endfor %}{{ 'x' * 10**10 }}",
}


def messages_of(length: int = 1) -> list[dict[str, str]]:
    return [{"role": "user", "content": "hello"} for _ in range(length)]


@pytest.mark.parametrize("source", EXPLOSIVE.values(), ids=EXPLOSIVE)
def test_an_explosive_template_ends_with_an_error_that_names_the_messages(source: str) -> None:
    with pytest.raises((InvalidRequest, CheckpointError), match="template"):
        ChatTemplates({"default": source}, {}).render(messages_of())


def test_none_of_them_takes_much_memory() -> None:
    code = (
        "import contextlib, resource\n"
        "from tests.unit.router.text.test_sandbox import EXPLOSIVE, messages_of\n"
        "from headrace.errors import HeadraceError\n"
        "from router.text.templates import ChatTemplates\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for source in EXPLOSIVE.values():\n"
        "    with contextlib.suppress(HeadraceError):\n"
        "        ChatTemplates({'default': source}, {}).render(messages_of())\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    grown = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, timeout=100).stdout
    assert int(grown) < 256 * 2**10, "KiB"


def test_a_client_cannot_make_a_good_template_explode_by_its_variables() -> None:
    templates = ChatTemplates({"default": "{% for i in range(n) %}{{ pad * n }}{% endfor %}"}, {})
    assert templates.render(messages_of(), kwargs={"n": 3, "pad": "x"}) == "x" * 9
    with pytest.raises(InvalidRequest, match="within bounds"):
        templates.render(messages_of(), kwargs={"n": 99999, "pad": "x"})


@pytest.mark.parametrize("made", ["x.upper()", "x | upper", "x ~ x", "x + x", "'%s' % x"])
def test_what_is_made_in_all_is_bounded_however_it_is_made(made: str) -> None:
    """And not by the time alone that it takes."""
    source = f"{{% set x = 'x' * 10**5 %}}{{% for i in range(1500) %}}{{% set y = {made} %}}{{% endfor %}}"
    with pytest.raises(InvalidRequest, match="makes more than"):
        ChatTemplates({"default": source}, {}).render(messages_of())


def test_what_is_too_deep_to_compile_is_refused_at_start() -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplates({"default": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"}, {})


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}{{ messages|length }}"


def test_ordinary_chats_are_rendered_at_once_and_long_ones_are_left_to_a_thread() -> None:
    templates = ChatTemplates({"default": CHAT}, {})
    assert templates.render_briefly(messages_of(20)) == "<user>hello" * 20 + "20"
    assert templates.render_briefly(messages_of(20_000)) is None
    assert templates.render(messages_of(20_000)).endswith("<user>hello20000")
    long = [{"role": "user", "content": "word " * 400_000}]
    assert templates.render_briefly(long) is None
    assert len(templates.render(long)) == len("<user>1") + 2_000_000 - 1


@pytest.mark.parametrize("spend", [lambda budget: budget.step(11), lambda budget: budget.charge(101)])
def test_a_budget_is_spent_once(spend: Callable[[Budget], None]) -> None:
    with pytest.raises(OverBudget):
        spend(Budget(10, 200, 100, 1.0))


def test_a_budget_ends_with_its_time_too() -> None:
    now = 0.0
    budget = Budget(10_000, 10, 10, 1.0, lambda: now)
    budget.step(1000)
    now = 1.5
    with pytest.raises(OverBudget, match="more than 1 s"):
        budget.step(1000)
