"""What requests will see of so many workers, one stage after the other.

    wait for a row on a decode worker → wait for a prefill worker → prefill → hand-over → decode steps

Prefill  an M/G/c queue in front of all prefill workers together: placement knows what waits where.
Decode   a worker with n sequences makes a token for each in τ(n) = a + s·n. Processor sharing with that speed has a
         product form: n is negative binomial, its mean by Little's law, its variance n·τ/τ(1). A request is in its own
         steps, beside n others. It sees the average over its own time, so the longer its answer, the less of that
         variance (an Ornstein-Uhlenbeck average).
Unified  steps that hold a prompt stall those that decode: φ of the time is prefill, so a token takes τ / (1 − φ).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.planning.load import Length, Load, Pools, Target, Worker
from cluster.planning.prediction import Overload, Prediction
from cluster.planning.queueing import NO_WAIT, Wait, normal_cdf, wait
from cluster.simulation.cards import LANDING_SECONDS, MESSAGE_SECONDS
from headrace.costmodel import CostModel

HAND_OVER_MESSAGES = 4  # submit, ticket, announcement, token
ALONE_MESSAGES = 2
JOIN_STEPS = 1.5  # a sequence joins the step after the one that is planned already, half a step into the running one
APART = 0.15
PLANNED = 0.3
UNIFIED_APART = 0.5  # there placement weighs decode steps more than the queue of prompts
FULL = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Moments:
    """Of service times: mean and squared coefficient of variation."""

    mean: float
    scv: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Moments":
        mean = sum(values) / len(values)
        return cls(mean, sum((value - mean) ** 2 for value in values) / len(values) / mean**2)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """What a decode worker is given: tokens a second (`per_second` requests of `tokens` each), and what each sequence adds
    to a step. Weights by the time that a request stays."""

    tokens: float
    sequence_seconds: float
    sequence_scv: float
    context_tokens: float

    @classmethod
    def of(cls, load: Load, cost: CostModel) -> "_Decoding":
        steps = [max(length.output_tokens - 1, 0.0) for length in load.lengths]
        total = sum(steps)
        if total <= 0:
            return cls(0.0, cost.decode_sequence_seconds, 0.0, 0.0)
        contexts = [length.input_tokens + length.output_tokens / 2 for length in load.lengths]
        adds = [cost.decode_sequence_seconds + cost.decode_context_token_seconds * context for context in contexts]
        mean = sum(step * add for step, add in zip(steps, adds, strict=True)) / total
        square = sum(step * add * add for step, add in zip(steps, adds, strict=True)) / total
        context = sum(step * context for step, context in zip(steps, contexts, strict=True)) / total
        return cls(total / len(steps), mean, square / mean**2 - 1 if mean else 0.0, context)


def predict(pools: Pools, prefill: Worker, decode: Worker, load: Load, target: Target) -> Prediction | Overload:
    """What this load sees of so many workers. For unified pools `decode` is the worker."""
    if pools.unified:
        return _predict_unified(pools.unified, decode, load, target)
    services = [_prompt_seconds(prefill, length) for length in load.lengths]
    rate, base = load.requests_per_second, prefill.cost.prefill_base_seconds
    moments = Moments.of(services)
    shared = _shared_base(moments.mean, base, rate / max(pools.prefill, 1))
    mean = moments.mean - base + shared
    if rate * mean >= pools.prefill:
        return _short_of("prefill", pools.prefill, rate * mean)
    decoded = _decode(pools.decode, decode, load, stalled=0.0)
    if isinstance(decoded, Overload):
        return decoded
    queue = _queue(pools.prefill, load, mean, moments.scv, shared, APART)
    assert queue is not None
    # A decode worker prefills by itself where that delays those that it decodes less than the queue would take.
    most = moments.mean * max(decoded.sequences, 1.0)
    relieved = _queue(pools.prefill, load.at(queue.within(most)), mean, moments.scv, shared, APART)
    queue = replace(relieved or queue, most=most)
    hand_overs = [_hand_over_seconds(decode, prefill, length) for length in load.lengths]
    return Prediction(
        load,
        target,
        wait=queue,
        slot_wait=decoded.slot_wait,
        service=services,
        fixed_seconds=hand_overs,
        tpots=_tpots(load, decoded),
        prefill_busy=rate * mean / pools.prefill,
        sequences=decoded.sequences,
        slots=decoded.slots,
        step_seconds=decoded.step_seconds,
    )


def _prompt_seconds(worker: Worker, length: Length, sequences: float = 0.0, context_tokens: float = 0.0) -> float:
    """A prompt in steps of its own, beside so many sequences that decode."""
    num_steps = _num_steps(worker, length)
    tokens = round(length.computed_tokens / num_steps)
    # Of whole tokens, as steps have: it tells a whole prompt, which has a kernel of its own (headrace.devicecost).
    mean_context = length.cached_tokens + num_steps * tokens / 2
    return num_steps * worker.cost.step_seconds(tokens, mean_context, round(sequences), round(context_tokens))


def _num_steps(worker: Worker, length: Length) -> int:
    return math.ceil(length.computed_tokens / worker.max_step_tokens)


def _shared_base(mean: float, base: float, per_second: float) -> float:
    """What a prompt pays of a step's `base` where several share the step: as many as come while one computes."""
    beside = per_second * (mean - base)
    if beside >= FULL:
        return 0.0
    return base / max(per_second * base / (1 - beside), 1.0)


