"""A model without arithmetic, and an executor that carries plans out on it and believes nothing.

KV at a position is the digest of all tokens up to it, so a block with wrong or foreign content is noticed at the next
step that reads it. A token drawn depends on that digest, the seed and the sample alone: `FakeModel.answer` says what a
request must get, however it was chunked, cached, preempted, forked or handed over.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from headrace.blocks import BlockHasher
from headrace.values import FinishReason, Request, RequestKey, SamplingParams, SequenceOutput, TokenLogprobs
from workers.scheduling.blocks import BlockLedger, Hold
from workers.scheduling.plan import RowStart, RowWork, StepPlan, StepResult
from workers.scheduling.scheduler import ChunkDone, Scheduler, SchedulerLimits, StepEvents

Cell = bytes
EMPTY: Cell = b""


@dataclass(frozen=True)
class FakeModel:
    """Draws from `vocab_size` tokens. Before min_tokens neither EOS nor a stop id can be drawn, as the sampler has it."""

    vocab_size: int = 32
    eos_token_ids: frozenset[int] = frozenset({0})
    max_context_tokens: int = 10_000

    def cell(self, before: Cell, token_id: int) -> Cell:
        return blake2b(before + token_id.to_bytes(4, "little"), digest_size=8).digest()

    def draw(self, cell: Cell, sampling: SamplingParams, sample_index: int, num_before: int) -> int:
        seed = cell + sampling.seed.to_bytes(8, "little") + sample_index.to_bytes(4, "little")
        token = int.from_bytes(blake2b(seed, digest_size=4).digest(), "little") % self.vocab_size
        banned = self.eos_token_ids | set(sampling.stop_token_ids) if num_before < sampling.min_tokens else frozenset()
        while token in banned:
            token = (token + 1) % self.vocab_size
        return token

    def answer(self, request: Request, index: int = 0) -> tuple[list[int], FinishReason]:
        """The tokens and finish that sample `index` must get."""
        cell = EMPTY
        for token in request.prompt_token_ids:
            cell = self.cell(cell, token)
        sampling, tokens = request.sampling, list[int]()
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.eos_token_ids)
        while True:
            token = self.draw(cell, sampling, index, len(tokens))
            tokens.append(token)
            if token in stops and len(tokens) >= sampling.min_tokens:
                return tokens, FinishReason.STOP
            total = request.num_prompt_tokens + len(tokens)
            if len(tokens) == sampling.max_tokens or total == self.max_context_tokens:
                return tokens, FinishReason.LENGTH
            cell = self.cell(cell, token)


@dataclass
class _Row:
    start: RowStart
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_computed: int | None = None
    last_drawn: int | None = None


class PlanChecker:
    """Carries plans out in order and asserts that each is one that ranks can obey. With a ledger it also asserts, when
    the plan is handed over, that every block it writes is held by the writer alone."""

    def __init__(
        self,
        model: FakeModel,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        ledger: BlockLedger | None = None,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_step_tokens = max_step_tokens
        self.ledger = ledger
        self.cells: list[list[Cell]] = [[EMPTY] * block_size for _ in range(num_blocks)]
        self.epochs = [0] * num_blocks
        self.rows: dict[int, _Row] = {}
        self.pulled: set[tuple[int, int]] = set()
        self.last_number = 0
        self.num_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        assert plan.number == self.last_number + 1, "plans are numbered without a gap"
        self.last_number = plan.number
        assert plan.work, "a plan computes something"
        assert plan.num_tokens <= self.max_step_tokens, "the token budget holds"
        self.num_tokens += plan.num_tokens
        for row in plan.ends:
            del self.rows[row]
        assert len(set(plan.fresh)) == len(plan.fresh)
        for block, epoch in dict(plan.fresh).items():
            assert epoch > self.epochs[block] or (block, epoch) in self.pulled, f"the epoch of block {block} grows"
            self.epochs[block] = epoch
        self.pulled.clear()
        for source, target in plan.copies:
            self.cells[target] = list(self.cells[source])
        for start in plan.starts:
            assert 0 <= start.row < self.max_num_seqs, f"row {start.row} exists"
            assert start.row not in self.rows, f"row {start.row} is free"
            self.rows[start.row] = _Row(start, tokens=[*start.prompt_ids, *start.output_ids])
        assert len({work.row for work in plan.work}) == len(plan.work), "a row works once in a step"
        for at, work in enumerate(plan.work):
            assert work.num_tokens >= 1
            assert at >= plan.num_decodes or (work.num_tokens == 1 and work.num_samples == 1), "decode rows lead"
            self.rows[work.row].blocks.extend(work.new_blocks)
        if self.ledger is not None:
            self._check_writers(plan)
        drawn: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for work in plan.work:
            tokens, found = self._work(work)
            drawn += tokens
            logprobs += found
        return StepResult(plan.number, tuple(drawn), tuple(logprobs) if any(logprobs) else ())

    def _work(self, work: RowWork) -> tuple[list[int], list[TokenLogprobs | None]]:
        row, size = self.rows[work.row], self.block_size
        end = work.start + work.num_tokens
        if row.num_computed is not None:
            assert work.start == row.num_computed, f"row {work.row} goes on at {row.num_computed}, not {work.start}"
        if work.token_ids is None:
            assert work.num_tokens == 1, "only a decode row may say 'what you drew last'"
            assert row.last_drawn is not None, f"row {work.row} drew nothing yet"
            assert work.start == len(row.tokens) - 1
        else:
            assert len(work.token_ids) == work.num_tokens
            assert tuple(row.tokens[work.start : end]) == work.token_ids, f"row {work.row} has other tokens there"
        assert end <= len(row.blocks) * size, f"row {work.row} has blocks for its positions"
        cell = EMPTY
        for position, token in enumerate(row.tokens[:end]):
            cell = self.model.cell(cell, token)
            block, at = row.blocks[position // size], position % size
            if position < work.start:
                assert self.cells[block][at] == cell, f"row {work.row} reads foreign KV at {position} (block {block})"
            else:
                self.cells[block][at] = cell
        row.num_computed = end
        if work.num_samples == 0:
            assert end < len(row.tokens), "the last chunk of a prompt draws"
            return [], []
        assert end == len(row.tokens), "only the last position draws"
        start = row.start
        num_before = end - len(start.prompt_ids)
        first = start.sample_index
        tokens = [self.model.draw(cell, start.sampling, first + i, num_before) for i in range(work.num_samples)]
        row.tokens.append(tokens[0])
        row.last_drawn = tokens[0]
        asked = start.sampling.num_logprobs is not None
        return tokens, [self.logprobs(token) if asked else None for token in tokens]

    @staticmethod
    def logprobs(token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -float(token_id))

    # -- hand-offs

    def pull(self, source: "PlanChecker", pairs: Iterable[tuple[tuple[int, int], tuple[int, int]]]) -> bool:
        """Reads ((block, epoch) of the source, (block, epoch) of ours) pairs; False when a source epoch had moved."""
        valid = True
        for (theirs, epoch), (ours, our_epoch) in pairs:
            valid = valid and source.epochs[theirs] == epoch
            self.cells[ours] = list(source.cells[theirs])
            self.epochs[ours] = our_epoch
            self.pulled.add((ours, our_epoch))
        return valid

    def _check_writers(self, plan: StepPlan) -> None:
        assert self.ledger is not None
        holders: dict[int, int] = {}
        for holding in self.ledger.holdings():
            if holding.state is Hold.QUARANTINED and isinstance(holding.owner, tuple) and holding.owner[0] == "copy":
                continue
            for block in holding.blocks:
                holders[block] = holders.get(block, 0) + 1
        tables: dict[int, int] = {}
        for row in self.rows.values():
            for block in row.blocks:
                tables[block] = tables.get(block, 0) + 1
        for work in plan.work:
            blocks = self.rows[work.row].blocks
            first, last = work.start // self.block_size, (work.start + work.num_tokens - 1) // self.block_size
            for block in blocks[first : last + 1]:
                assert holders.get(block) == 1, (
                    f"block {block} is written by row {work.row} and has {holders.get(block)} owners"
                )
                assert tables[block] == 1, f"block {block} is written by row {work.row} and stands in another's table"


class CheckedWorker:
    """A scheduler and the executor that checks it: an engine without time. With `overlap` so many plans are in flight as
    the limits let be, otherwise one. Outputs are collected by request and sample, and checked as they come."""

    def __init__(
        self,
        model: FakeModel | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_step_tokens: int = 16,
        max_waiting: int = 1000,
        pin_seconds: float = 10.0,
        overlap: bool = True,
        **limits: float,
    ) -> None:
        self.model = model or FakeModel()
        self.ledger = BlockLedger(num_blocks, block_size)
        self.limits = SchedulerLimits(
            max_num_seqs,
            max_step_tokens,
            self.model.max_context_tokens,
            max_waiting,
            pin_seconds,
            **limits,  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(
            self.limits,
            self.ledger,
            lambda adapter, salt: BlockHasher(
                revision="r", kv_format="f", block_size=block_size, adapter=adapter, cache_salt=salt
            ),
            eos_token_ids=self.model.eos_token_ids,
            vocab_size=self.model.vocab_size,
        )
        self.checker = PlanChecker(
            self.model,
            num_blocks,
            block_size,
            max_num_seqs=max_num_seqs,
            max_step_tokens=self.limits.plan_tokens,
            ledger=self.ledger,
        )
        self.most_in_flight = self.limits.plans_in_flight if overlap else 1
        self.flights: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.ahead: list[ChunkDone] = []
        self.outputs: dict[tuple[RequestKey, int], list[SequenceOutput]] = {}

    @property
    def is_full(self) -> bool:
        return len(self.flights) >= self.most_in_flight

    def launch(self, now: float = 0.0) -> StepPlan | None:
        plan = self.scheduler.schedule(now)
        self.ledger.audit()
        if plan is not None:
            self.plans.append(plan)
            self.flights.append(self.checker.run(plan))
            self.ahead += self.scheduler.take_ahead()
        return plan

    def land(self, now: float = 0.0) -> StepEvents:
        events = self.scheduler.apply(self.flights.popleft(), now)
        self.ledger.audit()
        self.collect(events.outputs)
        return events

    def collect(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            known = self.outputs.setdefault((output.key, output.index), [])
            assert not known or known[-1].finish is None, f"{output} comes after the last"
            assert output.num_generated == sum(len(o.token_ids) for o in known) + len(output.token_ids)
            known.append(output)

    def turn(self, now: float = 0.0) -> StepEvents:
        """One turn of the engine's loop: at most one plan made, and a result taken when it is time to."""
        plan = None if self.is_full else self.launch(now)
        if self.flights and (plan is None or self.is_full):
            return self.land(now)
        return StepEvents()

    def run(self, now: float = 0.0, max_turns: int = 10_000) -> list[StepEvents]:
        """Turns until nothing can be computed any more."""
        events: list[StepEvents] = []
        for _ in range(max_turns):
            plan = None if self.is_full else self.launch(now)
            if plan is None and not self.flights:
                return events
            if plan is None or self.is_full:
                events.append(self.land(now))
        raise AssertionError(f"no end after {max_turns} turns")

    def tokens(self, key: RequestKey, index: int = 0) -> list[int]:
        return [token for output in self.outputs.get((key, index), []) for token in output.token_ids]

    def finish(self, key: RequestKey, index: int = 0) -> FinishReason | None:
        outputs = self.outputs.get((key, index), [])
        return outputs[-1].finish if outputs else None

    def check_answer(self, request: Request) -> None:
        """Every sample of a finished request has exactly the model's tokens and finish."""
        for index in range(request.n):
            answer = self.model.answer(request, index)
            assert (self.tokens(request.key, index), self.finish(request.key, index)) == answer, (request.key, index)

    def check_empty(self) -> None:
        """Nothing is held: every block is free or cached."""
        counts = self.scheduler.counts()
        assert self.ledger.holdings() == ()
        assert counts.free + counts.cached == counts.total == self.ledger.num_blocks
