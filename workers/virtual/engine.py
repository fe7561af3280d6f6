"""One engine under virtual time: the production scheduler and ledger; steps take what the cost model says."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from headrace.blocks import ROOT, BlockHasher, BlockId
from headrace.costmodel import CostModel
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import Scheduler, SchedulerLimits, StepEvents
from workers.scheduling.work import StepFit, StepKind, StepWork
from workers.virtual.time import VirtualTime

TOKEN, EOS = 7, 2
LEARNING_STEPS = 128
TEACH_EVERY = 8

_ROW = attrgetter("row")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a virtual worker runs on. `cost` is the truth about it, which production learns and never is told.

    `graph_tokens`: numbers of tokens that steps with prompts are padded to, where it has graphs of them. `landing_seconds`:
    from a step's end on the device until what came of it is told; the next one runs meanwhile.
    """

    scheduler: SchedulerLimits
    num_blocks: int
    block_size: int
    block_bytes: int
    cost: CostModel
    graph_tokens: tuple[int, ...] = ()
    landing_seconds: float = 0.0


class Prompt(tuple[int, ...]):
    """Token ids that remember their block ids: all who hash a prompt compute the same."""

    chain: list[BlockId] | None = None


class RememberingHasher(BlockHasher):
    """The ids that a BlockHasher gives, computed once a Prompt. Of one cache domain: a Prompt is hashed by no other."""

    def chain(self, token_ids, parent=ROOT):  # type: ignore[no-untyped-def]
        if parent != ROOT or not isinstance(token_ids, Prompt):
            return super().chain(token_ids, parent)
        if token_ids.chain is None:
            token_ids.chain = list(super().chain(token_ids))
        return iter(token_ids.chain)


def virtual_hasher(block_size: int) -> RememberingHasher:
    """What all virtual workers, and those who place on them, hash with."""
    return RememberingHasher(revision="virtual", kv_format="virtual", block_size=block_size)


class VirtualEngine:
    """At most two plans in flight, one computing: one step ahead, as the real engine. Owns its scheduler. (Where that
    launches late, what is handed over has its second token up to a step sooner than here; the first is not decode's.)

    A sample draws EOS as its `sampling.seed`th token, so that its end is no more known ahead than a real one's.
    `on_step` hears of every step when it ended and what it took, before what came of it is passed to `on_landed`.
    Decode steps follow the cost exactly, so after the first LEARNING_STEPS only every TEACH_EVERYth teaches the fit.
    """

    def __init__(
        self,
        time: VirtualTime,
        machine: Machine,
        hasher: BlockHasher,
        on_landed: Callable[[StepEvents], None],
        on_step: Callable[[float, StepWork, float], None] | None = None,
    ) -> None:
        self.ledger = BlockLedger(machine.num_blocks, machine.block_size)
        self.scheduler = Scheduler(machine.scheduler, self.ledger, lambda adapter, salt: hasher, eos_token_ids=(EOS,))
        self.fit = StepFit(graph_tokens=machine.graph_tokens)
        self.num_steps = 0
        self._time = time
        self._cost = machine.cost
        self._graph_tokens = machine.graph_tokens
        self._landing_seconds = machine.landing_seconds
        self._on_landed = on_landed
        self._on_step = on_step
        self._flights: deque[tuple[StepPlan, StepWork, float]] = deque()
        self._busy_until = 0.0
        self._last_positions: dict[int, int] = {}
        self._decoding: list[int] = []  # the rows of the last plan, if they decoded alone
        self._num_endless = 0  # plans in which none of them comes to its end, if these are of them alone and start none

    def go_on(self) -> None:
        """Plans as far ahead as may be."""
        flights, time = self._flights, self._time
        while len(flights) < 2:
            plan = self.scheduler.schedule(time.now)
            if plan is None:
                return
            work = StepWork.of(plan)
            seconds = work.seconds(self._cost, self._graph_tokens)
            self._busy_until = max(time.now, self._busy_until) + seconds
            flights.append((plan, work, seconds))
            time.at(self._busy_until + self._landing_seconds, self._land)

    def _land(self) -> None:
        plan, work, seconds = self._flights.popleft()
        now = self._time.now
        events = self.scheduler.apply(self._result(plan), now)
        self.num_steps += 1
        if work.kind is not StepKind.DECODE or self.num_steps < LEARNING_STEPS or not self.num_steps % TEACH_EVERY:
            self.fit.add(work, seconds)
        if self._on_step is not None:
            self._on_step(now, work, seconds)
        self._on_landed(events)

    def _result(self, plan: StepPlan) -> StepResult:
        num_decodes = plan.num_decodes
        # A row that has waited for a block comes back without a start, maybe in another's place.
        rows = list(map(_ROW, plan.work)) if num_decodes == len(plan.work) else []
        same, self._decoding = rows == self._decoding and not plan.starts, rows
        if self._num_endless > 0 and same:
            self._num_endless -= 1  # a row comes one position further in a plan
            return StepResult(plan.number, (TOKEN,) * num_decodes)
        last = self._last_positions
        for start in plan.starts:
            last[start.row] = len(start.prompt_ids) + start.sampling.seed - 1
        left = [last[work.row] - work.start - 1 for work in plan.work[:num_decodes]]
        drawn = [TOKEN if its > 0 else EOS for its in left]
        self._num_endless = min(left) - 1 if rows else 0
        for work in plan.work[num_decodes:]:
            is_last = work.start + work.num_tokens >= last[work.row]
            drawn += (EOS if is_last else TOKEN,) * work.num_samples
        return StepResult(plan.number, tuple(drawn))
