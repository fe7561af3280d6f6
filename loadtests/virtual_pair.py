"""One prefill and one decode worker under virtual time: the real schedulers and ledgers, no model, no process, no wire.

Step and transfer times come from a cost model; every event is applied in the order of its time. What the engines do
between the schedulers (claims, tickets, reads, releases) is done here as `workers.handoff` does it, messages in no time.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.blocks import BlockHasher
from headrace.costmodel import CostModel
from headrace.values import Request, RequestKey, SequenceOutput
from workers.scheduling.blocks import BlockLedger, Holding
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import ChunkDone, Scheduler, SchedulerLimits, StepEvents

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PairLimits:
    """`block_bytes` and `cost` say how long a read takes; up to this many prompt tokens decode computes alone."""

    scheduler: SchedulerLimits
    num_blocks: int
    block_size: int
    block_bytes: int
    cost: CostModel
    local_prefill_max_tokens: int = 64


@dataclass
class Usage:
    """Slots × seconds of both pools: held, filled, and what the filled ones need at least (whole blocks)."""

    held: float = 0.0
    filled: float = 0.0
    needed: float = 0.0
    peak_held_fraction: float = 0.0

    @property
    def waste_fraction(self) -> float:
        return (self.held - self.filled) / self.held if self.held else 0.0

    @property
    def floor_fraction(self) -> float:
        return (self.needed - self.filled) / self.needed if self.needed else 0.0


class VirtualEngine:
    """One worker: at most two plans in flight, one computing. A sample draws EOS as its `seed`th token, so that its end
    is no more known ahead than a real one's."""

    TOKEN, EOS = 7, 2

    def __init__(self, limits: PairLimits) -> None:
        self.cost = limits.cost
        self.ledger = BlockLedger(limits.num_blocks, limits.block_size)
        self.scheduler = Scheduler(
            limits.scheduler,
            self.ledger,
            lambda adapter, salt: BlockHasher(
                revision="r", kv_format="f", block_size=limits.block_size, adapter=adapter, cache_salt=salt
            ),
            eos_token_ids=(self.EOS,),
        )
        self.flights: deque[tuple[float, StepResult]] = deque()
        self.num_steps = 0
        self._busy_until = 0.0
        self._last_positions: dict[int, int] = {}

    def launch(self, now: float) -> bool:
        """Makes the next plan if one can be; whether it did."""
        if len(self.flights) == 2:
            return False
        plan = self.scheduler.schedule(now)
        if plan is None:
            return False
        self._busy_until = max(now, self._busy_until) + self._seconds(plan)
        self.flights.append((self._busy_until, self.result(plan)))
        self.num_steps += 1
        return True

    def land(self, now: float) -> StepEvents:
        self.ledger.drain_events()
        return self.scheduler.apply(self.flights.popleft()[1], now)

    def result(self, plan: StepPlan) -> StepResult:
        for start in plan.starts:
            self._last_positions[start.row] = len(start.prompt_ids) + start.sampling.seed - 1
        drawn: list[int] = []
        for work in plan.work:
            is_last = work.start + work.num_tokens >= self._last_positions[work.row]
            drawn += (self.EOS if is_last else self.TOKEN,) * work.num_samples
        return StepResult(plan.number, tuple(drawn))

    def _seconds(self, plan: StepPlan) -> float:
        decodes = plan.work[: plan.num_decodes]
        seconds = self.cost.decode_step_seconds(len(decodes), sum(work.start + 1 for work in decodes))
        for work in plan.work[plan.num_decodes :]:
            seconds += self.cost.prefill_seconds(work.num_tokens, work.start) - self.cost.prefill_base_seconds
        return seconds


@dataclass
class _HandOff:
    request: Request
    to_read: deque[Block] = field(default_factory=deque)
    num_reading: int = 0
    last: ChunkDone | None = None


