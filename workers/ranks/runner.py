"""From plans to tokens on one rank: its shard of the model, its part of the KV pool, its rows, and the draw.

Every rank of a worker is given the same plans in the same order; none runs ahead of it. Between ranks go only the sums
inside layers, the residual stream from stage to stage, and the drawn tokens back to the first stage.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.values import ParallelLayout, SamplingParams, TokenLogprobs
from kernels.choose import choose
from workers.kv.layout import ModelShape, SlabLayout, shard
from workers.kv.pool import KvPool
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import RankContext, Store, Work, form
from workers.models.transformer import Transformer
from workers.models.weights import LoadProgress, Wanted, load, no_progress
from workers.ranks.graphs import DecodeGraphs
from workers.ranks.returning import Returning
from workers.ranks.rows import Rows, StepInputs
from workers.ranks.sampler import Draw, Sampler
from workers.scheduling.plan import RowStart, RowWork, StepPlan, StepResult
from workers.spec import WorkerSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# shown, on the rank that draws, each plan and float32 logits [rows that draw, vocabulary] before anything adjusts them
Observe = Callable[[StepPlan, Tensor], None]
# fills what the model wants; told (done, wanted)
Fill = Callable[[Checkpoint, tuple[Wanted, ...], LoadProgress], None]

WARM_UP = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9)


def make_runner(spec: WorkerSpec, rank: int, store: Store, *, record_margins: bool = False) -> "Runner":
    """A rank of the worker that `spec` describes, weights loaded; all its ranks meet at `store`. Sets the number of
    torch's threads, which is the whole process's."""
    torch.set_num_threads(spec.engine.torch_threads)
    checkpoint = Checkpoint.open(spec.model_path)
    device = torch.device("cpu")
    if spec.engine.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    context = form(spec.layout, rank, store, "nccl" if device.type == "cuda" else "gloo", device=device)
    return Runner(checkpoint, spec.layout, rank, spec.engine, context, record_margins=record_margins)


def slab_of(shape: ModelShape, layout: ParallelLayout, rank: int, engine: EngineConfig) -> SlabLayout:
    """What a block is on this rank."""
    mine = shard(shape, layout, rank)
    element_bytes = DTYPES[engine.dtype].itemsize
    return SlabLayout(mine.num_kv_heads, mine.num_layers, engine.block_size, shape.head_dim, element_bytes)


def block_bytes(shape: ModelShape, layout: ParallelLayout, engine: EngineConfig) -> int:
    """One block on all ranks; replicated heads count as often as they are held."""
    return sum(slab_of(shape, layout, rank, engine).block_bytes for rank in range(layout.world_size))


def num_blocks(shape: ModelShape, layout: ParallelLayout, engine: EngineConfig) -> int:
    """As configured, or as many as kv_bytes holds over all ranks; the same on every rank."""
    if engine.num_blocks is not None:
        return engine.num_blocks
    each = block_bytes(shape, layout, engine)
    if engine.kv_bytes < 2 * each:
        raise ConfigError.out_of_range(
            "engine.kv_bytes", engine.kv_bytes, f"at least {2 * each}: two blocks of {each} bytes"
        )
    return engine.kv_bytes // each


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
        self.shape = config.shape
        self.slab = slab_of(config.shape, layout, rank, engine)
        self.num_blocks = num_blocks(config.shape, layout, engine)
        self.max_context_tokens = served_context(checkpoint, engine)
        self._context = context
        self._engine = engine
        self._hidden_size, self._dtype = config.hidden_size, dtype
        self._model = Transformer(config, context, choose(context.device), dtype, self.max_context_tokens)
        fill(checkpoint, self._model.wanted, progress)
        self.pool = KvPool(self.slab, self.num_blocks, dtype, context.device)
        blocks_per_row = -(-self.max_context_tokens // engine.block_size)
        self._rows = Rows(engine.max_num_seqs, blocks_per_row, engine.block_size, context.device)
        self._graphs: DecodeGraphs | None = None
        if graphs and context.device.type == "cuda" and layout.world_size == 1:
            self._graphs = DecodeGraphs(
                self._model, self.pool.tensor, engine.max_num_seqs, blocks_per_row, config.hidden_size
            )
        self._sampler: Sampler | None = None
        if context.samples:
            self._sampler = Sampler(
                engine.max_num_seqs, config.vocab_size, config.eos_ids, context.device, record_margins=record_margins
            )
        self._observe = observe
        self._returning = Returning(context, self._rows)
        self._passing: tuple[Tensor, Work] | None = None

    def warm_up(self) -> None:
        """A step of full length and one of one token, in the trash block: what is made on first use is made now."""
        size = self._engine.block_size
        length = min(self._engine.max_step_tokens, self.max_context_tokens - 1)
        blocks = (self.pool.trash_block,) * (length // size + 1)
        start = RowStart(0, (0,) * length, (), WARM_UP)
        prompt = RowWork(0, 0, length, (0,) * length, blocks)
        self.run(StepPlan(-2, (prompt,), 0, starts=(start,)))
        self.run(StepPlan(-1, (RowWork(0, length, 1, None),), 1))
        self.run(StepPlan(0, (), 0, ends=(0,)))
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.prepare()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult | None:
        """Carries the plan out. The result on the rank that draws (last stage, tp rank 0), None on all others."""
        began = time.perf_counter()
        self._change_rows(plan)
        if not plan.work:
            return StepResult(plan.number, ()) if self._context.samples else None
        inputs = self._rows.inputs(plan)
        residual_TD = self._forward(inputs)
        if not self._context.is_last_stage:
            self._pass_on(residual_TD)
            self._returning.expect(inputs.sample_rows)
            return None
        return self._draw(plan, inputs, residual_TD, began)

    def settle(self) -> None:
        """Waits until what this rank has sent has arrived, and what it expects too: called before its groups close, when
        every rank has carried out the same plans."""
        if self._passing is not None:
            self._passing[1].wait()
        self._returning.settle()

    def _change_rows(self, plan: StepPlan) -> None:
        self.pool.set_epochs(plan.fresh)
        self.pool.copy_blocks(plan.copies)
        if self._sampler is not None:
            for row in plan.ends:
                self._sampler.end(row)
        for start in plan.starts:
            self._rows.start(start.row)
            if start.output_ids:
                self._returning.collect()
                self._rows.resume(start.row, start.output_ids[-1])
            if self._sampler is not None:
                self._sampler.start(start)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """The residual stream that this stage ends with."""
        if self._context.is_first_stage and inputs.late_at.shape[0]:
            self._returning.collect()
            self._rows.fill_late(inputs)
        if self._graphs is not None and inputs.batch.num_decodes == inputs.num_tokens:
            return self._graphs.forward(inputs.token_ids_T, inputs.batch)
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

    def _draw(self, plan: StepPlan, inputs: StepInputs, residual_TD: Tensor, began: float) -> StepResult | None:
        """Last stage: tokens for the rows that draw, on their way to the first stage, and the result where it is due."""
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        margins: tuple[float, ...] = ()
        if inputs.sample_at.shape[0]:
            logits_RV = self._model.logits(residual_TD[inputs.sample_at])
            own_R = torch.empty_like(inputs.sample_rows)
            if self._sampler is not None and logits_RV is not None:
                if self._observe is not None:
                    self._observe(plan, logits_RV)
                draws, source = _draws(self._sampler, plan)
                drawn = self._sampler.sample(logits_RV if len(draws) == len(own_R) else logits_RV[source], draws)
                own = drawn.token_ids_S
                if len(draws) > len(own_R):
                    own = own[[i for i, draw in enumerate(draws) if draw.own]]
                own_R.copy_(own)
                token_ids, logprobs, margins = tuple(drawn.token_ids_S.tolist()), drawn.logprobs, drawn.margins
            self._returning.give(inputs.sample_rows, own_R)
        if self._sampler is None:
            return None
        return StepResult(plan.number, token_ids, logprobs, margins, time.perf_counter() - began)


def _draws(sampler: Sampler, plan: StepPlan) -> tuple[list[Draw], list[int]]:
    """All draws of a plan, and for each its row of the logits, which only rows that draw have."""
    draws: list[Draw] = []
    source: list[int] = []
    drawing = [item for item in plan.work if item.num_samples]
    for index, item in enumerate(drawing):
        draws += sampler.draws(item.row, item.start + item.num_tokens, item.num_samples)
        source += [index] * item.num_samples
    return draws, source
