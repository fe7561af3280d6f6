"""Each policy chooses what its name says, among those that may take the request and nobody else."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from cluster.simulation.policies import POLICIES
from headrace.blocks import BlockId
from headrace.costmodel import CostModel
from headrace.values import Capacity, Compatibility, Load, ParallelLayout, Role, WorkerInfo
from router.decisions.placement import Ask, NoCapacity, Placed
from router.decisions.view import View, WorkerView

ASK = Ask(num_prompt_tokens=1000, max_tokens=100)
PREFIX = [BlockId(bytes([number]) * 16) for number in range(31)]


def worker(name: str, role: Role, **load: int) -> WorkerView:
    capacity = Capacity(1000, 1000, 64, 4096, 512, 1000)
    info = WorkerInfo(name, 1, role, "", Compatibility("m", "r", "t", "c", "d", "d"), ParallelLayout(), capacity, "")
    return WorkerView(info, role, Load(**load), CostModel(), 1000)


def pools(num: int = 4) -> View:
    return View(
        tuple(worker(f"p{n}", Role.PREFILL) for n in range(num))
        + tuple(worker(f"d{n}", Role.DECODE) for n in range(num))
    )


def chosen(
    policy: str, view: View, ask: Ask = ASK, seed: int = 0, prefix: list[BlockId] = PREFIX
) -> tuple[str | None, str]:
    placed = POLICIES[policy](seed).place(ask, view, 0.0, prefix)
    assert isinstance(placed, Placed)
    return placed.prefill.worker_id if placed.prefill else None, placed.decode.worker_id


@pytest.mark.parametrize("name", POLICIES)
def test_whoever_is_chosen_has_the_role_and_may_take_it(name: str) -> None:
    view = pools()
    drained = tuple(replace(w, draining=w.worker_id in ("p0", "d0")) for w in view.workers)
    ejected = View(tuple(replace(w, ejected_until=9.0 if w.worker_id in ("p1", "d1") else 0.0) for w in drained))
    ask = replace(ASK, excluded=frozenset({"p2", "d2"}))
    for seed in range(5):
        assert chosen(name, ejected, ask, seed) == ("p3", "d3")


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_is_chosen_where_nobody_may_take_it(name: str) -> None:
    nobody = View(tuple(replace(w, draining=True) for w in pools().workers))
    assert isinstance(POLICIES[name](0).place(ASK, nobody, 0.0, PREFIX), NoCapacity)
    too_long = replace(ASK, max_tokens=4000)
    assert isinstance(POLICIES[name](0).place(too_long, pools(), 0.0, PREFIX), NoCapacity)


@pytest.mark.parametrize("name", POLICIES)
def test_a_worker_that_owns_the_request_keeps_it(name: str) -> None:
    assert chosen(name, pools(), replace(ASK, decode="d2"))[1] == "d2"


@pytest.mark.parametrize("name", POLICIES)
def test_without_prefill_workers_the_decode_worker_prefills(name: str) -> None:
    view = View(tuple(worker(f"u{n}", Role.UNIFIED) for n in range(3)))
    prefill, decode = chosen(name, view)
    assert prefill is None
    assert decode.startswith("u")


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_cached_need_not_be_computed(name: str) -> None:
    placed = POLICIES[name](0).place(replace(ASK, cached_tokens={"p0": 512}), pools(1), 0.0, PREFIX)
    assert isinstance(placed, Placed)
    assert (placed.cached_tokens, placed.prefill_tokens) == (512, 488)


def test_least_load_takes_the_least_and_draws_among_equals() -> None:
    view = View(
        (
            worker("p0", Role.PREFILL, waiting_prefill_tokens=10),
            worker("p1", Role.PREFILL),
            worker("p2", Role.PREFILL),
            worker("d0", Role.DECODE, num_running=3),
            worker("d1", Role.DECODE, num_running=1, num_waiting=1),
        )
    )
    found = Counter(chosen("least-load", view, seed=seed) for seed in range(40))
    assert set(found) == {("p1", "d1"), ("p2", "d1")}


def test_power_of_two_never_takes_the_worst() -> None:
    view = View(
        tuple(worker(f"p{n}", Role.PREFILL, waiting_prefill_tokens=n) for n in range(4))
        + tuple(worker(f"d{n}", Role.DECODE, num_running=n) for n in range(4))
    )
    found = [chosen("power-of-two", view, seed=seed) for seed in range(80)]
    assert {prefill for prefill, _ in found} == {"p0", "p1", "p2"}
    assert {decode for _, decode in found} == {"d0", "d1", "d2"}


def test_round_robin_takes_turns() -> None:
    policy, view = POLICIES["round-robin"](0), pools(3)
    found = Counter()  # type: Counter[str]
    for _ in range(9):
        placed = policy.place(ASK, view, 0.0, PREFIX)
        assert isinstance(placed, Placed)
        found[placed.decode.worker_id] += 1
    assert set(found.values()) == {3}


def test_sticky_follows_the_first_blocks_whoever_else_there_is() -> None:
    random = Random(1)
    firsts = [[BlockId(random.randbytes(16)) for _ in range(16)] for _ in range(60)]
    few, many = pools(4), pools(5)
    homes = [chosen("sticky", few, seed=seed, prefix=first)[0] for seed, first in enumerate(firsts)]
    assert homes == [chosen("sticky", few, seed=0, prefix=[*first, *PREFIX])[0] for first in firsts]
    assert len(set(homes)) == 4
    moved = [
        a for a, first in zip(homes, firsts, strict=True) if chosen("sticky", many, prefix=first)[0] not in (a, "p4")
    ]
    assert not moved, "a new worker takes its share and moves nothing else"


def test_longest_prefix_goes_where_most_is_held_whatever_waits_there() -> None:
    view = View(
        (
            worker("p0", Role.PREFILL, waiting_prefill_tokens=100_000),
            worker("p1", Role.PREFILL),
            worker("d0", Role.DECODE),
        )
    )
    assert chosen("longest-prefix", view, replace(ASK, cached_tokens={"p0": 64}))[0] == "p0"
    assert chosen("longest-prefix", view)[0] == "p1"
