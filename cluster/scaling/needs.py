"""How many workers the load needs: by the cost model for what comes, and by what has piled up or gone wrong already.

    ahead     cluster.planning.size of the forecast's peak (or of the rate of now, if that is more), with the burstiness of
              arrivals, at the targets
    backlog   what waits, in workers that would be through with it in CATCH_UP_SECONDS, beside those that serve what comes
    KV        decode workers such that the KV that is used now would be KV_FULL of theirs
    reserve   where requests miss their targets though by all this there are enough workers: sized for more load, by a tenth
              a step; and by what the last day missed

Of a role whose work nobody has done yet nothing is known but that one worker is needed: what is there stays.

All in workers of the first pool of a role; `weight` says what one of another pool, or one that is lent, is worth.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

from cluster.planning.load import Length, Load, Pools, Target, Worker, lengths_around
from cluster.planning.prediction import Overload
from cluster.planning.sizing import Idle, Sized, Unreachable, size
from cluster.planning.stages import predict
from cluster.scaling.values import Account, Inputs, Needs
from headrace.values import Role

CATCH_UP_SECONDS = 60.0
KV_FULL = 0.9
BOOST_STEP = 1.1
MOST_BOOST = 1.5
FORGET_BOOST_SECONDS = 6 * 3600.0
MIN_JUDGED = 50
LASTING_WINDOWS = 2
MISS_MARGIN = 0.02
ACCOUNT_SECONDS = 86_400.0  # after which half of the account is forgotten: a reserve that comes and goes costs more
RESERVE = 0.7  # of the load, where all misses that are allowed are of one role's target
MOST_RESERVE = 0.5
SPENT_STEP = 0.05
LENGTH_CV = 1.0
MARGIN = 1.05  # more than chance does to the rate of a window
RATE_STEP = 1.02  # rates are sized for in steps: what wobbles less changes no size
NO_TARGET = Target(1e6, 1e6, 0.5)  # where the true one cannot be met: only that nothing piles up


def reference(inputs: Inputs, role: Role) -> str | None:
    """The pool whose workers a role is counted in: the first one that serves it."""
    return next((name for name, pool in inputs.rules.pools.items() if pool.role is role), None)


def weight(inputs: Inputs, pool: str, role: Role) -> float:
    """What a worker of `pool` is worth where it serves `role`, in those of its reference."""
    name = reference(inputs, role)
    if name is None or name == pool:
        return 1.0
    length = mean_length(inputs)
    ours, theirs = inputs.pools[pool].worker, inputs.pools[name].worker
    if role is Role.PREFILL:
        return prefill_seconds(theirs, length) / prefill_seconds(ours, length)
    return _tokens_per_second(ours, length) / _tokens_per_second(theirs, length)


def needs(inputs: Inputs) -> Needs:
    traffic, rules = inputs.traffic, inputs.rules
    rate = max(inputs.forecast.peak, traffic.level)
    at_work = any(pool.waiting_tokens or pool.kv_used for pool in inputs.pools.values())
    if rate * rules.idle_seconds < 1 and not (traffic.queued or traffic.in_flight or at_work):
        if traffic.idle_seconds >= rules.idle_seconds:
            return Needs(reason=f"nothing has come for {traffic.idle_seconds:.0f} s")
        rate = 0.0
    last = Role.UNIFIED if reference(inputs, Role.UNIFIED) is not None else Role.DECODE
    found: dict[str, float] = {}
    with_margin: dict[str, float] = {}
    said: list[str] = []
    unreachable: list[str] = []
    for roles in ((Role.PREFILL, Role.DECODE), (Role.UNIFIED,)):
        names = [reference(inputs, role) for role in roles]
        if names[-1] is None:
            continue
        workers = [inputs.pools[name].worker for name in names if name is not None]
        unified = roles == (Role.UNIFIED,)
        _, why, cannot = _ahead(inputs, workers[0], workers[-1], rate, unified=unified)
        said.append(why)
        unreachable += [cannot] if cannot and all(is_known(inputs, role) for role in roles) else []
        for role, name in zip(roles, names, strict=True):
            if name is not None and not is_known(inputs, role):
                by = rules.standby_workers if role is last else 0
                found[role.value] = with_margin[role.value] = max(_desired(inputs, role) - by, 1.0)
                said.append(
                    f"{role.value}: nobody has done it yet, so how fast it goes is not known: as many as there are"
                )
            elif name is not None:
                # Of the load, not of the workers: a twentieth more load is seldom a worker more.
                reserve = 1.0 if cannot else _reserve(inputs, role)
                sized, why, _ = _ahead(inputs, workers[0], workers[-1], rate * reserve, unified=unified)
                more_sized, _, _ = _ahead(inputs, workers[0], workers[-1], rate * reserve * MARGIN, unified=unified)
                if reserve > 1.0:
                    said.append(f"{role.value} for {reserve:.2f} × the load, by what requests got: {why}")
                found[role.value], more = _with_what_is(inputs, role, name, max(getattr(sized, role.value), 1))
                with_margin[role.value] = max(getattr(more_sized, role.value), found[role.value])
                said += more
    if rules.standby_workers and last.value in found:
        found[last.value] += rules.standby_workers
        with_margin[last.value] += rules.standby_workers
        said.append(f"{rules.standby_workers} stand by")
    return Needs(found, with_margin, "; ".join(said), "; ".join(unreachable))


def _ahead(inputs: Inputs, prefill: Worker, decode: Worker, rate: float, *, unified: bool) -> tuple[Pools, str, str]:
    """(the sizes, the reason, why the targets cannot be met)."""
    load, target = load_of(inputs, rate), inputs.rules.target
    found = _size(prefill, decode, load, target, unified)
    cannot = ""
    if isinstance(found, Unreachable):
        cannot = found.reason
        found = _size(prefill, decode, load, NO_TARGET, unified)
    match found:
        case Sized(pools=pools, reason=reason):
            return pools, f"for {load.requests_per_second:.3g} requests/s: {reason}", cannot
        case Idle():
            return Pools(), "nothing comes", cannot
        case Unreachable(reason=reason):
            # Not even one request fits a worker: no number of workers is right, and what is there stays.
            there = {role: float(_ready(inputs, role)) for role in Role}
            return Pools(*(int(there[role]) for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED))), reason, reason


def load_of(inputs: Inputs, rate: float) -> Load:
    """What is sized for, its rate in steps."""
    return Load(_stepped(rate), _lengths(inputs), inputs.traffic.gap_scv)


def attainment(inputs: Inputs, supplies: Mapping[Role, float], rate: float) -> float | None:
    """Of the targets, by the cost model, with so many workers of the references; None where queues grow without end."""
    if rate <= 0:
        return 1.0  # nobody is there to miss them
    prefill, decode, unified = (supplies[role] for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED))
    name = reference(inputs, Role.UNIFIED if unified else Role.DECODE)
    other = reference(inputs, Role.PREFILL)
    if name is None:
        return None
    pools = Pools(unified=int(unified)) if unified else Pools(int(prefill), int(decode))
    workers = inputs.pools[other or name].worker, inputs.pools[name].worker
    if not pools.num_workers:
        return None
    return _attainment(pools, *workers, load_of(inputs, rate), inputs.rules.target)


def _with_what_is(inputs: Inputs, role: Role, name: str, ahead: float) -> tuple[float, list[str]]:
    """Beyond what is ahead: backlog and KV."""
    traffic, worker = inputs.traffic, inputs.pools[name].worker
    length, said = mean_length(inputs), []
    most = ahead
    if role is not Role.DECODE:
        waiting = sum(pool.waiting_tokens for pool in inputs.pools.values())
        tokens = traffic.queued_tokens * (1 - traffic.hit_rate) + waiting
        seconds = tokens * prefill_seconds(worker, length) / length.computed_tokens
        serving = traffic.per_second * prefill_seconds(worker, length)
        if seconds > inputs.rules.target.ttft_seconds * max(_ready(inputs, role), 1):
            backlog = serving + seconds / CATCH_UP_SECONDS
            if backlog > most:
                said.append(f"{role.value} {backlog:.1f}: {seconds:.1f} worker-seconds of prompts wait")
                most = backlog
    if role is not Role.PREFILL:
        rows = max(min(worker.max_num_seqs, worker.kv_tokens / max(length.input_tokens, 1.0)), 1.0)
        stay = rows * length.output_tokens / _tokens_per_second(worker, length) / 2
        if traffic.oldest_queued_seconds > inputs.rules.target.ttft_seconds:
            backlog = (traffic.per_second + traffic.queued / CATCH_UP_SECONDS) * stay / rows
            if backlog > most:
                said.append(f"{role.value} {backlog:.1f}: {traffic.queued} wait, the oldest too long already")
                most = backlog
        used = max((pool.kv_used for pool in inputs.pools.values()), default=0.0)
        ready = _ready(inputs, role)
        if used > KV_FULL:
            said.append(f"{role.value} {ready * used / KV_FULL:.1f}: {used:.0%} of their KV is used")
            most = max(most, ready * used / KV_FULL)
    return most, said


def _reserve(inputs: Inputs, role: Role) -> float:
    """How much more load the role is sized for than comes: by what the model underrates, and for what no model of a steady
    load knows (bursts, surges within the lead): the more, the more of the misses that the target allows the last day
    had, in steps."""
    boost = inputs.memory.boost.get(role.value, 1.0)
    account, allowed = inputs.memory.account, 1 - inputs.rules.target.attainment
    if account.judged < MIN_JUDGED:
        return boost
    missed = {
        Role.PREFILL: account.missed_ttft,
        Role.DECODE: account.missed_tpot,
        Role.UNIFIED: account.missed_ttft + account.missed_tpot,
    }[role]
    spent = missed / account.judged / allowed
    return max(boost, 1 + min(RESERVE * math.floor(spent / SPENT_STEP) * SPENT_STEP, MOST_RESERVE))


def accounted(inputs: Inputs) -> Account:
    """The account with what the last window says, for the time since it was last written."""
    traffic, before = inputs.traffic, inputs.memory.account
    seconds = min(max(inputs.now - before.at, 0.0), inputs.rules.window_seconds)
    keep, share = 0.5 ** (seconds / ACCOUNT_SECONDS), seconds / inputs.rules.window_seconds * traffic.judged
    return Account(
        round(before.judged * keep + share, 3),
        round(before.missed_ttft * keep + share * traffic.missed_ttft, 3),
        round(before.missed_tpot * keep + share * traffic.missed_tpot, 3),
        inputs.now,
    )


def boosted(
    inputs: Inputs, supplies: Mapping[str, float], found: Needs
) -> tuple[Mapping[str, float], float, float | None]:
    """The boosts from now on, since when, and since when targets are missed at every turn though nothing is short or
    changing. One step up where that lasts for LASTING_WINDOWS: a burst is no fault of the model, and is over before a
    worker could come for it. Forgotten slowly. What no size can meet is no reason."""
    memory, traffic, now = inputs.memory, inputs.traffic, inputs.now
    settled = all(pool.settled and not pool.warming for pool in inputs.pools.values())
    missing = traffic.judged >= MIN_JUDGED and traffic.attainment < inputs.rules.target.attainment - MISS_MARGIN
    since = None
    if missing and settled and not found.unreachable:
        since = memory.missing_since if memory.missing_since is not None else now
    passed = now - memory.boosted_at if memory.boosted_at else 0.0
    if memory.boosted_at and passed < inputs.rules.window_seconds:
        return memory.boost, memory.boosted_at, since
    fade = 0.5 ** (passed / FORGET_BOOST_SECONDS)
    boost = {role: 1 + (value - 1) * fade for role, value in memory.boost.items()}
    if since is not None and now - since >= LASTING_WINDOWS * inputs.rules.window_seconds:
        if reference(inputs, Role.DECODE) is None:
            short = Role.UNIFIED
        else:
            short = _short(inputs, supplies, found)
            if reference(inputs, short) is None:
                short = Role.DECODE
        if supplies.get(short.value, 0.0) >= found.of(short):
            boost[short.value] = min(boost.get(short.value, 1.0) * BOOST_STEP, MOST_BOOST)
    return {role: round(value, 4) for role, value in boost.items() if value > 1.005}, now, since


def _short(inputs: Inputs, supplies: Mapping[str, float], found: Needs) -> Role:
    """Prefill or decode: whose target is missed. Who was refused, or failed, missed neither: then who has the least beyond
    what is needed."""
    traffic = inputs.traffic
    neither = 1 - traffic.attainment - max(traffic.missed_ttft, traffic.missed_tpot)
    if neither > max(traffic.missed_ttft, traffic.missed_tpot):
        return min(
            (Role.PREFILL, Role.DECODE), key=lambda role: supplies.get(role.value, 0.0) / max(found.of(role), 1e-9)
        )
    return Role.PREFILL if traffic.missed_ttft > traffic.missed_tpot else Role.DECODE


def mean_length(inputs: Inputs) -> Length:
    traffic = inputs.traffic
    tokens = max(traffic.input_tokens, 1.0)
    return Length(tokens, max(traffic.output_tokens, 1.0), tokens * traffic.hit_rate)


def is_known(inputs: Inputs, role: Role) -> bool:
    """Whether what workers of this role do was measured by anybody."""
    pools = inputs.pools.values()
    prefill, decode = all(pool.prefill_known for pool in pools), all(pool.decode_known for pool in pools)
    return (prefill or role is Role.DECODE) and (decode or role is Role.PREFILL)


def _desired(inputs: Inputs, role: Role) -> float:
    """Workers that are to serve the role as it is, in those of its reference."""
    total = 0.0
    for name, pool in inputs.pools.items():
        own = inputs.rules.pools[name].role
        if own is role:
            total += (pool.desired.replicas - pool.desired.lent) * weight(inputs, name, role)
        elif own.other is role and pool.desired.lent:
            total += pool.desired.lent * weight(inputs, name, role)
    return total


def _ready(inputs: Inputs, role: Role) -> int:
    """Workers that serve the role now, whichever pool they are of."""
    total = 0
    for name, pool in inputs.pools.items():
        own = inputs.rules.pools[name].role
        if own is role:
            total += pool.ready - pool.ready_lent
        elif own.other is role:
            total += pool.ready_lent
    return total


def _lengths(inputs: Inputs) -> tuple[Length, ...]:
    length = mean_length(inputs)
    hit_rate = length.cached_tokens / length.input_tokens
    return _lengths_around(
        float(_stepped(length.input_tokens)), float(_stepped(length.output_tokens)), round(hit_rate, 2)
    )


@lru_cache(maxsize=1024)
def _lengths_around(input_tokens: float, output_tokens: float, hit_rate: float) -> tuple[Length, ...]:
    return tuple(lengths_around(input_tokens, output_tokens, hit_rate=hit_rate, cv=LENGTH_CV))


@lru_cache(maxsize=4096)
def _attainment(pools: Pools, prefill: Worker, decode: Worker, load: Load, target: Target) -> float | None:
    found = predict(pools, prefill, decode, load, target)
    return None if isinstance(found, Overload) else found.attainment


@lru_cache(maxsize=4096)
def _size(prefill: Worker, decode: Worker, load: Load, target: Target, unified: bool) -> Sized | Idle | Unreachable:
    return size(prefill, decode, load, target, unified=unified)


def _stepped(value: float) -> float:
    """The next of RATE_STEP's powers."""
    return RATE_STEP ** math.ceil(math.log(value, RATE_STEP) - 1e-6) if value > 0 else 0.0


def prefill_seconds(worker: Worker, length: Length) -> float:
    return max(worker.cost.prefill_seconds(round(length.computed_tokens), round(length.cached_tokens)), 1e-9)


def _tokens_per_second(worker: Worker, length: Length) -> float:
    """Of a worker whose rows, or KV, are half taken."""
    context = length.input_tokens + length.output_tokens / 2
    rows = max(min(worker.max_num_seqs, worker.kv_tokens / max(context, 1.0)) / 2, 1.0)
    return rows / max(worker.cost.decode_step_seconds(round(rows), round(rows * context)), 1e-9)
