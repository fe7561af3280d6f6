"""What a request and a run were like: latencies, goodput, hits, balance, and each worker over time."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.goodput import Slo, percentiles
from headrace.values import Role
from router.decisions.placement import Why
from workers.scheduling.work import StepWork


@dataclass(slots=True, eq=False)
class Served:
    """A request as its client saw it. Times in seconds; `outcome` is empty while it is under way."""

    number: int
    input_tokens: int
    output_tokens: int
    arrived_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    num_generated: int = 0
    decode: str = ""
    prefill: str | None = None
    predicted_tokens: int = 0
    cached_tokens: int = 0
    num_attempts: int = 1
    outcome: str = ""
    whys: list[Why] = field(default_factory=list)


def met(slo: Slo, served: Served) -> bool:
    return served.outcome == "finished" and slo.met(ttft_seconds(served), tpot_seconds(served))


def ttft_seconds(served: Served) -> float:
    return served.first_token_at - served.arrived_at if served.first_token_at is not None else float("inf")


def tpot_seconds(served: Served) -> float | None:
    """None: the request had one token, and has no TPOT."""
    if served.num_generated < 2 or served.ended_at is None or served.first_token_at is None:
        return None
    return (served.ended_at - served.first_token_at) / (served.num_generated - 1)


@dataclass(slots=True)
class WorkerTally:
    """One worker, in slices of time: seconds it computed, prompt tokens it computed, tokens it decoded."""

    busy_seconds: list[float] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)
    decode_tokens: list[int] = field(default_factory=list)


class Tally:
    """Counts a run: a Watcher. A step counts in the slice of time in which it ends."""

    def __init__(self, roles: Iterable[tuple[str, Role]], slice_seconds: float = 1.0) -> None:
        self.roles = dict(roles)
        self.slice_seconds = slice_seconds
        self.served: list[Served] = []
        self.workers = {worker_id: WorkerTally() for worker_id in self.roles}

    def step(self, worker_id: str, now: float, work: StepWork, seconds: float) -> None:
        tally = self.workers[worker_id]
        number = int(now / self.slice_seconds)
        busy, prefill, decode = tally.busy_seconds, tally.prefill_tokens, tally.decode_tokens
        if len(busy) <= number:
            missing = number + 1 - len(busy)
            busy += [0.0] * missing
            prefill += [0] * missing
            decode += [0] * missing
        busy[number] += seconds
        prefill[number] += work.prefill_tokens
        decode[number] += work.num_sequences - work.num_prefills

    def ended(self, served: Served) -> None:
        self.served.append(served)

    def balance(self, role: Role) -> float | None:
        """The most loaded worker of a role ÷ their mean: seconds of computing, and for those that only decode tokens
        (they compute all the time, whatever they have). None: there is no such worker, or none had anything to do."""
        loads = [
            float(sum(tally.decode_tokens if role is Role.DECODE else tally.busy_seconds))
            for worker_id, tally in self.workers.items()
            if self.roles[worker_id] is role
        ]
        return max(loads) * len(loads) / sum(loads) if any(loads) else None


@dataclass(frozen=True, slots=True)
class Summary:
    """Percentiles of requests that finished; goodput and attainment of all (design: failed and shed ones count).

    `seconds`: from the first arrival to the last one, so that an idle end does not count against a rate. `hit_rate`:
    prompt tokens that nobody computed ÷ prompt tokens. `predicted_hit_rate`: the same as placement expected it.
    """

    policy: str
    num_requests: int
    outcomes: dict[str, int]
    seconds: float
    ttft_seconds: dict[str, float]
    tpot_seconds: dict[str, float]
    e2e_seconds: dict[str, float]
    goodput_per_second: float
    attainment: float
    hit_rate: float
    predicted_hit_rate: float
    placed_alone: int
    num_placed: dict[str, int]
    balance: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(policy: str, tally: Tally, slo: Slo) -> Summary:
    served = tally.served
    finished = [one for one in served if one.outcome == "finished"]
    outcomes: dict[str, int] = {}
    for one in served:
        outcomes[one.outcome] = outcomes.get(one.outcome, 0) + 1
    arrivals = [one.arrived_at for one in served]
    seconds = max(arrivals) - min(arrivals) if arrivals else 0.0
    num_good = sum(met(slo, one) for one in served)
    prompt_tokens = sum(one.input_tokens for one in finished)
    tpots = [tpot for one in finished if (tpot := tpot_seconds(one)) is not None]
    balances = ((role.value, tally.balance(role)) for role in Role)
    return Summary(
        policy=policy,
        num_requests=len(served),
        outcomes=dict(sorted(outcomes.items())),
        seconds=seconds,
        ttft_seconds=percentiles([ttft_seconds(one) for one in finished]),
        tpot_seconds=percentiles(tpots),
        e2e_seconds=percentiles([one.ended_at - one.arrived_at for one in finished if one.ended_at is not None]),
        goodput_per_second=num_good / seconds if seconds else 0.0,
        attainment=num_good / len(served) if served else 0.0,
        hit_rate=sum(one.cached_tokens for one in finished) / prompt_tokens if prompt_tokens else 0.0,
        predicted_hit_rate=sum(one.predicted_tokens for one in finished) / prompt_tokens if prompt_tokens else 0.0,
        num_placed=_num_placed(tally),
        placed_alone=sum(one.prefill is None for one in finished),
        balance={role: balance for role, balance in balances if balance is not None},
    )


def _num_placed(tally: Tally) -> dict[str, int]:
    """Requests by worker, each at the worker that decodes it and the one that prefills it."""
    counts = dict.fromkeys(tally.roles, 0)
    for one in tally.served:
        for worker_id in {one.decode, one.prefill} - {"", None}:
            counts[str(worker_id)] += 1
    return counts
