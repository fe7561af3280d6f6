"""From plans to tokens on one rank: its shard of the model, its part of the KV pool, its rows, and the draw.

Every rank of a worker is given the same plans in the same order; none runs ahead of it. On a device of its own a plan is
launched and not awaited: what a row drew stays there for the row's next step, and goes to the host beside it. Between
ranks go only the sums inside layers, the residual stream from stage to stage, and the drawn tokens back to the first
stage.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.values import ParallelLayout, SamplingParams
from kernels.choose import choose
from workers.kv.layout import num_blocks, slab_of
from workers.kv.pool import KvPool
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import RankContext, Store, Work, form
from workers.models.transformer import Transformer
from workers.models.weights import LoadProgress, Wanted, load, no_progress
from workers.ranks.drawn import Draw, Drawn
from workers.ranks.graphs import DecodeGraphs, GraphMemory
from workers.ranks.prompt_graphs import PromptGraphs
from workers.ranks.rank_runner import Launched, UnderWay
from workers.ranks.returning import Returning
from workers.ranks.rows import PromptInputs, Rows, StepInputs, late_rows
from workers.ranks.sampler import Sampler
from workers.ranks.staging import to_device
from workers.ranks.starting import Phases, weights_progress
from workers.scheduling.plan import RowStart, RowWork, StepPlan, StepResult
from workers.spec import WorkerSpec

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# shown, on the rank that draws, each plan and float32 logits [rows that draw, vocabulary] before anything adjusts them
Observe = Callable[[StepPlan, Tensor], None]
# fills what the model wants; told (done, wanted)
Fill = Callable[[Checkpoint, tuple[Wanted, ...], LoadProgress], None]

WARM_UP = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9)
LATER_CHUNK = 512  # beyond what shares its context among programs
GREEDY_WARM_UP = SamplingParams(max_tokens=2, temperature=0.0)


def make_runner(
    spec: WorkerSpec, rank: int, store: Store, *, record_margins: bool = False, fill: Fill = load
) -> "Runner":
    """A rank of the worker that `spec` describes, weights loaded; all its ranks meet at `store`. Sets the number of
    torch's threads, which is the whole process's. On GPUs each rank of a machine has one of those that it sees."""
    torch.set_num_threads(spec.engine.torch_threads)
    checkpoint = Checkpoint.open(spec.model_path)
    device = torch.device("cpu")
    if spec.engine.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    phases = Phases()
    context = form(spec.layout, rank, store, device=device)
    phases.ended("joined")
    watched = weights_progress(sys.stderr) if rank == 0 else nullcontext(no_progress)
    with watched as progress:
        runner = Runner(
            *(checkpoint, spec.layout, rank, spec.engine, context),
            record_margins=record_margins,
            fill=fill,
            progress=progress,
        )
    phases.ended("model and weights")
    log.info("rank %d: %s", rank, phases)
    return runner


def served_context(checkpoint: Checkpoint, engine: EngineConfig) -> int:
    """The most tokens a sequence can have: the configuration's, at most the model's own."""
    own = checkpoint.config.context
    asked = engine.max_context_tokens
    if asked is not None and asked > own.tokens:
        because = f" ({own.reason})" if own.reason else ""
        raise ConfigError.out_of_range("engine.max_context_tokens", asked, f"at most the model's {own.tokens}{because}")
    return own.tokens if asked is None else asked


class Runner:
    """One rank of a worker; a RankRunner (ranks.rank). Called by one thread; links read and write `pool` beside it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: ParallelLayout,
        rank: int,
        engine: EngineConfig,
        context: RankContext,
        *,
        record_margins: bool = False,
        observe: Observe | None = None,
        fill: Fill = load,
        graphs: bool = True,
        progress: LoadProgress = no_progress,
    ) -> None:
        config, dtype = checkpoint.config, DTYPES[engine.dtype]
        if engine.deterministic:
            log.info(
                "deterministic: no library's products or dense attention, no shares by the batch, sums in rank order"
            )
        self.shape = config.shape
        self.slab = slab_of(config.shape, layout, rank, engine)
        self.num_blocks = num_blocks(config.shape, layout, engine)
        self.max_context_tokens = served_context(checkpoint, engine)
        self._context = context = replace(context, fixed_order=engine.deterministic)
        self._engine = engine
        self._hidden_size, self._dtype = config.hidden_size, dtype
        self._ops, self._num_heads = (
            choose(context.device, deterministic=engine.deterministic),
            config.num_heads // layout.tp,
        )
        self._model = Transformer(config, context, self._ops, dtype, self.max_context_tokens)
        fill(checkpoint, self._model.wanted, progress)
        self.pool = KvPool(self.slab, self.num_blocks, dtype, context.device)
        blocks_per_row = -(-self.max_context_tokens // engine.block_size)
        self._rows = Rows(engine.max_num_seqs, blocks_per_row, engine.block_size, context.device)
        self._graph_memory = GraphMemory(context.device)
        self._decodes: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None
        if graphs and context.device.type == "cuda":
            parts = (self._model, self.pool.tensor, self._rows, self._graph_memory, engine.max_num_seqs)
            self._decodes = DecodeGraphs(*parts, context, self._ops)
            if layout.pp == 1:
                self._prompts = PromptGraphs(*parts, engine.max_step_tokens)
        self._sampler: Sampler | None = None
        if context.samples:
            self._sampler = Sampler(
                *(engine.max_num_seqs, config.vocab_size, config.eos_ids, context.device),
                record_margins=record_margins,
                deterministic=engine.deterministic,
            )
        self._observe = observe
        self._returning = Returning(context, self._rows)
        self._passing: tuple[Tensor, Work] | None = None

    def warm_up(self) -> None:
        """Steps of full length, of one token, and of a short and a later chunk, drawn from by chance and greedily, in the
        trash block: what is made on first use is made now."""
        size, trash = self._engine.block_size, self.pool.trash_block
        length = min(self._engine.max_step_tokens, self.max_context_tokens - 1)
        self._ops.prepare(self._num_heads, self.slab.num_kv_heads, self.slab.head_dim, self._dtype, length)
        start = RowStart(0, (0,) * length, (), WARM_UP)
        prompt = RowWork(0, 0, length, (0,) * length, (trash,) * (length // size + 1))
        self.run(StepPlan(-4, (prompt,), 0, starts=(start,)))
        self.run(StepPlan(-3, (RowWork(0, length, 1, None),), 1))
        later = max(1, min(LATER_CHUNK if self._context.device.type == "cuda" else 2, length - 1))
        start = RowStart(0, (0,) * (1 + later), (), GREEDY_WARM_UP)
        short = RowWork(0, 0, 1, (0,), (trash,) * -(-(1 + later) // size), num_samples=0)
        self.run(StepPlan(-2, (short,), 0, starts=(start,), ends=(0,)))
        self.run(StepPlan(-1, (RowWork(0, 1, later, (0,) * later),), 0))
        self.run(StepPlan(0, (), 0, ends=(0,)))
        with torch.inference_mode():
            for graphs in (self._decodes, self._prompts):
                if graphs is not None:
                    graphs.prepare()

    def run(self, plan: StepPlan) -> StepResult | None:
        """Carries the plan out, and waits for the result."""
        launched = self.launch(plan)
        return launched.wait() if isinstance(launched, UnderWay) else launched

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Gives the plan to the device, and waits for nothing there: the next plan may be launched behind it. The result
        is that of the rank that draws (last stage, tp rank 0); None on all others."""
        self._change_rows(plan)
        if not plan.work:
            return self._answer(plan, None)
        if self._decodes is not None and plan.num_decodes == len(plan.work):
            return self._replay_decodes(plan, self._decodes)
        if self._prompts is not None and (shape := self._prompts.shape_for(plan)) is not None:
            inputs = self._rows.prompt_inputs(plan, shape)
            residual_TD = self._prompts.residual(inputs)
            self.pool.wrote(plan.number)
            return self._draw_at(plan, residual_TD, inputs)
        return self._launch_eagerly(plan)

    def _replay_decodes(self, plan: StepPlan, graphs: DecodeGraphs) -> Launched:
        shape = graphs.shape_for(plan)
        inputs = self._rows.decode_inputs(plan, shape.num_columns)
        if self._passing is not None:  # the graph fills what that is being sent from
            self._passing[1].wait()
        if self._context.is_first_stage:
            if self._returning.expects:
                self._returning.collect(late_rows(plan))
        else:
            self._context.receive(graphs.entering(inputs.num_rows), self._context.stage - 1).wait()
        leaving = graphs.replay(shape, inputs)
        if self._context.is_last_stage:
            return self._draw(plan, leaving, inputs.rows)
        assert leaving is not None
        return self._leave(plan, leaving, inputs.rows)

    def _launch_eagerly(self, plan: StepPlan) -> Launched:
        """Every kernel by a launch of its own."""
        inputs = self._rows.inputs(plan)
        residual_TD = self._forward(plan, inputs)
        self.pool.wrote(plan.number)
        if self._context.is_last_stage:
            return self._draw_at(plan, residual_TD, inputs)
        return self._leave(plan, residual_TD, inputs.sample_rows)

    def _leave(self, plan: StepPlan, residual_TD: Tensor, sample_rows: Tensor) -> Launched:
        """A stage that another follows: the residual stream goes on, and what it draws will come back."""
        self._pass_on(residual_TD)
        self._returning.expect([item.row for item in plan.work if item.num_samples], sample_rows)
        return self._answer(plan, None)

    def _draw_at(self, plan: StepPlan, residual_TD: Tensor, inputs: StepInputs | PromptInputs) -> Launched:
        """Last stage: what the rows that draw draw from, and the draw."""
        if not inputs.sample_rows.shape[0]:
            return self._answer(plan, None)
        return self._draw(plan, self._model.logits(residual_TD[inputs.sample_at]), inputs.sample_rows)

    def settle(self) -> None:
        """Waits until what this rank has sent has arrived, and what it expects too: called before its groups close, when
        every rank has carried out the same plans."""
        if self._passing is not None:
            self._passing[1].wait()
        self._returning.settle()

    def close(self) -> None:
        """Ends this rank's part in its groups, when every rank has carried out the same plans. Graphs go first: they hold
        operations of the groups."""
        self.settle()
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        self._graph_memory.close()
        self._context.close()

    def abandon(self) -> None:
        """Another rank is lost: what waits for it here ends, with results that are worth nothing. From any thread."""
        self._context.abandon()

    def _change_rows(self, plan: StepPlan) -> None:
        self.pool.set_epochs(plan.fresh)
        self.pool.copy_blocks(plan.copies)
        if self._sampler is not None:
            for row in plan.ends:
                self._sampler.end(row)
        for start in plan.starts:
            self._rows.start(start.row)
            if start.output_ids:
                self._returning.collect((start.row,))
                self._rows.resume(start.row, start.output_ids[-1])
            if self._sampler is not None:
                self._sampler.start(start)

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        """The residual stream that this stage ends with."""
        if self._context.is_first_stage and (late := late_rows(plan)):
            self._returning.collect(late)
            self._rows.fill_late(inputs.token_ids_T, inputs.rows_W)
        return self._model.forward(self._enter(inputs), self.pool.tensor, inputs.batch)

    def _enter(self, inputs: StepInputs) -> Tensor:
        """The residual stream that this stage begins with."""
        if self._context.is_first_stage:
            return self._model.embed(inputs.token_ids_T)
        residual_TD = torch.empty(inputs.num_tokens, self._hidden_size, dtype=self._dtype, device=self._context.device)
        self._context.receive(residual_TD, self._context.stage - 1).wait()
        return residual_TD

    def _pass_on(self, residual_TD: Tensor) -> None:
        """At most one step's residual stream is on its way to the next stage."""
        if self._passing is not None:
            self._passing[1].wait()
        self._passing = (residual_TD, self._context.send(residual_TD, self._context.stage + 1))

    def _draw(self, plan: StepPlan, logits_RV: Tensor | None, rows_R: Tensor) -> Launched:
        """Last stage: tokens for the rows that draw, on their way to the first stage, and the result where it is due."""
        own_R = torch.empty_like(rows_R)
        drawn = None
        if self._sampler is not None and logits_RV is not None:
            if self._observe is not None:
                self._observe(plan, logits_RV.float())
            draws, source = _draws(self._sampler, plan)
            if len(draws) > len(rows_R):
                logits_RV = logits_RV[self._numbers(source)]
            drawn = self._sampler.sample(logits_RV, draws)
            own_R = drawn.token_ids_S
            if len(draws) > len(rows_R):
                own_R = own_R[self._numbers([i for i, draw in enumerate(draws) if draw.own])]
        self._returning.give(rows_R, own_R)
        return self._answer(plan, drawn)

    def _answer(self, plan: StepPlan, drawn: Drawn | None) -> Launched:
        """What this rank says of a plan; on a device of its own, once that has come so far."""
        draws = self._sampler is not None
        if self._context.device.type == "cpu":
            return _result(plan.number, drawn) if draws else None
        drawn = None if drawn is None else drawn.to_host()
        event = torch.cuda.Event(blocking=True)
        event.record()
        return UnderWay(partial(_landed, event, plan.number, drawn, draws=draws))

    def _numbers(self, values: list[int]) -> Tensor:
        return to_device(self._context.device, [np.array(values, dtype=np.int64)])[0]


def _landed(event: torch.cuda.Event, number: int, drawn: Drawn | None, *, draws: bool) -> StepResult | None:
    event.synchronize()
    return _result(number, drawn) if draws else None


def _result(number: int, drawn: Drawn | None) -> StepResult:
    if drawn is None:
        return StepResult(number, ())
    return StepResult(number, drawn.token_ids, drawn.logprobs, drawn.margins)


def _draws(sampler: Sampler, plan: StepPlan) -> tuple[list[Draw], list[int]]:
    """All draws of a plan, and for each its row of the logits, which only rows that draw have."""
    drawing = [(item.row, item.start + item.num_tokens, item.num_samples) for item in plan.work if item.num_samples]
    draws = [draw for item in drawing for draw in sampler.draws(*item)]
    if len(draws) == len(drawing):
        return draws, []
    return draws, [index for index, (_, _, count) in enumerate(drawing) for _ in range(count)]
