"""Where a request runs: a pure function of the request and the view, which also says why (design 2.3).

    filter → predict each candidate → price pairs among the best few, and decode alone → pick among near-equals

All prices are seconds. A pair's price is what everyone waits because of it: the request's time to its first token,
its output at the predicted TPOT, and the stall of others: of the prompts that wait on the prefill worker (as many will
come while it is busy as wait there now), or, where the decode worker prefills by itself, of those it decodes.

Where decode holds more of the prompt than prefill there are three ways: prefill computes it again, prefill pulls it from
decode, decode does the rest alone. The first two are one pair, at the lower of their prices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import ceil
from typing import Literal

from router.decisions.view import View, WorkerView

BEST_FEW = 4
EXPECTED_OUTPUT_TOKENS = 128
NEAR_EQUAL_RATIO = 0.05
NEAR_EQUAL_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Ask:
    """What placement must know of a request. `cached_tokens`: leading prompt tokens in full blocks, by worker; the last
    token of a prompt is computed in any case.

    `decode` pins the decode worker, for a request that it already owns. `excluded` failed this request before.
    `tie` in [0, 1) is drawn by the caller and picks among near-equals.
    """

    num_prompt_tokens: int
    max_tokens: int
    n: int = 1
    cached_tokens: Mapping[str, int] | None = None
    local_prefill_max_tokens: int = 0
    decode: str | None = None
    excluded: frozenset[str] = frozenset()
    tie: float = 0.0


@dataclass(slots=True)
class Candidate:
    """One worker in one role, with what was predicted of it. `refused` says why it was not considered.

    Nobody changes one; it is not frozen because one is made for every worker and request, and freezing costs five times
    as much. The same goes for Pair.
    """

    worker_id: str
    role: Literal["prefill", "decode"]
    refused: str | None = None
    cached_tokens: int = 0
    wait_seconds: float = 0.0
    prefill_seconds: float = 0.0
    tpot_seconds: float = 0.0
    stall_seconds: float = 0.0


@dataclass(slots=True)
class Pair:
    """A priced way to run the request; `prefill` None: the decode worker prefills alone. `pulled_tokens`: what the prefill
    worker reads of the decode worker's cache, before it computes the rest."""

    decode: str
    prefill: str | None
    ttft_seconds: float
    transfer_seconds: float
    tpot_seconds: float
    stall_seconds: float
    price_seconds: float
    pulled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Why:
    """Everything the decision was made from, and the decision: enough to make it again."""

    ask: Ask
    candidates: tuple[Candidate, ...]
    pairs: tuple[Pair, ...] = ()
    chosen: Pair | None = None
    num_near_equals: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """`prefill_tokens`: what the prefilling worker is expected to compute; `cached_tokens`: what it has, or pulls."""

    decode: WorkerView
    prefill: WorkerView | None
    cached_tokens: int
    prefill_tokens: int
    why: Why

    @property
    def pulls(self) -> bool:
        """The prefill worker is to pull what the decode worker holds and it lacks."""
        return self.prefill is not None and self.why.chosen is not None and self.why.chosen.pulled_tokens > 0


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """Nobody can take the request. `no_workers`: none that decodes is known; else all known ones were refused."""

    reason: Literal["no_workers", "draining", "context", "excluded"]
    why: Why


Placement = Placed | NoCapacity


def place(ask: Ask, view: View, now: float) -> Placement:
    """The workers for a request, and why those."""
    decodes, refused_decodes = _decode_candidates(ask, view, now)
    prefills, refused_prefills = _prefill_candidates(ask, view, now)
    candidates = (*decodes.values(), *prefills.values(), *refused_decodes, *refused_prefills)
    if not decodes:
        return NoCapacity(_why_none(refused_decodes), Why(ask, candidates, reason="nobody decodes"))
    workers = {worker.worker_id: worker for worker in view.workers}
    pairs, tie = _priced(ask, workers, decodes, prefills)
    chosen, num_near_equals = _pick(pairs, tie)
    decode = workers[chosen.decode]
    prefill = workers[chosen.prefill] if chosen.prefill is not None else None
    cached = (decodes[chosen.decode] if chosen.prefill is None else prefills[chosen.prefill]).cached_tokens
    cached += chosen.pulled_tokens
    why = Why(ask, candidates, tuple(pairs), chosen, num_near_equals, _reason(chosen, decode, prefills))
    return Placed(decode, prefill, cached, ask.num_prompt_tokens - cached, why)


