"""Who may take a request, and what is predicted of each: the first half of placement. Pure.

Every worker is looked at for every request, so prices are lists of numbers; a Candidate, which says the same with all that
it was made from, is made for the few that are compared, and for all when somebody asks why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from router.decisions.view import View, WorkerView

EXPECTED_OUTPUT_TOKENS = 128
Side = Literal["prefill", "decode"]
Refusal = Literal["draining", "excluded", "context"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What placement must know of a request. `cached_tokens`: leading prompt tokens in full blocks, by worker; the last
    token of a prompt is computed in any case.

    `decode` pins the decode worker, for a request that it already owns. `excluded` failed this request before.
    `tie` in [0, 1) is drawn by the caller and picks among near-equals. `ttft_seconds` is what is left of the target of the
    request's class, `tpot_seconds` the target; None: it has none.
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


def who_decodes(ask: Ask, view: View, now: float) -> list[WorkerView]:
    """A worker that owns the request already keeps it, whatever became of it since."""
    if ask.decode is not None:
        return [worker for worker in view.workers if worker.decodes and worker.worker_id == ask.decode]
    num_tokens = ask.num_prompt_tokens + ask.max_tokens
    return _sound(ask, [worker for worker in view.workers if num_tokens <= worker.decode_limit], now)


def who_prefills(ask: Ask, view: View, now: float) -> list[WorkerView]:
    num_tokens = ask.num_prompt_tokens + ask.max_tokens
    return _sound(ask, [worker for worker in view.workers if num_tokens <= worker.prefill_limit], now)


def _sound(ask: Ask, workers: list[WorkerView], now: float) -> list[WorkerView]:
    """Leaves out ejected workers, whatever they hold in cache; where all are ejected, nobody gains by refusing all."""
    if ask.excluded:
        workers = [worker for worker in workers if worker.worker_id not in ask.excluded]
    if not max([worker.ejected_until for worker in workers], default=0.0):
        return workers  # as most often
    return [worker for worker in workers if worker.ejected_until <= now] or workers


# -- predict


def all_candidates(ask: Ask, view: View, now: float) -> tuple[Candidate, ...]:
    """Every worker on every side it has, with what is predicted of it or why it was refused."""
    decodes, prefills = who_decodes(ask, view, now), who_prefills(ask, view, now)
    most = most_cached(ask, held_tokens(ask, decodes), held_tokens(ask, prefills))
    taken = {("decode", worker.worker_id) for worker in decodes} | {
        ("prefill", worker.worker_id) for worker in prefills
    }
    others: list[tuple[Side, WorkerView]] = []
    if ask.decode is None:
        others += [("decode", worker) for worker in view.workers if worker.decodes]
    others += [("prefill", worker) for worker in view.workers if worker.prefills]
    return (
        *(decode_candidate(ask, worker) for worker in decodes),
        *(prefill_candidate(ask, worker, most) for worker in prefills),
        *(
            Candidate(worker.worker_id, side, _refusal(ask, worker) or "ejected")
            for side, worker in others
            if (side, worker.worker_id) not in taken
        ),
    )


def cached_tokens(ask: Ask, worker: WorkerView) -> int:
    """Prompt tokens that the worker need not compute."""
    return min(ask.cached_tokens.get(worker.worker_id, 0), ask.num_prompt_tokens - 1) if ask.cached_tokens else 0


def held_tokens(ask: Ask, workers: list[WorkerView]) -> list[int]:
    """Prompt tokens that each of them holds; the last one, which is computed in any case, among them."""
    held = ask.cached_tokens
    return [held.get(worker.worker_id, 0) for worker in workers] if held else [0] * len(workers)


def most_cached(ask: Ask, *sides: list[int]) -> int:
    """The most of the prompt that anybody holds: whatever more is computed would not have to be."""
    return min(max(max(held, default=0) for held in sides), ask.num_prompt_tokens - 1)


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


def decode_prices(ask: Ask, workers: list[WorkerView]) -> list[float]:
    """The wait for room and an expected output at the predicted TPOT: of a Candidate, without making one."""
    n, num_tokens = ask.n, ask.num_prompt_tokens
    output = EXPECTED_OUTPUT_TOKENS
    if n == 1:  # tpot_seconds(), without a call for every worker
        prices = [output * (worker.step_seconds + worker.context_seconds * num_tokens) for worker in workers]
    else:
        prices = [output * worker.tpot_seconds(n, num_tokens) for worker in workers]
    full = [at for at, worker in enumerate(workers) if n > worker.free_slots or num_tokens > worker.free_tokens]
    for at in full:
        prices[at] += _room_seconds(ask, workers[at], prices[at] / output)
    return prices


def prefill_prices(ask: Ask, workers: list[WorkerView], held: list[int], most: int) -> list[float]:
    """The queue, the uncached part, and the stall of those who wait."""
    num_tokens = ask.num_prompt_tokens
    if not most:  # nobody holds anything: as below, in half the time
        half = num_tokens / 2
        return [
            worker.begin_seconds
            + num_tokens * (worker.cost.prefill_token_seconds + worker.cost.prefill_token_context_seconds * half)
            for worker in workers
        ]
    least = num_tokens - most
    least_mean = most + least / 2
    prices: list[float] = []
    for worker, cached in zip(workers, held, strict=True):
        if cached >= num_tokens:
            cached = num_tokens - 1
        cost, left = worker.cost, num_tokens - cached
        token, context = cost.prefill_token_seconds, cost.prefill_token_context_seconds
        compute = left * (token + context * (cached + left / 2))  # prefill_seconds() but for its base, without a call
        price = worker.begin_seconds + compute
        if cached < most and (waiting := worker.load.num_waiting):  # stall_seconds(), without one
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
