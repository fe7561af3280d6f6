"""What serves in a week of `cluster.simulation.week`: a fluid, stepped by a second, and not request by request.

Prompts are worked off by as many workers as prefill, answers come at the cost model's step time of as many sequences as
decode; within a second waits are those of `cluster.planning` at the rate of the last half minute. A worker that drains has
its part of both, and nothing comes to it. One that flips keeps its part of what it served, and does it beside its new role.
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from cluster.planning.load import Length, Load, Pools, Target, Worker, lengths_around
from cluster.planning.prediction import Overload
from cluster.planning.queueing import normal_cdf
from cluster.planning.stages import predict
from cluster.scaling.values import Decoding, PoolRules, Rules
from cluster.simulation import cards
from headrace.config import AutoscalingConfig
from headrace.costmodel import CostModel
from headrace.values import ParallelLayout, Role

STEP_SECONDS = 1.0
DECIDE_SECONDS = 30
START_SECONDS = 180
FLIP_SECONDS = 5
DRAIN_SECONDS = AutoscalingConfig().drain_seconds
INPUT_TOKENS, OUTPUT_TOKENS, HIT_RATE, LENGTH_CV = 2000.0, 250.0, 0.3, 0.8


@dataclass(frozen=True, slots=True)
class World:
    """What serves, and what is owed."""

    worker: Worker
    lengths: tuple[Length, ...]
    target: Target

    @classmethod
    def of(cls, card_name: str = "h200") -> "World":
        card = cards.load(card_name)
        tokens = card.num_blocks * 32
        worker = Worker(card.cost, tokens, 256, 8192, card.block_bytes / 32)
        lengths = tuple(lengths_around(INPUT_TOKENS, OUTPUT_TOKENS, hit_rate=HIT_RATE, cv=LENGTH_CV))
        return cls(worker, lengths, Target(2.0, 0.02, 0.99))

    def rules(self, most: int, **changes: object) -> Rules:
        one = ParallelLayout()
        pools = {"decode": PoolRules(Role.DECODE, one, 1, most), "prefill": PoolRules(Role.PREFILL, one, 1, most)}
        rules = Rules(pools, self.target, lead_seconds=START_SECONDS + 2 * DECIDE_SECONDS)
        return replace(rules, **changes)  # type: ignore[arg-type]


@dataclass
class Draining:
    """A worker that takes nothing new, with the sequences and the seconds of prompts that it has left. It is gone when that
    is less than half a sequence (about when the longest of log-normal answers ends), or when its time is over."""

    sequences: float = 0.0
    prompt_seconds: float = 0.0
    seconds_left: float = DRAIN_SECONDS

    @property
    def is_gone(self) -> bool:
        return self.seconds_left <= 0 or (self.sequences < 0.5 and self.prompt_seconds <= 0)


@dataclass
class Flipped:
    """A worker that serves another role FLIP_SECONDS later, with what it has left of the one before, for as long as that
    takes. `late_seconds`: what prompts beside have cost each of its sequences."""

    sequences: float = 0.0
    prompt_seconds: float = 0.0
    late_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def prefills(self) -> bool:
        return self.sequences > 0 and self.seconds >= FLIP_SECONDS

    @property
    def is_over(self) -> bool:
        return self.sequences < 0.5 and self.prompt_seconds <= 0


@dataclass
class Fluid:
    """Owns what waits, what runs and what was counted; `cut` of those that ran out of the time to drain in, `slowed` of
    those that prompts beside them on a worker that flipped made miss their TPOT. A step is STEP_SECONDS."""

    world: World
    waiting_seconds: float = 0.0
    waiting_prompts: float = 0.0
    sequences: float = 0.0
    rate: float = 0.0
    arrived: int = 0
    kept: float = 0.0
    late: float = 0.0
    slow: float = 0.0
    cut: float = 0.0
    slowed: float = 0.0
    draining: list[Draining] = field(default_factory=list)
    flipped: list[Flipped] = field(default_factory=list)

    def drain_prefill(self, serving: int) -> Draining:
        """One of so many drains, and holds its GPU until is_gone."""
        return self._drain(Draining(prompt_seconds=self.waiting_seconds / serving))

    def drain_decode(self, serving: int) -> Draining:
        return self._drain(Draining(sequences=self.sequences / serving))

    def _drain(self, worker: Draining) -> Draining:
        self.waiting_seconds -= worker.prompt_seconds
        self.sequences -= worker.sequences
        self.draining.append(worker)
        return worker

    def flip(self, role: Role, serving: int) -> Flipped:
        """One of so many that serve `role` serves the other, and finishes what it has of this one beside that."""
        worker = Flipped()
        if role is Role.DECODE:
            worker.sequences = self.sequences / serving
        else:
            worker.prompt_seconds = self.waiting_seconds / serving
        self.waiting_seconds -= worker.prompt_seconds
        self.sequences -= worker.sequences
        self.flipped.append(worker)
        return worker

    @property
    def decoding(self) -> Decoding:
        """Of all, as workers say it of themselves."""
        number = self.sequences + sum(worker.sequences for worker in self.draining)
        number += sum(worker.sequences for worker in self.flipped)
        tokens = number * _means(self.world)[2]
        return Decoding(round(number), round(tokens), tokens / self.world.worker.kv_tokens)

    def step(self, arrivals: int, prefill: int, decode: int) -> float:
        """The share of those who came that keeps both targets."""
        world, cost = self.world, self.world.worker.cost
        service, tokens, context = _means(world)
        self.rate += (arrivals - self.rate) / 30
        before = self.waiting_seconds
        self.waiting_seconds += arrivals * service
        can = prefill * STEP_SECONDS - self._decoded_beside()
        done = min(self.waiting_seconds, max(can, 0.0))
        self.waiting_seconds -= done
        wait = (before + self.waiting_seconds) / 2 / prefill if prefill else 1e3  # who comes in the middle of it
        self.sequences = _decoding(self.sequences + done / service, tokens, context, decode, cost)
        self._pass_drains()
        self._pass_flips(done / max(can, done) if done else 0.0)
        rows = self.sequences / max(decode, 1)
        step_seconds = cost.decode_base_seconds + rows * _row_seconds(cost, context)
        self.waiting_prompts = self.waiting_seconds / service
        if not arrivals:
            return 1.0
        on_time = _on_time(world, prefill, decode, _coarse(self.rate), round(wait, 2))
        spread = math.sqrt(max(rows, 1.0)) * 0.5  # an answer averages over many steps
        slope = (step_seconds - cost.decode_base_seconds) / rows if rows else 1e-9
        quick = normal_cdf((world.target.tpot_seconds - step_seconds) / max(slope * spread, 1e-9)) if decode else 0.0
        self.arrived += arrivals
        self.kept += arrivals * on_time * quick
        self.late += arrivals * (1 - on_time)
        self.slow += arrivals * on_time * (1 - quick)
        return on_time * quick

    def _pass_drains(self) -> None:
        service, tokens, context = _means(self.world)
        cost = self.world.worker.cost
        for worker in self.draining:
            self._finish_prompts(worker, service)
            step_seconds = cost.decode_base_seconds + worker.sequences * _row_seconds(cost, context)
            worker.sequences *= math.exp(-STEP_SECONDS / (tokens * step_seconds))  # none comes
            worker.seconds_left -= STEP_SECONDS
            if worker.seconds_left <= 0:
                self.cut += worker.sequences + worker.prompt_seconds / service
        self.draining = [worker for worker in self.draining if not worker.is_gone]

    def _finish_prompts(self, worker: Draining | Flipped, service: float) -> None:
        done = min(worker.prompt_seconds, STEP_SECONDS)
        worker.prompt_seconds -= done
        self.sequences += done / service

    def _decoded_beside(self) -> float:
        """What the sequences of workers that flipped take, of the time that those have for prompts."""
        service, _, context = _means(self.world)
        steps = [self._steps(worker, context) for worker in self.flipped if worker.prefills]
        return sum(step / (step + service) for step in steps) * STEP_SECONDS

    def _steps(self, worker: Flipped, context: float) -> float:
        cost = self.world.worker.cost
        return cost.decode_base_seconds + worker.sequences * _row_seconds(cost, context)

    def _pass_flips(self, busy: float) -> None:
        """`busy`: the share of its time in which a worker that prefills has prompts. A step takes as much longer then; of
        who ends after more than a mean answer may lose, TPOT was missed."""
        service, tokens, context = _means(self.world)
        for worker in self.flipped:
            self._finish_prompts(worker, service)
            alone = self._steps(worker, context)
            beside = busy if worker.prefills else 0.0
            made = STEP_SECONDS * ((1 - beside) / alone + beside / (alone + service))
            ended = worker.sequences * (1 - math.exp(-made / tokens))
            worker.sequences -= ended
            worker.late_seconds += STEP_SECONDS - made * alone
            if worker.late_seconds > (self.world.target.tpot_seconds - alone) * tokens:
                self.slowed += ended
            worker.seconds += STEP_SECONDS
        self.flipped = [worker for worker in self.flipped if not worker.is_over]

    @property
    def attainment(self) -> float:
        return (self.kept - self.cut - self.slowed) / self.arrived if self.arrived else 1.0


def _row_seconds(cost: CostModel, context: float) -> float:
    """What a sequence adds to a step."""
    return cost.decode_sequence_seconds + cost.decode_context_token_seconds * context


def _decoding(there: float, tokens: float, context: float, decode: int, cost: CostModel) -> float:
    """Of so many sequences those that still decode after a step: as many leave as the step time of those that stay lets
    (backwards, so that a load that stays has the rows of Little's law, though a whole answer takes little more than a
    step)."""
    if not decode:
        return there
    answer, more = tokens * cost.decode_base_seconds, tokens * _row_seconds(cost, context) / decode
    middle = answer + STEP_SECONDS - there * more
    return (math.sqrt(middle * middle + 4 * more * there * answer) - middle) / (2 * more)


@lru_cache(maxsize=16)
def _means(world: World) -> tuple[float, float, float]:
    """(prefill seconds, tokens of an answer, context of a sequence), by the time that requests take."""
    lengths, cost = world.lengths, world.worker.cost
    service = sum(cost.prefill_seconds(round(x.computed_tokens), round(x.cached_tokens)) for x in lengths) / len(
        lengths
    )
    steps = [max(x.output_tokens - 1, 0.0) for x in lengths]
    context = sum(s * (x.input_tokens + x.output_tokens / 2) for s, x in zip(steps, lengths, strict=True)) / sum(steps)
    return service, sum(steps) / len(steps), context


def _coarse(rate: float) -> float:
    return 1.05 ** round(math.log(rate, 1.05)) if rate > 0.1 else 0.1


@lru_cache(maxsize=1 << 18)
def _on_time(world: World, prefill: int, decode: int, rate: float, waited: float) -> float:
    """Of those who find such a queue, beside what chance adds within a second."""
    left = world.target.ttft_seconds - waited
    if left <= 0 or not prefill or not decode:
        return 0.0
    service = _means(world)[0]
    steady = min(rate, 0.97 * prefill / service)  # beyond that it piles up, and `waited` says so
    found = predict(
        Pools(prefill, decode),
        world.worker,
        world.worker,
        Load(steady, world.lengths),
        replace(world.target, ttft_seconds=left),
    )
    if isinstance(found, Overload):
        found = predict(
            Pools(prefill, 1 << 12),
            world.worker,
            world.worker,
            Load(steady, world.lengths),
            replace(world.target, ttft_seconds=left),
        )
    return found.ttft_attainment if not isinstance(found, Overload) else 0.0
