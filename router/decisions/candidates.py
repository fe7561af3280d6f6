"""Who may take a request, and what is predicted of each: the first half of placement. Pure.

Every worker is looked at for every request, so prices are lists of numbers, worked out of a pool's columns; a Candidate,
which says the same with all that it was made from, is made for the few that are compared, and for all when somebody asks
why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from router.decisions.view import DECODES, Pool, View, WorkerView

EXPECTED_OUTPUT_TOKENS = 128
Side = Literal["prefill", "decode"]
Refusal = Literal["draining", "excluded", "context"]


@dataclass(slots=True)
class Ask:
    """What placement must know of a request. `cached_tokens`: leading prompt tokens in full blocks, by worker; the last
    token of a prompt is computed in any case.

    `decode` pins the decode worker, for a request that it already owns. `excluded` failed this request before.
    `tie` in [0, 1) is drawn by the caller and picks among near-equals. `ttft_seconds` is what is left of the target of the
    request's class, `tpot_seconds` the target; None: it has none. Nobody changes one, as of a Candidate.
    """

    num_prompt_tokens: int
    max_tokens: int
    n: int = 1
    cached_tokens: Mapping[str, int] | None = None
    local_prefill_max_tokens: int = 0
    decode: str | None = None
    excluded: frozenset[str] = frozenset()
    tie: float = 0.0
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None


@dataclass(slots=True)
class Candidate:
    """One worker in one role, with what was predicted of it. `refused` says why it was not considered.

    Nobody changes one; it is not frozen because freezing costs five times as much. The same goes for Pair.
    """

    worker_id: str
    role: Side
    refused: str | None = None
    cached_tokens: int = 0
    wait_seconds: float = 0.0
    prefill_seconds: float = 0.0
    tpot_seconds: float = 0.0
    stall_seconds: float = 0.0


# -- filter


def who_decodes(ask: Ask, view: View, now: float) -> Pool:
    """A worker that owns the request already keeps it, whatever became of it since."""
    if ask.decode is None:
        return _sound(ask, view.decodes, now)
    owner = view.find(ask.decode)
    return Pool.of(DECODES, [owner] if owner is not None and owner.decodes else [])


def who_prefills(ask: Ask, view: View, now: float) -> Pool:
    return _sound(ask, view.prefills, now)


def _sound(ask: Ask, pool: Pool, now: float) -> Pool:
    """Leaves out those that take no such request, and ejected workers, whatever they hold in cache; where all are ejected,
    nobody gains by refusing all. Most often that is nobody."""
    num_tokens = ask.num_prompt_tokens + ask.max_tokens
    if num_tokens > pool.members.least_limit:
        pool = pool.only([num_tokens <= limit for limit in pool.members.limits])
    if ask.excluded:
        pool = pool.only([worker_id not in ask.excluded for worker_id in pool.members.ids])
    if pool.members.last_ejection > now:
        well = [until <= now for until in pool.members.ejected_until]
        if any(well):
            pool = pool.only(well)
    return pool


# -- predict


def all_candidates(ask: Ask, view: View, now: float) -> tuple[Candidate, ...]:
    """Every worker on every side it has, with what is predicted of it or why it was refused."""
    decodes, prefills = who_decodes(ask, view, now), who_prefills(ask, view, now)
    most = most_cached(ask, held_tokens(ask, decodes), held_tokens(ask, prefills))
    taken = {("decode", worker_id) for worker_id in decodes.members.ids} | {
        ("prefill", worker_id) for worker_id in prefills.members.ids
    }
    others: list[tuple[Side, WorkerView]] = []
    if ask.decode is None:
        others += [("decode", worker) for worker in view.workers if worker.decodes]
    others += [("prefill", worker) for worker in view.workers if worker.prefills]
    return (
        *(decode_candidate(ask, worker) for worker in decodes.workers),
        *(prefill_candidate(ask, worker, most) for worker in prefills.workers),
        *(
            Candidate(worker.worker_id, side, _refusal(ask, worker) or "ejected")
            for side, worker in others
            if (side, worker.worker_id) not in taken
        ),
    )


def cached_tokens(ask: Ask, worker: WorkerView) -> int:
    """Prompt tokens that the worker need not compute."""
    return min(ask.cached_tokens.get(worker.worker_id, 0), ask.num_prompt_tokens - 1) if ask.cached_tokens else 0


def held_tokens(ask: Ask, pool: Pool) -> list[int]:
    """Prompt tokens that each of them holds; the last one, which is computed in any case, among them."""
    held, ids = ask.cached_tokens, pool.members.ids
    return [held.get(worker_id, 0) for worker_id in ids] if held else [0] * len(ids)


def most_cached(ask: Ask, *sides: list[int]) -> int:
    """The most of the prompt that anybody holds: whatever more is computed would not have to be."""
    return min(max([max(held, default=0) for held in sides]), ask.num_prompt_tokens - 1)


def decode_candidate(ask: Ask, worker: WorkerView) -> Candidate:
    tpot = worker.tpot_seconds(ask.n, ask.num_prompt_tokens)
    cached = cached_tokens(ask, worker)
    compute = worker.cost.prefill_seconds(ask.num_prompt_tokens - cached, cached)
    fits = ask.n <= worker.free_slots and ask.num_prompt_tokens <= worker.free_tokens
    room = 0.0 if fits else _room_seconds(ask, worker, tpot)
    return Candidate(worker.worker_id, "decode", None, cached, room, compute, tpot)


def prefill_candidate(ask: Ask, worker: WorkerView, most: int) -> Candidate:
    cached = cached_tokens(ask, worker)
    compute = worker.cost.prefill_seconds(ask.num_prompt_tokens - cached, cached)
    stall = stall_seconds(ask, worker, compute, most)
    return Candidate(worker.worker_id, "prefill", None, cached, worker.queue_seconds, compute, stall_seconds=stall)


def stall_seconds(ask: Ask, worker: WorkerView, compute: float, most: int) -> float:
    """How long others wait because `compute` seconds of prefill are more than it takes where `most` tokens are cached:
    those who wait on the worker now, for as many will come while it is busy. What must be computed somewhere is no reason
    to go elsewhere."""
    waiting = worker.load.num_waiting
    return waiting * (compute - worker.cost.prefill_seconds(ask.num_prompt_tokens - most, most)) if waiting else 0.0


def _refusal(ask: Ask, worker: WorkerView) -> Refusal | None:
    """Which of the reasons it was, if any but the worker's health."""
    if worker.draining:
        return "draining"
    if worker.worker_id in ask.excluded:
        return "excluded"
    return "context" if ask.num_prompt_tokens + ask.max_tokens > worker.max_context_tokens else None