def _queue(num_workers: int, load: Load, mean: float, scv: float, base: float, apart_share: float) -> Wait | None:
    """Placement comes close to one queue for all, but it decides when a prompt comes, on reports that are a little old:
    `apart_share` of the way to a queue for each worker alone. Of the `mean` that a prompt takes its `base` is not paid
    again by those who share a step: how long the queue is follows from the rest."""
    rate = load.requests_per_second
    chances, lengths = [], []
    for servers, arriving in ((num_workers, rate), (1, rate / max(num_workers, 1))):
        whole = wait(servers, arriving, mean, scv, load.gap_scv)
        rest = wait(servers, arriving, mean - base, scv, load.gap_scv)
        if rest is None:
            return None
        chances.append(whole.chance if whole is not None else 1.0)
        lengths.append(rest.mean_if_any)
    chance = chances[0] + apart_share * (chances[1] - chances[0])
    return Wait(chance, lengths[0] + apart_share * (lengths[1] - lengths[0]) + base / 2)


def _short_of(pool: str, num_workers: int, offered: float) -> Overload:
    return Overload(
        pool,
        offered / num_workers if num_workers else math.inf,
        f"{pool} is given {offered:.2f} worker-seconds of work a second, and has {num_workers}",
    )


def _hand_over_seconds(decode: Worker, prefill: Worker, length: Length) -> float:
    """Messages, and the part of the transfer that no chunk's computing hides: the last chunk's."""
    last = min(length.input_tokens, prefill.max_step_tokens)
    told = HAND_OVER_MESSAGES * MESSAGE_SECONDS + LANDING_SECONDS
    return told + decode.cost.transfer_seconds(round(last * decode.kv_bytes_per_token))


@dataclass(frozen=True, slots=True)
class _Decoded:
    sequences: float
    slots: float
    step_seconds: float
    settle_seconds: float
    sequence_seconds: float
    variance: float
    slot_wait: Wait


def _decode(num_workers: int, worker: Worker, load: Load, *, stalled: float) -> _Decoded | Overload:
    """The state of `num_workers` that decode, each `stalled` of its time."""
    given = _Decoding.of(load, worker.cost)
    per_worker = load.requests_per_second / num_workers if num_workers else math.inf
    held_tokens = given.context_tokens if given.context_tokens else load.mean(lambda x: x.input_tokens)
    slots = min(float(worker.max_num_seqs), worker.kv_tokens / max(held_tokens, 1.0))
    slope = given.sequence_seconds
    alone = worker.cost.decode_base_seconds + slope
    tokens_per_second = per_worker * given.tokens / max(1 - stalled, 1e-9)
    busy = tokens_per_second * slope  # what of a decode worker's time sequences alone take
    if busy >= FULL:
        return _short_of("decode", num_workers, busy * num_workers)
    sequences = tokens_per_second * alone / (1 - busy)
    full_step = alone + slope * (slots - 1)
    stay = given.tokens * full_step / max(1 - stalled, 1e-9)
    room = num_workers * slots
    if slots < 1 or load.requests_per_second * stay >= room:
        return Overload(
            "decode",
            sequences / max(slots, 1e-9),
            f"{sequences:.1f} sequences would decode on each worker, and {slots:.1f} fit "
            f"({worker.max_num_seqs} rows, {worker.kv_tokens:,.0f} tokens of KV)",
        )
    sequences = min(sequences, slots)
    step = alone + slope * sequences
    # Sequences that come and go: Poisson, spread by bursts, by unequal contexts, and by steps that grow with them.
    spread = (1 + load.gap_scv) / 2 * (1 + given.sequence_scv) * step / alone
    # Rows run out when so many more than the mean are there at once.
    over = normal_cdf((sequences * num_workers - room) / math.sqrt(max(sequences * num_workers * step / alone, 1e-9)))
    slot_wait = Wait(over, stay / (room - load.requests_per_second * stay))
    return _Decoded(
        sequences=sequences,
        slots=slots,
        step_seconds=step / max(1 - stalled, 1e-9),
        settle_seconds=given.tokens * step / max(1 - stalled, 1e-9) * step / alone,
        sequence_seconds=slope,
        variance=sequences / num_workers * spread,
        slot_wait=slot_wait,
    )


