"""Where a request runs: a pure function of the request and the view, which also says why (design 2.3).

    filter → predict each candidate → price pairs among the best few, and decode alone → targets (`slo`) →
    pick among near-equals

All prices are seconds. A pair's price is what everyone waits because of it: the request's time to its first token,
its output at the predicted TPOT, and the stall of others. On a prefill worker that is what is computed there and is
cached elsewhere, times the prompts that wait there (as many will come while it is busy); where the decode worker prefills
by itself, all it computes, times the sequences that it decodes.

Where decode holds more of the prompt than prefill there are three ways: prefill computes it again, prefill pulls it from
decode, decode does the rest alone. The first two are one pair, at the lower of their prices.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from router.decisions.candidates import (
    EXPECTED_OUTPUT_TOKENS,
    Ask,
    Candidate,
    all_candidates,
    cached_tokens,
    decode_candidate,
    decode_prices,
    held_tokens,
    most_cached,
    prefill_candidate,
    prefill_prices,
    stall_seconds,
    who_decodes,
    who_prefills,
    why_nobody_decodes,
)
from router.decisions.slo import Verdict, costed, expected
from router.decisions.streams import beside, tpot_beside
from router.decisions.view import Pool, View, WorkerView

__all__ = ["Ask", "Candidate", "Decided", "NoCapacity", "Pair", "Placed", "Placement", "Why", "place"]

BEST_FEW = 4
SOME = 64  # of the workers, by whose prices the others are sifted
SLACK_WEIGHT = 0.1
NEAR_EQUAL_RATIO = 0.05
NEAR_EQUAL_SECONDS = 1e-3


@dataclass(slots=True)
class Pair:
    """A priced way to run the request; `prefill` None: the decode worker prefills alone. `pulled_tokens`: what the prefill
    worker reads of the decode worker's cache, before it computes the rest. With a TPOT target: `tpot_seconds` with what is
    computed beside, `num_missed` of the streams there are expected to miss it because of this one, and others' delay within
    what is left to them counts SLACK_WEIGHT of its time."""

    decode: str
    prefill: str | None
    ttft_seconds: float
    transfer_seconds: float
    tpot_seconds: float
    stall_seconds: float
    price_seconds: float
    pulled_tokens: int = 0
    wait_seconds: float = 0.0
    num_missed: float = 0.0


@dataclass(frozen=True, slots=True)
class Why:
    """Everything the decision was made from, and the decision: enough to make it again. `slo`: whether the chosen pair is
    expected to meet the targets; "" without any."""

    ask: Ask
    candidates: tuple[Candidate, ...]
    pairs: tuple[Pair, ...] = ()
    chosen: Pair | None = None
    num_near_equals: int = 0
    reason: str = ""
    slo: Verdict = ""


@dataclass(slots=True, eq=False)
class Decided:
    """The decision, and what it was made from. `why` is worked out when somebody asks: most decisions nobody asks about,
    and it holds a Candidate for every worker."""

    ask: Ask
    view: View
    now: float
    pairs: tuple[Pair, ...] = ()
    chosen: Pair | None = None
    num_near_equals: int = 0
    reason: str = ""
    slo: Verdict = ""
    _why: Why | None = None

    @property
    def why(self) -> Why:
        if self._why is None:
            candidates = all_candidates(self.ask, self.view, self.now)
            self._why = Why(self.ask, candidates, self.pairs, self.chosen, self.num_near_equals, self.reason, self.slo)
        return self._why


@dataclass(frozen=True, slots=True)
class Placed:
    """`prefill_tokens`: what the prefilling worker is expected to compute; `cached_tokens`: what it has, or pulls."""

    decode: WorkerView
    prefill: WorkerView | None
    cached_tokens: int
    prefill_tokens: int
    decided: Decided

    @property
    def why(self) -> Why:
        return self.decided.why

    @property
    def pulls(self) -> bool:
        """The prefill worker is to pull what the decode worker holds and it lacks."""
        chosen = self.decided.chosen
        return self.prefill is not None and chosen is not None and chosen.pulled_tokens > 0


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """Nobody can take the request. `no_workers`: none that decodes is known; else all known ones were refused."""

    reason: Literal["no_workers", "draining", "context", "excluded"]
    decided: Decided

    @property
    def why(self) -> Why:
        return self.decided.why


Placement = Placed | NoCapacity


def place(ask: Ask, view: View, now: float) -> Placement:
    """The workers for a request, and why those."""
    decodes = who_decodes(ask, view, now)
    prefills = who_prefills(ask, view, now)
    if not decodes.workers:
        return NoCapacity(why_nobody_decodes(ask, view), Decided(ask, view, now, reason="nobody decodes"))
    pairs, tie, compared = _priced(ask, decodes, prefills, now)
    chosen, num_near_equals = _pick(costed(pairs, ask.ttft_seconds, ask.tpot_seconds), tie)
    slo = expected(chosen, ask.ttft_seconds, ask.tpot_seconds)
    decode = compared[chosen.decode]
    prefill = compared[chosen.prefill] if chosen.prefill is not None else None
    cached = cached_tokens(ask, prefill or decode) + chosen.pulled_tokens
    reason = _reason(chosen, decode, prefills)
    decided = Decided(ask, view, now, tuple(pairs), chosen, num_near_equals, reason, slo)
    return Placed(decode, prefill, cached, ask.num_prompt_tokens - cached, decided)


# -- price


def _priced(ask: Ask, decodes: Pool, prefills: Pool, now: float) -> tuple[list[Pair], float, dict[str, WorkerView]]:
    """The pairs worth comparing, what is left of the draw, and the workers of these pairs by id."""
    best, tie = _best_few(decodes, decode_prices(ask, decodes), BEST_FEW, ask.tie)
    on_decodes, on_prefills = held_tokens(ask, decodes), held_tokens(ask, prefills)
    most = most_cached(ask, on_decodes, on_prefills)
    best_prefills, tie = _best_few(prefills, prefill_prices(ask, prefills, on_prefills, most), BEST_FEW + 1, tie)
    partners = [(worker, prefill_candidate(ask, worker, most)) for worker in best_prefills]
    pairs: list[Pair] = []
    best_decodes = _with_warmest(best, decodes, on_decodes)
    for decode in best_decodes:
        candidate = decode_candidate(ask, decode)
        allowed = [partner for partner in partners if _may_pair(decode, partner[0], now)][:BEST_FEW]
        pairs += _pairs(ask, decode, candidate, allowed, most)
        if _may_prefill_alone(ask, decode, candidate, [on_prefill for _, on_prefill in allowed]):
            pairs.append(_alone(ask, decode, candidate))
    return pairs, tie, {worker.worker_id: worker for worker in (*best_prefills, *best_decodes)}


def _with_warmest(best: list[WorkerView], decodes: Pool, held: list[int]) -> list[WorkerView]:
    """The decode worker that holds most of the prompt is compared too, however busy it is."""
    most = max(held)
    if not most:
        return best
    warmest = decodes.workers[held.index(most)]
    return best if any(worker is warmest for worker in best) else [*best, warmest]


def _best_few(pool: Pool, prices: list[float], few: int, tie: float) -> tuple[list[WorkerView], float]:
    """The best few, and what is left of the draw. Of more near-equals than that any may be among them: a row of
    neighbours from a place that is drawn."""
    some = sorted(prices[:SOME])  # the best few of all are no dearer than those of some: the rest need no sorting
    bound = some[min(few, len(some) - 1)] if some else 0.0
    order = sorted([at for at, price in enumerate(prices) if not price > bound], key=prices.__getitem__)
    if len(order) > few and prices[order[few]] <= (limit := prices[order[0]] + NEAR_EQUAL_SECONDS):
        near = [at for at, price in enumerate(prices) if price <= limit]
        start, tie = _draw(tie, len(near))
        order = (near + near)[start : start + few]
    return [pool.workers[at] for at in order[:few]], tie


def _draw(tie: float, num: int) -> tuple[int, float]:
    """One of `num`, and a draw that is independent of it: the digits of `tie` that follow."""
    scaled = tie * num
    index = min(int(scaled), num - 1)
    return index, scaled - index


def _may_pair(decode: WorkerView, prefill: WorkerView, now: float) -> bool:
    """Two unified workers gain nothing by a hand-off that joining the better one would not give; two that failed each other
    lately would do so again."""
    return (
        decode.worker_id != prefill.worker_id
        and not (decode.prefills and prefill.decodes)
        and (decode.unlinked is None or decode.unlinked.get(prefill.worker_id, 0.0) <= now)
        and (decode.compatibility is prefill.compatibility or decode.compatibility == prefill.compatibility)
    )


def _may_prefill_alone(ask: Ask, decode: WorkerView, candidate: Candidate, partners: list[Candidate]) -> bool:
    """A decode worker prefills where nobody else can, where little remains, where it holds more than any other, or where
    all others are busy for longer than it takes it."""
    cached, compute = candidate.cached_tokens, candidate.prefill_seconds
    return (
        decode.prefills
        or not partners
        or ask.num_prompt_tokens - cached <= ask.local_prefill_max_tokens
        or cached > max([partner.cached_tokens for partner in partners])
        or compute < min([partner.wait_seconds for partner in partners])
    )


def _pairs(
    ask: Ask, decode: WorkerView, on_decode: Candidate, partners: list[tuple[WorkerView, Candidate]], most: int
) -> list[Pair]:
    """The decode worker with each of them."""
    num_tokens, tpot = ask.num_prompt_tokens, on_decode.tpot_seconds
    if ask.tpot_seconds is not None:
        tpot = tpot_beside(decode, tpot)
    output = tpot * min(ask.max_tokens, EXPECTED_OUTPUT_TOKENS)
    whole = _transfer_seconds(decode, num_tokens - on_decode.cached_tokens)
    pairs: list[Pair] = []
    for prefill, on_prefill in partners:
        cached, compute, stall = on_prefill.cached_tokens, on_prefill.prefill_seconds, on_prefill.stall_seconds
        pulled, pull, transfer = 0, 0.0, whole
        if on_decode.cached_tokens > cached:
            pulled, pull = _pulled(ask, decode, on_decode, prefill, on_prefill)
        if pulled:
            cached += pulled
            compute = prefill.cost.prefill_seconds(num_tokens - cached, cached)
            stall = stall_seconds(ask, prefill, compute, most)
        if num_tokens - cached > prefill.max_step_tokens:
            transfer = _exposed_transfer_seconds(ask, decode, whole, prefill, cached, compute)
        wait = max(on_prefill.wait_seconds, on_decode.wait_seconds)
        ttft = wait + pull + compute + transfer
        price = ttft + output + stall
        pairs.append(Pair(decode.worker_id, prefill.worker_id, ttft, pull + transfer, tpot, stall, price, pulled, wait))
    return pairs


def _pulled(
    ask: Ask, decode: WorkerView, on_decode: Candidate, prefill: WorkerView, on_prefill: Candidate
) -> tuple[int, float]:
    """Where decode holds more than prefill: how many tokens prefill pulls of it, in how long. Nothing, where computing them
    is no slower. It is the decode worker that knows how fast the two read each other."""
    block_size = decode.hash_class.block_size
    held = min(on_decode.cached_tokens, (ask.num_prompt_tokens - 1) // block_size * block_size)
    missing = held - on_prefill.cached_tokens
    if missing > 0:
        seconds = _transfer_seconds(decode, missing)
        if seconds + prefill.cost.prefill_seconds(ask.num_prompt_tokens - held, held) < on_prefill.prefill_seconds:
            return missing, seconds
    return 0, 0.0


def _alone(ask: Ask, decode: WorkerView, candidate: Candidate) -> Pair:
    wait = max(decode.queue_seconds, candidate.wait_seconds)
    cached, tpot, compute = candidate.cached_tokens, candidate.tpot_seconds, candidate.prefill_seconds
    stall, missed = compute * decode.load.num_running, 0.0
    if ask.tpot_seconds is not None and not decode.prefills:  # of unified ones, one of them computes it in any case
        tpot = tpot_beside(decode, tpot)
        its = beside(decode, tpot, ask.num_prompt_tokens - cached, cached, ask.tpot_seconds)
        tpot, compute, missed = its.tpot_seconds, its.compute_seconds, its.num_missed
        stall = SLACK_WEIGHT * its.added_seconds * decode.load.num_running
    ttft = wait + compute
    price = ttft + tpot * min(ask.max_tokens, EXPECTED_OUTPUT_TOKENS) + stall
    return Pair(decode.worker_id, None, ttft, 0.0, tpot, stall, price, 0, wait, missed)


def _transfer_seconds(decode: WorkerView, num_tokens: int) -> float:
    """How long the decode worker and another take to read these of each other, in whole blocks."""
    num_blocks = ceil(num_tokens / decode.hash_class.block_size)
    return decode.cost.transfer_seconds(num_blocks * decode.info.capacity.block_bytes)


def _exposed_transfer_seconds(
    ask: Ask, decode: WorkerView, whole: float, prefill: WorkerView, cached: int, compute: float
) -> float:
    """The part of the transfer that no computation hides, where a prompt takes several chunks: at least the last one's
    blocks, and whatever of the rest takes longer than the chunks before it."""
    step_tokens = prefill.max_step_tokens
    num_chunks = ceil((ask.num_prompt_tokens - cached) / step_tokens)
    last = min(whole, _transfer_seconds(decode, step_tokens))
    return max(last, whole - compute * (num_chunks - 1) / num_chunks)


def _pick(costs: list[tuple[float, Pair]], tie: float) -> tuple[Pair, int]:
    """Reports are up to half a second old: near-equals are drawn, or every router would pile onto the same one.
    Near is near in what depends on the workers' queues and caches; a hand-off and none are never equal, and one that pulls
    more than the best is not: its price holds the time, not the room that a second copy takes in a cache."""
    least, best = min(costs, key=lambda costed: costed[0])
    limit = least + NEAR_EQUAL_RATIO * best.ttft_seconds + NEAR_EQUAL_SECONDS
    near = [
        p
        for cost, p in costs
        if cost <= limit and (p.prefill is None) == (best.prefill is None) and p.pulled_tokens <= best.pulled_tokens
    ]
    return near[_draw(tie, len(near))[0]], len(near)


def _reason(chosen: Pair, decode: WorkerView, prefills: Pool) -> str:
    if chosen.prefill is not None:
        return "pair"
    if decode.role.prefills:
        return "unified"
    return "alone" if prefills.workers else "no_prefill_workers"