def _room_seconds(ask: Ask, worker: WorkerView, tpot: float) -> float:
    """How long until the worker has a free row and the blocks for this request: ended sequences make room, one every
    `tpot` × half an expected output ÷ their number."""
    running = max(worker.load.num_running, 1)
    mean_tokens = max(worker.load.context_tokens // running, 1)
    missing_rows = max(ask.n - worker.free_slots, 0)
    missing_tokens = max(ask.num_prompt_tokens - worker.free_tokens, 0)
    endings = max(missing_rows, ceil(missing_tokens / mean_tokens))
    return endings * tpot * EXPECTED_OUTPUT_TOKENS / 2 / running


# -- prices


def decode_prices(ask: Ask, pool: Pool) -> list[float]:
    """The wait for room and an expected output at the predicted TPOT: of a Candidate, without making one."""
    n, num_tokens = ask.n, ask.num_prompt_tokens
    output = EXPECTED_OUTPUT_TOKENS
    steps, contexts, free_slots, free_tokens = pool.columns
    if n == 1:  # tpot_seconds(), without a call for every worker
        prices = [output * (step + context * num_tokens) for step, context in zip(steps, contexts, strict=True)]
    else:
        prices = [output * worker.tpot_seconds(n, num_tokens) for worker in pool.workers]
    if prices and (n > min(free_slots) or num_tokens > min(free_tokens)):
        for at, worker in enumerate(pool.workers):
            if n > free_slots[at] or num_tokens > free_tokens[at]:
                prices[at] += _room_seconds(ask, worker, prices[at] / output)
    return prices


def prefill_prices(ask: Ask, pool: Pool, held: list[int], most: int) -> list[float]:
    """The queue, the uncached part, and the stall of those who wait."""
    num_tokens, half = ask.num_prompt_tokens, ask.num_prompt_tokens / 2
    if not most:  # nobody holds anything: as below, in half the time
        begins, tokens, contexts, _ = pool.columns
        return [
            begin + num_tokens * (token + context * half)
            for begin, token, context in zip(begins, tokens, contexts, strict=True)
        ]
    least = num_tokens - most
    least_mean = most + least / 2
    prices: list[float] = []
    for begin, token, context, waiting, cached in zip(*pool.columns, held, strict=True):
        if cached >= num_tokens:
            cached = num_tokens - 1
        left = num_tokens - cached
        compute = left * (token + context * (cached + left / 2))  # prefill_seconds() but for its base, without a call
        price = begin + compute
        if cached < most and waiting:  # stall_seconds(), without one
            price += waiting * (compute - least * (token + context * least_mean))
        prices.append(price)
    return prices


def why_nobody_decodes(ask: Ask, view: View) -> Literal["no_workers", "draining", "context", "excluded"]:
    reasons = {_refusal(ask, worker) for worker in view.workers if worker.decodes}
    if "context" in reasons:
        return "context"
    if "excluded" in reasons:
        return "excluded"
    return "draining" if "draining" in reasons else "no_workers"
