"""Several plans in flight through the stages of one worker, on a CPU: what one rank alone answers, to the bit."""

import pathlib
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from operator import itemgetter

import pytest

from headrace.blocks import BlockHasher
from headrace.values import Request, RequestKey, SamplingParams
from tests.determinism import NUM_TOKENS, Answers, alone_and_together, answers, at_once, requests
from tests.model_steps import ENGINE, alone, random_ids
from tests.pipeline import one_thread_each, pipeline
from tests.tiny import make_variant
from workers.models.checkpoint import Checkpoint
from workers.ranks.runner import Runner
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.plan import RowStart, RowWork, StepPlan, StepResult
from workers.scheduling.scheduler import Scheduler, SchedulerLimits

pytestmark = pytest.mark.torch

DETERMINISTIC = ENGINE.model_copy(update={"deterministic": True})
LENGTHS = (26, 9, 1, 17)
one_thread = pytest.fixture(autouse=True)(one_thread_each)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_variant(tmp_path, "llama-biased")


def of_one_rank(folder: pathlib.Path, asked: list[Request]) -> Answers:
    runner = Runner(Checkpoint.open(folder), alone().layout, 0, DETERMINISTIC, alone())
    found: Answers = {}
    for request in asked:
        found |= answers(at_once(runner.run), DETERMINISTIC, [request], num_blocks=64)
    return found


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_that_work_on_several_plans_answer_what_one_rank_does(folder: pathlib.Path, num_stages: int) -> None:
    """In chunks, over a shared cache, with blocks too few for all; with penalties, seeds and log-probabilities."""
    with pipeline(folder, num_stages, DETERMINISTIC) as stages:
        by_itself, together = alone_and_together(stages.launch, DETERMINISTIC, LENGTHS, num_stages)
    assert by_itself == of_one_rank(folder, requests(LENGTHS))
    assert all(len(tokens) == NUM_TOKENS for tokens in by_itself.values())
    for found in together:
        assert found == by_itself


def test_who_leaves_while_several_plans_have_it_disturbs_nobody(folder: pathlib.Path) -> None:
    """Cancelled, or preempted and computed again; the rest answer as they do alone, and all blocks come back."""
    asked = [
        replace(request, n=1 + number % 2, sampling=replace(request.sampling, max_tokens=9))
        for number, request in enumerate(requests(LENGTHS))
    ]
    expected = of_one_rank(folder, asked)
    scheduler = Scheduler(
        SchedulerLimits(8, 24, 256, 100, 10.0, num_micro_batches=2),
        BlockLedger(40, ENGINE.block_size),
        lambda adapter, salt: BlockHasher(revision="r", kv_format="f", block_size=ENGINE.block_size),
        vocab_size=259,
    )
    found: Answers = {}
    flights: deque[Future[StepResult]] = deque()
    victims: deque[RequestKey] = deque()
    waiting, num_cancelled = deque(asked), 0
    with pipeline(folder, 2, DETERMINISTIC) as stages:
        for turn in count():
            if waiting and turn % 3 == 0:
                request = waiting.popleft()
                scheduler.submit(request, 0.0)
                victims.append(RequestKey(f"victim of {turn}"))
                scheduler.submit(replace(request, key=victims[-1]), 0.0)
            while len(flights) < 3 and (plan := scheduler.schedule(0.0)) is not None:
                flights.append(stages.launch(plan))
            if victims and turn % 3 == 2:
                num_cancelled += scheduler.cancel(victims.popleft(), 0.0)
                scheduler.preempt_at(20)
            if not flights and not waiting:
                break
            if flights:
                for output in scheduler.apply(flights.popleft().result(20), 0.0).outputs:
                    token = (output.index, output.token_ids, output.logprobs)
                    found.setdefault(output.key.request_id, []).append(token)
            scheduler.ledger.drain_events()
    assert num_cancelled == len(asked)
    assert scheduler.num_preemptions > 0
    assert scheduler.ledger.holdings() == ()
    assert {name: sorted(found[name], key=itemgetter(0)) for name in expected} == expected


def test_what_a_row_drew_for_who_left_is_not_taken_for_who_came(folder: pathlib.Path) -> None:
    """The first stage has not heard of the draw yet when the row goes to a sequence that comes with a token of its own."""
    ids = tuple(random_ids(13, 3))
    sampling = SamplingParams(max_tokens=9, temperature=0.0)

    def plans(last_token: int) -> tuple[StepPlan, StepPlan]:
        prompt = RowWork(0, 0, 13, ids, (1, 2))
        came = RowStart(0, ids, (last_token,), sampling)
        return (
            StepPlan(1, (prompt,), 0, starts=(RowStart(0, ids, (), sampling),)),
            StepPlan(2, (RowWork(0, 13, 1, None, (1, 2)),), 1, starts=(came,), ends=(0,)),
        )

    runner = Runner(Checkpoint.open(folder), alone().layout, 0, DETERMINISTIC, alone())
    expected = {token: [runner.run(plan) for plan in plans(token)][1] for token in (5, 99, 201)}
    runner.run(StepPlan(3, (), 0, ends=(0,)))
    assert len({result.token_ids for result in expected.values() if result}) > 1, "the answer depends on that token"
    for token, result in expected.items():
        with pipeline(folder, 2, DETERMINISTIC) as stages:
            first, second = (stages.launch(plan) for plan in plans(token))
            first.result(20)
            assert second.result(20) == result