def _tpots(
    load: Load, decoded: _Decoded, stalled: float = 0.0, stall_square: float = 0.0, queue: Wait = NO_WAIT
) -> list[tuple[float, float]]:
    """(mean, deviation) of TPOT for each length. Of unified workers: the share of time and the second moment a second of
    what prompts take of it, and their queue. A sequence begins to decode where prompts that came after it wait already."""
    tau = decoded.step_seconds
    joins = 0.0 if stalled else 1 - math.exp(-decoded.sequences)  # who prefilled here is in the next step
    behind = stalled * (queue.mean + tau)
    unsure = stalled**2 * queue.chance * (2 - queue.chance) * queue.mean_if_any**2
    found: list[tuple[float, float]] = []
    for length in load.lengths:
        steps = length.output_tokens - 1
        if steps < 1:
            found.append((0.0, 0.0))
            continue
        lasts = steps * tau / decoded.settle_seconds
        averaged = 2 * (lasts - 1 + math.exp(-lasts)) / lasts**2
        variance = decoded.sequence_seconds**2 * decoded.variance * averaged
        if stalled:
            variance += stall_square * tau / steps + unsure / steps**2
        found.append((tau * (1 + joins * JOIN_STEPS / steps) + behind / steps, math.sqrt(variance)))
    return found


def _predict_unified(num_workers: int, worker: Worker, load: Load, target: Target) -> Prediction | Overload:
    """Each step that holds a prompt also decodes: it adds what that step takes longer than it would without."""
    rate, per_worker = load.requests_per_second, load.requests_per_second / num_workers
    context = _Decoding.of(load, worker.cost).context_tokens
    sequences = 0.0
    for _ in range(2):  # what a prompt adds depends a little on who decodes beside it, and that on what prompts add
        plain_step = worker.cost.decode_step_seconds(round(sequences), round(sequences * context))
        beside = [_prompt_seconds(worker, length, sequences, sequences * context) for length in load.lengths]
        adds = [
            max(seconds - _num_steps(worker, length) * plain_step, 1e-9)
            for seconds, length in zip(beside, load.lengths, strict=True)
        ]
        stalls = Moments.of(adds)
        stalled = per_worker * stalls.mean
        if stalled >= FULL:
            return _short_of("unified", num_workers, rate * stalls.mean)
        found = _decode(num_workers, worker, load, stalled=stalled)
        if isinstance(found, Overload):
            return replace(found, pool="unified")
        decoded, sequences = found, found.sequences
    plain_step = decoded.step_seconds * (1 - stalled)
    # A prompt's own steps also decode; the step that runs and the one that is planned come first.
    services = [add + _num_steps(worker, length) * plain_step for add, length in zip(adds, load.lengths, strict=True)]
    joins = 1 - math.exp(-decoded.sequences)
    fixed = ALONE_MESSAGES * MESSAGE_SECONDS + LANDING_SECONDS + joins * JOIN_STEPS * plain_step
    moments = Moments.of(services)
    shared = _shared_base(moments.mean, plain_step, per_worker)
    mean = moments.mean - plain_step + shared
    queue = _queue(num_workers, load, mean, moments.scv, shared, UNIFIED_APART)
    if queue is None:
        return _short_of("unified", num_workers, rate * mean)
    # Behind the step that runs another is planned, with prompts in it as likely as in any.
    fixed += PLANNED * stalled * moments.mean
    queue = replace(queue, mean_if_any=queue.mean_if_any + PLANNED * moments.mean)
    stall_square = per_worker * stalls.mean**2 * (1 + stalls.scv)
    return Prediction(
        load,
        target,
        wait=queue,
        slot_wait=decoded.slot_wait,
        service=services,
        fixed_seconds=[fixed] * len(services),
        tpots=_tpots(load, decoded, stalled, stall_square, queue),
        prefill_busy=stalled,
        sequences=decoded.sequences,
        slots=decoded.slots,
        step_seconds=decoded.step_seconds,
    )
