"""Pools as the autoscaler sees them: many workers as one value a pool."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from cluster.lifecycle import Desired, DesiredPool, Phase
from cluster.planning.load import Worker
from cluster.scaling.values import Decoding, PoolRules, PoolSeen, Rules, Size
from headrace.costmodel import CostModel
from headrace.values import ParallelLayout, Role

WARM_SECONDS = 60.0  # after it became ready: first steps are slow, and say nothing of the others
GUESS = CostModel()
LEAST = {"prefill_base_seconds": 1e-6, "decode_base_seconds": 1e-6}  # a fit may put all of a step on its sequences
LINES = (
    ("prefill_base_seconds", "prefill_token_seconds", "prefill_token_context_seconds"),
    ("decode_base_seconds", "decode_sequence_seconds", "decode_context_token_seconds"),
)


@dataclass(frozen=True, slots=True)
class Member:
    """One worker, by its controller's table, its lease and its own words. `speed` None: it holds no lease. `evicted`: its
    node is about to go; `failing`: it starts, after it failed to several times. `num_sequences` decode, in so many of its
    tokens, also where it leaves, or prefills by now."""

    pool: str
    role: Role
    phase: Phase
    seconds: float
    pending: bool = False
    speed: Worker | None = None
    used_blocks: int = 0
    num_blocks: int = 0
    waiting_tokens: int = 0
    evicted: bool = False
    failing: bool = False
    num_sequences: int = 0
    context_tokens: int = 0


def observe(
    rules: Rules, desired: Desired, members: Iterable[Member], known: Mapping[str, Worker]
) -> dict[str, PoolSeen]:
    """`known`: what a worker of each pool was like when last there was one."""
    by_pool: dict[str, list[Member]] = {name: [] for name in rules.pools}
    for member in members:
        if member.pool in by_pool:
            by_pool[member.pool].append(member)
    measured = {name: _typical(its) or known.get(name) for name, its in by_pool.items()}
    prefill, decode = (any(_has(worker, line) for worker in measured.values() if worker is not None) for line in LINES)
    return {
        name: replace(
            _seen(rules.pools[name], desired.pools.get(name), its, _priced(name, rules, measured)),
            prefill_known=prefill,
            decode_known=decode,
        )
        for name, its in by_pool.items()
    }


def _has(worker: Worker, line: tuple[str, ...]) -> bool:
    """Whether the worker has measured any of it."""
    return any(getattr(worker.cost, field) != getattr(GUESS, field) for field in line)


def _seen(rules: PoolRules, desired: DesiredPool | None, members: Sequence[Member], worker: Worker) -> PoolSeen:
    ready = [member for member in members if member.phase is Phase.READY]
    starting = [member for member in members if member.phase is Phase.STARTING]
    pending = [member.seconds for member in starting if member.pending]
    decoding = [member for member in ready if member.role.decodes and member.num_blocks]
    size = Size(desired.replicas, desired.lent) if desired is not None else Size(0)
    return PoolSeen(
        desired=size,
        worker=worker,
        ready=len(ready),
        ready_lent=sum(member.role is rules.role.other is not rules.role for member in ready),
        starting=len(starting) - len(pending),
        pending=len(pending),
        pending_seconds=max(pending, default=0.0),
        leaving=sum(member.phase in (Phase.DRAINING, Phase.DRAINED) for member in members),
        warming=sum(member.seconds < WARM_SECONDS for member in ready),
        kv_used=sum(member.used_blocks / member.num_blocks for member in decoding) / len(decoding) if decoding else 0.0,
        waiting_tokens=sum(member.waiting_tokens for member in ready),
        evicted=sum(member.evicted for member in members),
        failing=sum(member.failing and not member.pending for member in starting),
        decoding=_decoding(members),
    )


def _decoding(members: Sequence[Member]) -> Decoding:
    its = [one for one in members if one.phase in (Phase.READY, Phase.DRAINING) and one.num_sequences]
    # Prompts that are computed there hold blocks too, and sequences of one prompt share theirs: the lesser of both.
    kv = [
        min(
            one.used_blocks / one.num_blocks if one.num_blocks else 1.0,
            one.context_tokens / one.speed.kv_tokens if one.speed is not None else 1.0,
        )
        for one in its
        if one.num_blocks or one.speed is not None
    ]
    return Decoding(
        sum(one.num_sequences for one in its), sum(one.context_tokens for one in its), float(f"{sum(kv):.4g}")
    )


def _typical(members: Sequence[Member]) -> Worker | None:
    """The median of what warm workers measured; of all, where none is warm yet."""
    with_lease = [member for member in members if member.speed is not None]
    warm = [member for member in with_lease if member.phase is Phase.READY and member.seconds >= WARM_SECONDS]
    speeds = [member.speed for member in warm or with_lease if member.speed is not None]
    if not speeds:
        return None
    cost = CostModel(
        **{
            field.name: max(_rounded(median(values)), LEAST.get(field.name, 0.0))
            for field in fields(CostModel)
            if (values := _measured([getattr(speed.cost, field.name) for speed in speeds], getattr(GUESS, field.name)))
        }
    )
    return replace(speeds[0], cost=cost)


def _rounded(value: float) -> float:
    """To two digits: fits wobble, and sizes shall not."""
    return float(f"{value:.1e}")


def _measured(values: Sequence[float], guess: float) -> Sequence[float]:
    """Without those that nobody has measured yet, unless that is all there is."""
    return [value for value in values if value != guess] or values


def _priced(name: str, rules: Rules, measured: Mapping[str, Worker | None]) -> Worker:
    """What this pool's workers have not done yet, such as prefill where they decode, is priced by those who do it: as
    fast on as many ranks, and faster or slower by how many more or fewer ranks there are."""
    layout = rules.pools[name].layout
    others = sorted(
        ((rules.pools[other].layout, worker) for other, worker in measured.items() if worker is not None),
        key=lambda found: abs(found[0].world_size - layout.world_size),
    )
    worker = measured[name]
    if worker is None:
        if not others:
            return Worker(GUESS, kv_tokens=1e6)
        worker = _scaled(others[0][1], others[0][0], layout)
    cost = worker.cost
    for line in LINES:
        if not _has(worker, line):
            for theirs, other in others:
                priced = _scaled(other, theirs, layout).cost
                if _has(other, line):
                    cost = replace(cost, **{field: getattr(priced, field) for field in line})
                    break
    return replace(worker, cost=cost)


def _scaled(worker: Worker, theirs: ParallelLayout, ours: ParallelLayout) -> Worker:
    factor = theirs.world_size / ours.world_size
    cost = replace(worker.cost, **{field: getattr(worker.cost, field) * factor for line in LINES for field in line})
    return replace(worker, cost=cost, kv_tokens=worker.kv_tokens / factor)