def _decode_candidates(ask: Ask, view: View, now: float) -> tuple[dict[str, Candidate], list[Candidate]]:
    taken: dict[str, Candidate] = {}
    refused: list[Candidate] = []
    ejected: set[str] = set()
    num_prompt_tokens, held, excluded = ask.num_prompt_tokens, ask.cached_tokens or {}, ask.excluded
    num_tokens = num_prompt_tokens + ask.max_tokens
    for worker in view.workers:
        worker_id = worker.worker_id
        if not worker.decodes or (ask.decode is not None and worker_id != ask.decode):
            continue
        # A worker that owns the request already keeps it, whatever became of it since.
        if ask.decode is None and (worker.draining or num_tokens > worker.max_context_tokens or worker_id in excluded):
            refused.append(Candidate(worker_id, "decode", _refusal(ask, worker)))
            continue
        if now < worker.ejected_until:
            ejected.add(worker_id)
        running = worker.num_sequences + ask.n
        if running > worker.max_num_seqs:
            running = worker.max_num_seqs
        tpot = worker.cost.decode_step_seconds(running, worker.load.context_tokens + num_prompt_tokens)
        cached = held.get(worker_id, 0)
        if cached >= num_prompt_tokens:
            cached = num_prompt_tokens - 1
        compute = worker.cost.prefill_seconds(num_prompt_tokens - cached, cached)
        fits = ask.n <= worker.free_slots and num_prompt_tokens <= worker.free_tokens
        room = 0.0 if fits else _room_seconds(ask, worker, tpot)
        taken[worker_id] = Candidate(worker_id, "decode", None, cached, room, compute, tpot)
    return _sound(taken, refused, "decode", ejected), refused


def _prefill_candidates(ask: Ask, view: View, now: float) -> tuple[dict[str, Candidate], list[Candidate]]:
    taken: dict[str, Candidate] = {}
    refused: list[Candidate] = []
    ejected: set[str] = set()
    num_prompt_tokens, held, excluded = ask.num_prompt_tokens, ask.cached_tokens or {}, ask.excluded
    num_tokens = num_prompt_tokens + ask.max_tokens
    for worker in view.workers:
        if not worker.prefills:
            continue
        worker_id = worker.worker_id
        if worker.draining or num_tokens > worker.max_context_tokens or worker_id in excluded:
            refused.append(Candidate(worker_id, "prefill", _refusal(ask, worker)))
            continue
        if now < worker.ejected_until:
            ejected.add(worker_id)
        cached = held.get(worker_id, 0)
        if cached >= num_prompt_tokens:
            cached = num_prompt_tokens - 1
        compute = worker.cost.prefill_seconds(num_prompt_tokens - cached, cached)
        stall = compute * worker.load.num_waiting
        wait = worker.queue_seconds
        taken[worker_id] = Candidate(worker_id, "prefill", None, cached, wait, compute, stall_seconds=stall)
    return _sound(taken, refused, "prefill", ejected), refused


def _refusal(ask: Ask, worker: WorkerView) -> str:
    """Which of the reasons it was."""
    if worker.draining:
        return "draining"
    return "excluded" if worker.worker_id in ask.excluded else "context"


def _sound(
    taken: dict[str, Candidate], refused: list[Candidate], role: Literal["prefill", "decode"], ejected: set[str]
) -> dict[str, Candidate]:
    """Leaves out ejected workers, whatever they hold in cache; where all are ejected, nobody gains by refusing all."""
    if not ejected or len(ejected) == len(taken):
        return taken
    refused.extend(Candidate(worker_id, role, "ejected") for worker_id in sorted(ejected))
    return {worker_id: candidate for worker_id, candidate in taken.items() if worker_id not in ejected}


