"""An engine without a service on one device, random weights: what the GPU benchmarks run."""

import json
import pathlib
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.blocks import BlockHasher
from headrace.config import EngineConfig
from headrace.values import ParallelLayout, Request, RequestKey, SamplingParams
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import form
from workers.models.weights import LoadProgress, Wanted
from workers.ranks.rank import keep_for_good
from workers.ranks.rank_runner import Launched, UnderWay
from workers.ranks.runner import Runner
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import Scheduler, SchedulerLimits, StepEvents

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
QWEN3_0_6B: dict[str, Any] = LLAMA_8B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# as many tokens in a step as the peer takes when it is used offline
ENGINE = EngineConfig(
    device="cuda",
    dtype="bfloat16",
    block_size=32,
    num_blocks=10_000,
    max_num_seqs=256,
    max_step_tokens=16_384,
    max_context_tokens=8192,
)
OnStep = Callable[[StepPlan, StepEvents], None]


def shape_folder(shape: dict[str, Any]) -> pathlib.Path:
    """A checkpoint folder without weights."""
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def random_weights(checkpoint: Checkpoint, wanted: tuple[Wanted, ...], progress: LoadProgress) -> None:
    """Small and not zero: zeros are faster than any real weight."""
    for number, weight in enumerate(wanted):
        if weight.target.dim() == 1:
            weight.target.fill_(1.0)
        else:
            weight.target.normal_(0.0, 0.02)
        progress(number + 1, len(wanted))


def scheduler_of(
    engine: EngineConfig, vocab_size: int, max_num_seqs: int | None = None, num_micro_batches: int = 1
) -> Scheduler:
    assert engine.num_blocks is not None
    assert engine.max_context_tokens is not None
    rows = max_num_seqs or engine.max_num_seqs
    size = engine.block_size
    return Scheduler(
        SchedulerLimits(
            *(rows, engine.max_step_tokens, engine.max_context_tokens, 100_000, 10.0),
            num_micro_batches=num_micro_batches,
        ),
        BlockLedger(engine.num_blocks, size),
        lambda adapter, salt: BlockHasher(revision="r", kv_format="f", block_size=size, cache_salt=salt),
        vocab_size=vocab_size,
    )


class OneRank:
    """A scheduler and a runner: plan, launch, apply, one step ahead."""

    def __init__(self, shape: dict[str, Any], engine: EngineConfig = ENGINE, *, graphs: bool = True) -> None:
        self._engine, self._vocab_size = engine, int(shape["vocab_size"])
        context = form(ParallelLayout(), 0, None, device=torch.device(engine.device, 0))
        checkpoint = Checkpoint.open(shape_folder(shape))
        self.runner = Runner(checkpoint, ParallelLayout(), 0, engine, context, fill=random_weights, graphs=graphs)
        self.scheduler = scheduler_of(engine, self._vocab_size)
        self._number = 0
        self.runner.warm_up()
        keep_for_good()

    def begin(self, max_num_seqs: int | None = None, max_step_tokens: int | None = None) -> None:
        """An empty cache, so many rows, and steps of at most so many tokens."""
        steps = {} if max_step_tokens is None else {"max_step_tokens": max_step_tokens}
        self.scheduler = scheduler_of(self._engine.model_copy(update=steps), self._vocab_size, max_num_seqs)

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        *,
        salt: str | None = None,
        on_step: OnStep = lambda plan, events: None,
    ) -> None:
        """All of them from intake to their last token. Without a salt every prompt has one of its own: nothing is found in
        a cache. `on_step` is told when a step's result is in."""
        for prompt, count in zip(prompts, num_tokens, strict=True):
            self._number += 1
            sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            key = RequestKey(f"r{self._number}")
            request = Request(key, tuple(prompt), sampling, cache_salt=salt or key.request_id)
            self.scheduler.submit(request, 0.0)
        flights: deque[tuple[StepPlan, Launched]] = deque()
        while True:
            while len(flights) < 2 and (plan := self.scheduler.schedule(0.0)) is not None:
                flights.append((plan, self.runner.launch(plan)))
            if not flights:
                break
            plan, launched = flights.popleft()
            on_step(plan, self.scheduler.apply(awaited(launched), 0.0))
        if salt is None:
            self.scheduler.reset_cache()
        self.scheduler.ledger.drain_events()

    def seconds(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int], *, salt: str | None = None) -> float:
        began = time.perf_counter()
        self.serve(prompts, num_tokens, salt=salt)
        return time.perf_counter() - began


def awaited(launched: Launched) -> StepResult:
    result = launched.wait() if isinstance(launched, UnderWay) else launched
    assert result is not None
    return result
