"""Requests through a scheduler and a runner, alone or together: what they are answered, to the bit."""

from collections.abc import Sequence
from dataclasses import replace

from headrace.blocks import BlockHasher
from headrace.config import EngineConfig
from headrace.values import Request, RequestKey, SamplingParams
from tests.model_steps import random_ids
from workers.ranks.runner import Runner
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.scheduler import Scheduler, SchedulerLimits

# (token ids, chosen log-probability and the best ones) of a request's tokens
Answers = dict[str, list[object]]

NUM_TOKENS = 6
SHARED = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "num_logprobs": 3}
SAMPLING = (
    SamplingParams(**SHARED, temperature=0.0),
    SamplingParams(**SHARED, temperature=0.9, seed=5, top_p=0.9, top_k=30, min_p=0.01),
    SamplingParams(**SHARED, temperature=1.0, seed=7, presence_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(**SHARED, temperature=0.7, seed=9, logit_bias=((4, 2.0),)),
)


def requests(lengths: Sequence[int], vocab_size: int = 259) -> list[Request]:
    """Of these prompt lengths; the longest ones begin alike."""
    common = random_ids(max(lengths), 1, vocab_size)
    found = []
    for number, length in enumerate(lengths):
        shared = length // 2
        ids = (*common[:shared], *random_ids(length - shared, 10 + number, vocab_size))
        found.append(Request(RequestKey(f"r{number}"), ids, SAMPLING[number % len(SAMPLING)]))
    return found


def answers(
    runner: Runner, engine: EngineConfig, asked: Sequence[Request], *, num_blocks: int | None = None
) -> Answers:
    """All of them at once, in a cache that is empty at first."""
    scheduler = Scheduler(
        SchedulerLimits(engine.max_num_seqs, engine.max_step_tokens, runner.max_context_tokens, 1000, 10.0),
        BlockLedger(num_blocks or runner.num_blocks, engine.block_size),
        lambda adapter, salt: BlockHasher(revision="r", kv_format="f", block_size=engine.block_size, cache_salt=salt),
        vocab_size=259,
    )
    found: Answers = {request.key.request_id: [] for request in asked}
    for request in asked:
        scheduler.submit(request, 0.0)
    while (plan := scheduler.schedule(0.0)) is not None:
        result = runner.run(plan)
        if result is None:
            continue
        for output in scheduler.apply(result, 0.0).outputs:
            found[output.key.request_id].append((output.token_ids, output.logprobs))
        scheduler.ledger.drain_events()
    return found


def alone_and_together(runner: Runner, engine: EngineConfig, lengths: Sequence[int]) -> tuple[Answers, list[Answers]]:
    """Each request by itself, its prompt whole; and all together, in chunks of several sizes, over a cache that they share,
    and with too few blocks for all."""
    asked = requests(lengths)
    alone: Answers = {}
    for request in asked:
        alone |= answers(runner, engine, [replace(request, cache_salt=request.key.request_id)])
    needed = sum(-(-(length + NUM_TOKENS) // engine.block_size) for length in lengths)
    together = [
        answers(runner, engine.model_copy(update={"max_step_tokens": tokens}), asked[::order], num_blocks=blocks)
        for tokens, order, blocks in (
            (engine.max_step_tokens, 1, None),
            (23, -1, None),
            (7, 1, None),
            (64, 1, needed // 2),
        )
    ]
    return alone, together