class VirtualPair:
    """Feed it requests in order of time with run(); `usage` then holds what the pools held."""

    def __init__(self, limits: PairLimits) -> None:
        self.limits = limits
        self.prefill = VirtualEngine(limits)
        self.decode = VirtualEngine(limits)
        self.usage = Usage()
        self.num_finished = 0
        self.num_tokens = 0
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._asking: dict[RequestKey, _HandOff] = {}
        self._handoffs: dict[RequestKey, _HandOff] = {}

    def run(self, arrivals: Iterable[tuple[float, Request]]) -> None:
        """Until the last of the arrivals is answered."""
        for seconds, request in arrivals:
            self._until(seconds)
            self._advance(seconds)
            self._arrive(request)
            self._go_on()
        self._until(float("inf"))

    def _until(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            at, _, happen = heapq.heappop(self._events)
            self._advance(at)
            happen()
            self._go_on()

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (seconds, self._num_events, happen))

    def _advance(self, seconds: float) -> None:
        elapsed, self._now = seconds - self._now, seconds
        if elapsed <= 0:
            return
        size, usage = self.limits.block_size, self.usage
        for engine in (self.prefill, self.decode):
            counts = engine.ledger.counts()
            held = counts.active + counts.pinned + counts.quarantined
            usage.held += held * size * elapsed
            usage.peak_held_fraction = max(usage.peak_held_fraction, held / counts.total)
            for filled in engine.scheduler.filled_positions():
                usage.filled += filled * elapsed
                usage.needed += -(-filled // size) * size * elapsed

    def _go_on(self) -> None:
        for key in list(self._asking):
            if self.decode.scheduler.incoming.may_claim(key):
                handoff = self._handoffs[key] = self._asking.pop(key)
                held_blocks = self.decode.scheduler.incoming.claim(key).held_blocks
                self.prefill.scheduler.ticket(handoff.request, held_blocks, self._now)
        for key, handoff in list(self._handoffs.items()):
            self._read(key, handoff)
        for engine in (self.prefill, self.decode):
            while engine.launch(self._now):
                self._at(engine.flights[-1][0], lambda engine=engine: self._land(engine))  # type: ignore[misc]

    def _arrive(self, request: Request) -> None:
        outlook = self.decode.scheduler.expect(request, self._now)
        if outlook.remaining <= self.limits.local_prefill_max_tokens:
            self.decode.scheduler.incoming.fall_back(request.key, request.key, self._now)
        else:
            self._asking[request.key] = _HandOff(request)

    def _land(self, engine: VirtualEngine) -> None:
        events = engine.land(self._now)
        for chunk in events.chunks:
            handoff = self._handoffs[chunk.key]
            handoff.to_read.extend(chunk.blocks)
            if chunk.last:
                handoff.last = chunk
        self._count(events.outputs)

    def _read(self, key: RequestKey, handoff: _HandOff) -> None:
        scheduler, last = self.decode.scheduler, handoff.last
        if last is not None:
            outputs = scheduler.incoming.finish_early(key, last.first_tokens, last.cached_tokens, self._now)
            if outputs is not None:
                self._over(key, outputs)
                return
        if handoff.to_read and not handoff.num_reading:
            ours = scheduler.incoming.allocate(key, len(handoff.to_read))
            if ours is not None:
                handoff.num_reading = len(ours)
                handoff.to_read.clear()
                pull = scheduler.incoming.begin_pull(ours)
                seconds = self.limits.cost.transfer_seconds(len(ours) * self.limits.block_bytes)
                self._at(self._now + seconds, lambda: self._end_read(key, handoff, pull))
        elif last is not None and not handoff.to_read and not handoff.num_reading:
            self._over(key, scheduler.incoming.arrive(key, last.first_tokens, last.cached_tokens, self._now))

    def _end_read(self, key: RequestKey, handoff: _HandOff, pull: Holding) -> None:
        self.decode.scheduler.incoming.end_pull(pull)
        if key in self._handoffs:
            self.decode.scheduler.incoming.landed(key, handoff.num_reading)
        handoff.num_reading = 0

    def _over(self, key: RequestKey, outputs: list[SequenceOutput]) -> None:
        del self._handoffs[key]
        self.prefill.scheduler.release(key, self._now)
        self._count(outputs)

    def _count(self, outputs: list[SequenceOutput]) -> None:
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        self.num_finished += sum(output.finish is not None for output in outputs)
