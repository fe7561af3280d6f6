"""What single steps take on a GPU, by their tokens and the context that these attend to, beside what the planner's card
says of them: rows of loadtests.bench_gpu.

step_CHUNK_STREAMS_at_CONTEXT   ms from the landing of the step before to this one's: CHUNK tokens in all, of one long
                                prompt and of so many streams that decode, each at 1,024 tokens and more. Launched one step
                                ahead, so that it is the device that takes the time. Peer: the card's cost model, of the
                                same steps; a ratio below 1 says that it is too kind
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from headrace.config import EngineConfig
from headrace.costmodel import CostModel
from loadtests.one_rank import ENGINE, OneRank
from loadtests.report import Row
from workers.scheduling.plan import StepPlan
from workers.scheduling.scheduler import StepEvents
from workers.scheduling.work import GRAPH_TOKENS, StepWork

CHUNKS = (64, 128, 192, 256, 384, 512, 768, 1024, 2048)
STREAMS = (0, 48)
STREAM_PROMPT = 1024
CONTEXTS = (1024, 8192, 24_576)
STEPS_ENGINE = ENGINE.model_copy(update={"num_blocks": 8000, "max_step_tokens": 2048, "max_context_tokens": 32_768})
NEAREST = 5  # steps of which a row is the median


@dataclass(frozen=True, slots=True)
class Sizes:
    """Contexts rise; the long prompt goes a little beyond the last."""

    chunks: Sequence[int] = CHUNKS
    streams: Sequence[int] = STREAMS
    stream_prompt: int = STREAM_PROMPT
    contexts: Sequence[int] = CONTEXTS

    @property
    def long_prompt(self) -> int:
        return self.contexts[-1] * 9 // 8


@dataclass(frozen=True, slots=True)
class Timed:
    """A step with a part of a prompt in it, and what it took."""

    work: StepWork
    seconds: float


def step_rows(
    shape: dict[str, Any],
    cost: CostModel | None,
    draw: random.Random,
    sizes: Sizes,
    engine: EngineConfig = STEPS_ENGINE,
) -> Iterator[Row]:
    """`cost`: of the card, where there is one."""
    one_rank = OneRank(shape, engine)
    for num_streams in sizes.streams:
        for chunk in sizes.chunks:
            if chunk < 2 * num_streams:
                continue
            found = steps(one_rank, draw, sizes, chunk, num_streams, int(shape["vocab_size"]))
            yield from rows_of(found, cost, chunk, num_streams, sizes.contexts)


def steps(
    one_rank: OneRank, draw: random.Random, sizes: Sizes, chunk: int, num_streams: int, vocab_size: int
) -> list[Timed]:
    """Of a long prompt, chunk by chunk, beside streams that are decoding by then and last as long as it does."""
    found: list[Timed] = []
    landed = [time.perf_counter()]

    def on_step(plan: StepPlan, events: StepEvents) -> None:
        landed.append(time.perf_counter())
        if plan.work and plan.num_decodes == num_streams < len(plan.work):
            found.append(Timed(StepWork.of(plan), landed[-1] - landed[-2]))

    one_rank.begin(max_step_tokens=chunk)
    lengths = [sizes.stream_prompt] * num_streams + [sizes.long_prompt]
    prompts = [[draw.randrange(vocab_size // 2) for _ in range(length)] for length in lengths]
    whole = -(-(sizes.long_prompt + num_streams * sizes.stream_prompt) // (chunk - num_streams))
    one_rank.serve(prompts, [whole + 8] * num_streams + [1], on_step=on_step)
    return found


def rows_of(
    found: Sequence[Timed], cost: CostModel | None, chunk: int, num_streams: int, contexts: Sequence[int]
) -> Iterator[Row]:
    full = [step for step in found if step.work.prefill_tokens + num_streams == chunk and step.work.num_prefills == 1]
    for context in contexts:
        nearest = sorted(full, key=lambda step: abs(step.work.mean_prefill_context - context))[:NEAREST]
        if not nearest:
            continue
        samples = [step.seconds * 1e3 for step in nearest]
        value, peer = median(samples), None
        if cost is not None:
            peer = median(step.work.seconds(cost, GRAPH_TOKENS) * 1e3 for step in nearest)
        ratio = peer / value if peer is not None and value else None
        name = "the card's cost model" if peer is not None else None
        yield Row(
            f"step_{chunk}_{num_streams}_at_{context}",
            *(value, "ms", "lower"),
            samples=samples,
            peer=peer,
            peer_name=name,
            ratio=ratio,
            detail=_detail(nearest),
        )


def _detail(nearest: Sequence[Timed]) -> Mapping[str, float]:
    """What these steps held, on average: enough to fit another model to them."""
    works = [step.work for step in nearest]
    return {
        "prefill_tokens": sum(work.prefill_tokens for work in works) / len(works),
        "mean_context": sum(work.mean_prefill_context for work in works) / len(works),
        "num_decodes": sum(work.num_sequences - work.num_prefills for work in works) / len(works),
        "decode_context_tokens": sum(work.decode_context_tokens for work in works) / len(works),
    }
