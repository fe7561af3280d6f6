"""A model without arithmetic, and an executor that carries plans out on it and believes nothing.

KV at a position is the digest of all tokens up to it, so a block with wrong or foreign content is noticed at the next
step that reads it. A token drawn depends on that digest, the seed and the sample alone: `FakeModel.answer` says what a
request must get, however it was chunked, cached, preempted, forked or handed over.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from headrace.values import FinishReason, Request, SamplingParams, TokenLogprobs
from workers.blocks import BlockLedger, Hold
from workers.plan import RowStart, RowWork, StepPlan, StepResult

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
        sampling, tokens = request.sampling, []
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
        for block, epoch in plan.fresh:
            assert epoch > self.epochs[block], f"the epoch of block {block} grows"
            self.epochs[block] = epoch
            self.cells[block] = [EMPTY] * self.block_size if not self._pulled(block) else self.cells[block]
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
        fresh = True
        for (theirs, epoch), (ours, _) in pairs:
            fresh = fresh and source.epochs[theirs] == epoch
            self.cells[ours] = list(source.cells[theirs])
        return fresh

    def digest(self, blocks: Sequence[int], num_tokens: int) -> list[Cell]:
        return [self.cells[blocks[p // self.block_size]][p % self.block_size] for p in range(num_tokens)]

    def _pulled(self, block: int) -> bool:
        """Pulls go beside plans: a pulled block's content is there before the plan that names its epoch."""
        return any(self.cells[block])

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