def _room_seconds(ask: Ask, worker: WorkerView, tpot: float) -> float:
    """How long until the worker has a free row and the blocks for this request: ended sequences make room, one every
    `tpot` × half an expected output ÷ their number."""
    running = max(worker.load.num_running, 1)
    mean_tokens = max(worker.load.context_tokens // running, 1)
    missing_rows = max(ask.n - worker.free_slots, 0)
    missing_tokens = max(ask.num_prompt_tokens - worker.free_tokens, 0)
    endings = max(missing_rows, ceil(missing_tokens / mean_tokens))
    return endings * tpot * EXPECTED_OUTPUT_TOKENS / 2 / running


def _priced(
    ask: Ask, workers: Mapping[str, WorkerView], decodes: Mapping[str, Candidate], prefills: Mapping[str, Candidate]
) -> tuple[list[Pair], float]:
    """The pairs worth comparing, and what is left of the draw."""
    best_decodes, tie = _best_few([*decodes.values()], _decode_price, BEST_FEW, ask.tie)
    best_prefills, tie = _best_few([*prefills.values()], _prefill_price, BEST_FEW + 1, tie)
    warmest = max(decodes.values(), key=lambda c: c.cached_tokens)
    pairs: list[Pair] = []
    chosen = (*best_decodes, warmest) if warmest.cached_tokens else best_decodes
    for candidate in {c.worker_id: c for c in chosen}.values():
        decode = workers[candidate.worker_id]
        partners = [p for p in best_prefills if _may_pair(decode, workers[p.worker_id])][:BEST_FEW]
        pairs.extend(_pair(ask, decode, candidate, workers[p.worker_id], p) for p in partners)
        if _may_prefill_alone(ask, decode, candidate, partners):
            pairs.append(_alone(ask, decode, candidate))
    return pairs, tie


def _decode_price(candidate: Candidate) -> float:
    return candidate.wait_seconds + EXPECTED_OUTPUT_TOKENS * candidate.tpot_seconds


def _prefill_price(candidate: Candidate) -> float:
    return candidate.wait_seconds + candidate.prefill_seconds + candidate.stall_seconds


def _best_few(
    candidates: list[Candidate], price: Callable[[Candidate], float], few: int, tie: float
) -> tuple[list[Candidate], float]:
    """The best few, and what is left of the draw. Of more near-equals than that any may be among them: a row of
    neighbours from a place that is drawn."""
    prices = list(map(price, candidates))
    best = min(prices, default=0.0)
    near = [c for c, its in zip(candidates, prices, strict=True) if its <= best + NEAR_EQUAL_SECONDS]
    if len(near) <= few:
        return nsmallest(few, candidates, key=price), tie
    start, tie = _draw(tie, len(near))
    return (near + near)[start : start + few], tie


def _draw(tie: float, num: int) -> tuple[int, float]:
    """One of `num`, and a draw that is independent of it: the digits of `tie` that follow."""
    scaled = tie * num
    index = min(int(scaled), num - 1)
    return index, scaled - index


def _may_pair(decode: WorkerView, prefill: WorkerView) -> bool:
    """Two unified workers gain nothing by a hand-off that joining the better one would not give."""
    return (
        decode.worker_id != prefill.worker_id
        and not (decode.prefills and prefill.decodes)
        and (decode.compatibility is prefill.compatibility or decode.compatibility == prefill.compatibility)
    )


def _may_prefill_alone(ask: Ask, decode: WorkerView, candidate: Candidate, partners: list[Candidate]) -> bool:
    """A decode worker prefills where nobody else can, where little remains, or where it holds more than any other."""
    remaining = ask.num_prompt_tokens - candidate.cached_tokens
    return (
        decode.prefills
        or not partners
        or remaining <= ask.local_prefill_max_tokens
        or candidate.cached_tokens > max(partner.cached_tokens for partner in partners)
    )


def _pair(ask: Ask, decode: WorkerView, on_decode: Candidate, prefill: WorkerView, on_prefill: Candidate) -> Pair:
    pulled, pull_seconds, after = _pulled(ask, decode, on_decode, prefill, on_prefill)
    exposed = _exposed_transfer_seconds(ask, decode, on_decode, prefill, after)
    wait = max(on_prefill.wait_seconds, on_decode.wait_seconds)
    ttft = wait + pull_seconds + after.prefill_seconds + exposed
    transfer, stall = pull_seconds + exposed, after.prefill_seconds * prefill.load.num_waiting
    return _price(ask, decode, prefill.worker_id, on_decode.tpot_seconds, ttft, transfer, stall, pulled)


def _pulled(
    ask: Ask, decode: WorkerView, on_decode: Candidate, prefill: WorkerView, on_prefill: Candidate
) -> tuple[int, float, Candidate]:
    """Where decode holds more than prefill: what prefill pulls of it, in how long, and what it is a candidate with then.
    Nothing, where computing it is no slower. It is the decode worker that knows how fast the two read each other."""
    block_size = decode.hash_class.block_size
    held = min(on_decode.cached_tokens, (ask.num_prompt_tokens - 1) // block_size * block_size)
    missing = held - on_prefill.cached_tokens
    if missing > 0:
        seconds = decode.cost.transfer_seconds(missing // block_size * decode.info.capacity.block_bytes)
        compute = prefill.cost.prefill_seconds(ask.num_prompt_tokens - held, held)
        if seconds + compute < on_prefill.prefill_seconds:
            return missing, seconds, replace(on_prefill, cached_tokens=held, prefill_seconds=compute)
    return 0, 0.0, on_prefill


def _alone(ask: Ask, decode: WorkerView, candidate: Candidate) -> Pair:
    ttft = max(decode.queue_seconds, candidate.wait_seconds) + candidate.prefill_seconds
    stall = candidate.prefill_seconds * decode.load.num_running
    return _price(ask, decode, None, candidate.tpot_seconds, ttft, 0.0, stall)


def _price(
    ask: Ask,
    decode: WorkerView,
    prefill: str | None,
    tpot: float,
    ttft: float,
    transfer: float,
    stall: float,
    pulled: int = 0,
) -> Pair:
    price = ttft + tpot * min(ask.max_tokens, EXPECTED_OUTPUT_TOKENS) + stall
    return Pair(decode.worker_id, prefill, ttft, transfer, tpot, stall, price, pulled)


def _exposed_transfer_seconds(
    ask: Ask, decode: WorkerView, on_decode: Candidate, prefill: WorkerView, on_prefill: Candidate
) -> float:
    """The part of the transfer that no computation hides: at least the last chunk's blocks, and whatever of the rest
    takes longer than the chunks before it."""
    block_size, step_tokens = decode.hash_class.block_size, prefill.info.capacity.max_step_tokens
    block_bytes = decode.info.capacity.block_bytes
    num_blocks = ceil((ask.num_prompt_tokens - on_decode.cached_tokens) / block_size)
    whole = decode.cost.transfer_seconds(num_blocks * block_bytes)
    num_tokens = ask.num_prompt_tokens - on_prefill.cached_tokens
    if num_tokens <= step_tokens:
        return whole
    num_chunks = ceil(num_tokens / step_tokens)
    last = decode.cost.transfer_seconds(min(num_blocks, ceil(step_tokens / block_size)) * block_bytes)
    hidden = on_prefill.prefill_seconds * (num_chunks - 1) / num_chunks
    return max(last, whole - hidden)


def _pick(pairs: list[Pair], tie: float) -> tuple[Pair, int]:
    """Reports are up to half a second old: near-equals are drawn, or every router would pile onto the same one.
    Near is near in what depends on the workers' queues and caches; a hand-off and none are never equal, and one that pulls
    more than the best is not: its price holds the time, not the room that a second copy takes in a cache."""
    best = min(pairs, key=lambda pair: pair.price_seconds)
    limit = best.price_seconds + NEAR_EQUAL_RATIO * best.ttft_seconds + NEAR_EQUAL_SECONDS
    near = [
        p
        for p in pairs
        if p.price_seconds <= limit
        and (p.prefill is None) == (best.prefill is None)
        and p.pulled_tokens <= best.pulled_tokens
    ]
    return near[_draw(tie, len(near))[0]], len(near)


def _reason(chosen: Pair, decode: WorkerView, prefills: Mapping[str, Candidate]) -> str:
    if chosen.prefill is not None:
        return "pair"
    if decode.role.prefills:
        return "unified"
    return "alone" if prefills else "no_prefill_workers"


def _why_none(refused: list[Candidate]) -> Literal["no_workers", "draining", "context", "excluded"]:
    reasons = {candidate.refused for candidate in refused}
    if "context" in reasons:
        return "context"
    if "excluded" in reasons:
        return "excluded"
    return "draining" if "draining" in reasons else "no_workers"
