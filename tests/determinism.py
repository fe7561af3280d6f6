"""Requests through a scheduler and a worker's ranks, alone or together: what they are answered, to the bit."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from operator import itemgetter

from headrace.blocks import BlockHasher
from headrace.config import EngineConfig
from headrace.values import Request, RequestKey, SamplingParams
from tests.model_steps import random_ids
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import Scheduler, SchedulerLimits

# (sample, token ids, chosen log-probability and the best ones) of a request's tokens, by sample
Answers = dict[str, list[tuple[int, object, object]]]
# gives a plan to all ranks
Launch = Callable[[StepPlan], "Future[StepResult]"]

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


def at_once(run: Callable[[StepPlan], StepResult | None]) -> Launch:
    """What runs a plan, as one that is asked for its result later."""

    def launch(plan: StepPlan) -> "Future[StepResult]":
        future: Future[StepResult] = Future()
        result = run(plan)
        assert result is not None
        future.set_result(result)
        return future

    return launch


def answers(
    launch: Launch, engine: EngineConfig, asked: Sequence[Request], *, num_blocks: int, micro_batches: int | None = None
) -> Answers:
    """All of them at once, in a cache that is empty at first; with as many plans in flight as micro-batches ask for, where
    they are named, otherwise one."""
    scheduler = Scheduler(
        SchedulerLimits(
            engine.max_num_seqs,
            engine.max_step_tokens,
            engine.max_context_tokens or 256,
            1000,
            10.0,
            num_micro_batches=micro_batches or 1,
        ),
        BlockLedger(num_blocks, engine.block_size),
        lambda adapter, salt: BlockHasher(revision="r", kv_format="f", block_size=engine.block_size, cache_salt=salt),
        vocab_size=259,
    )
    found: Answers = {request.key.request_id: [] for request in asked}
    for request in asked:
        scheduler.submit(request, 0.0)
    most = scheduler.limits.plans_in_flight if micro_batches else 1
    flights: deque[Future[StepResult]] = deque()
    while True:
        while len(flights) < most and (plan := scheduler.schedule(0.0)) is not None:
            flights.append(launch(plan))
        if not flights:
            return {name: sorted(tokens, key=itemgetter(0)) for name, tokens in found.items()}
        for output in scheduler.apply(flights.popleft().result(60), 0.0).outputs:
            found[output.key.request_id].append((output.index, output.token_ids, output.logprobs))
        scheduler.ledger.drain_events()


def alone_and_together(
    launch: Launch, engine: EngineConfig, lengths: Sequence[int], micro_batches: int | None = None
) -> tuple[Answers, list[Answers]]:
    """Each request by itself, its prompt whole; and all together, in chunks of several sizes, over a cache that they share,
    and with too few blocks for all."""
    asked = requests(lengths)
    needed = [-(-(length + NUM_TOKENS) // engine.block_size) for length in lengths]
    full = engine.num_blocks or sum(needed)
    alone: Answers = {}
    for request in asked:
        alone |= answers(launch, engine, [replace(request, cache_salt=request.key.request_id)], num_blocks=full)
    few = max(max(needed), sum(needed) * 2 // 3)
    together = [
        answers(
            launch,
            engine.model_copy(update={"max_step_tokens": tokens}),
            asked[::order],
            num_blocks=blocks,
            micro_batches=micro_batches,
        )
        for tokens, order, blocks in (
            (engine.max_step_tokens, 1, full),
            (11, -1, full),
            (64, 1, few),
        )
    ]
    return alone, together
