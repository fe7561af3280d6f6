"""Policies to compare ours with, behind one Protocol. All see the same view, own ledger and index as ours does.

A policy chooses among the workers that may take the request, as `router.decisions.placement` does: its pool's role, not
draining, not excluded, not ejected, context long enough. In a pool of unified workers the decode worker prefills.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import Protocol

from headrace.blocks import BlockId
from router.decisions.placement import Ask, Decided, NoCapacity, Placed, Placement, place
from router.decisions.view import View, WorkerView

STICKY_BLOCKS = 16


class Policy(Protocol):
    """`prefix`: the ids of the prompt's full blocks."""

    def place(self, ask: Ask, view: View, now: float, prefix: Sequence[BlockId]) -> Placement: ...


class Ours:
    """What production does."""

    def place(self, ask: Ask, view: View, now: float, prefix: Sequence[BlockId]) -> Placement:
        return place(ask, view, now)


Choose = Callable[[Ask, list[WorkerView], Sequence[BlockId]], WorkerView]


class Simple:
    """One choice for whoever prefills and one for whoever decodes, each by itself."""

    def __init__(self, name: str, prefill: Choose, decode: Choose) -> None:
        self._name = name
        self._prefill = prefill
        self._decode = decode

    def place(self, ask: Ask, view: View, now: float, prefix: Sequence[BlockId]) -> Placement:
        workers = [worker for worker in view.workers if _may_take(ask, worker, now)]
        decodes = [worker for worker in workers if worker.role.decodes]
        if ask.decode is not None:
            decodes = [worker for worker in view.workers if worker.worker_id == ask.decode]
        prefills = [worker for worker in workers if worker.role.prefills and not worker.role.decodes]
        decided = Decided(ask, view, now, reason=self._name)
        if not decodes:
            return NoCapacity("excluded" if ask.excluded else "no_workers", decided)
        if not prefills:
            decode = self._prefill(ask, decodes, prefix)
            return self._placed(ask, decode, None, decided)
        return self._placed(ask, self._decode(ask, decodes, prefix), self._prefill(ask, prefills, prefix), decided)

    def _placed(self, ask: Ask, decode: WorkerView, prefill: WorkerView | None, decided: Decided) -> Placed:
        cached = min(_held(ask, prefill or decode), ask.num_prompt_tokens - 1)
        return Placed(decode, prefill, cached, ask.num_prompt_tokens - cached, decided)


def _may_take(ask: Ask, worker: WorkerView, now: float) -> bool:
    fits = ask.num_prompt_tokens + ask.max_tokens <= worker.info.capacity.max_context_tokens
    return fits and not worker.draining and worker.worker_id not in ask.excluded and now >= worker.ejected_until


def _held(ask: Ask, worker: WorkerView) -> int:
    return ask.cached_tokens.get(worker.worker_id, 0) if ask.cached_tokens else 0


def prompt_load(worker: WorkerView) -> float:
    """What waits to be prefilled there, in tokens; where none does, who has more to do otherwise comes later."""
    return worker.load.waiting_prefill_tokens + 1e-6 * (worker.load.num_running + worker.load.num_waiting)


def sequence_load(worker: WorkerView) -> float:
    return worker.load.num_running + worker.load.num_waiting


def _least(load: Callable[[WorkerView], float], random: Random) -> Choose:
    def choose(ask: Ask, workers: list[WorkerView], prefix: Sequence[BlockId]) -> WorkerView:
        loads = [load(worker) for worker in workers]
        least = min(loads)
        return random.choice([worker for worker, its in zip(workers, loads, strict=True) if its == least])

    return choose


def _random(seed: Random) -> Choose:
    return lambda ask, workers, prefix: seed.choice(workers)


def _round_robin() -> Choose:
    turn = 0

    def choose(ask: Ask, workers: list[WorkerView], prefix: Sequence[BlockId]) -> WorkerView:
        nonlocal turn
        turn += 1
        return workers[turn % len(workers)]

    return choose


def _power_of_two(load: Callable[[WorkerView], float], random: Random) -> Choose:
    def choose(ask: Ask, workers: list[WorkerView], prefix: Sequence[BlockId]) -> WorkerView:
        if len(workers) == 1:
            return workers[0]
        return min(random.sample(workers, 2), key=load)

    return choose


def _sticky(otherwise: Choose) -> Choose:
    """By rendezvous hashing of the prompt's first STICKY_BLOCKS blocks; a prompt of less than a block goes anywhere."""

    def choose(ask: Ask, workers: list[WorkerView], prefix: Sequence[BlockId]) -> WorkerView:
        if not prefix:
            return otherwise(ask, workers, prefix)
        key = prefix[min(len(prefix), STICKY_BLOCKS) - 1]
        return max(workers, key=lambda worker: blake2b(worker.worker_id.encode(), key=key, digest_size=8).digest())

    return choose


def _longest_prefix(otherwise: Choose) -> Choose:
    """Whoever holds most of the prompt, whatever waits there; among equals the least load."""

    def choose(ask: Ask, workers: list[WorkerView], prefix: Sequence[BlockId]) -> WorkerView:
        held = [_held(ask, worker) for worker in workers]
        most = max(held)
        return otherwise(ask, [w for w, its in zip(workers, held, strict=True) if its == most], prefix)

    return choose


def _simple(name: str, make: Callable[[Random], tuple[Choose, Choose]]) -> Callable[[int], Policy]:
    return lambda seed: Simple(name, *make(Random(f"{name} {seed}")))


POLICIES: dict[str, Callable[[int], Policy]] = {
    "random": _simple("random", lambda r: (_random(r), _random(r))),
    "round-robin": _simple("round-robin", lambda r: (_round_robin(), _round_robin())),
    "least-load": _simple("least-load", lambda r: (_least(prompt_load, r), _least(sequence_load, r))),
    "power-of-two": _simple("power-of-two", lambda r: (_power_of_two(prompt_load, r), _power_of_two(sequence_load, r))),
    "sticky": _simple("sticky", lambda r: (_sticky(_least(prompt_load, r)), _least(sequence_load, r))),
    "longest-prefix": _simple(
        "longest-prefix", lambda r: (_longest_prefix(_least(prompt_load, r)), _least(sequence_load, r))
    ),
    "ours": lambda seed: Ours(),
}
