"""Rows take turns where several plans at once fill a pipeline."""

import pytest

from tests.plan_checker import CheckedWorker
from tests.unit.workers.scheduling.prompts import NO_EOS, request
from workers.scheduling.plan import StepPlan
from workers.scheduling.work import StepFit, StepKind, StepWork


def decoding(num_rows: int, stages: int, **limits: int) -> CheckedWorker:
    """So many rows that decode, each prompt computed in a plan that has landed."""
    options = {"num_blocks": 400, "max_num_seqs": 64, "max_step_tokens": 256} | limits
    worker = CheckedWorker(NO_EOS, num_micro_batches=stages, **options)
    for number in range(num_rows):
        worker.scheduler.submit(request(f"r{number}", 4, max_tokens=60, first=1 + number % 20), 0.0)
    while len(worker.outputs) < num_rows:
        worker.turn()
    return worker


def rows(plan: StepPlan) -> set[int]:
    return {work.row for work in plan.work}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("num_rows", [3, 4, 7, 16])
def test_plans_in_different_stages_share_no_row_and_every_row_has_its_turn(num_rows: int, stages: int) -> None:
    worker = decoding(num_rows, stages)
    for _ in range(12):
        worker.turn()
    plans = worker.plans[-10:]
    assert {len(plan.work) for plan in plans} <= {num_rows // stages, -(-num_rows // stages)}
    assert {plan.num_turns for plan in plans} == {stages}
    for first in range(len(plans) - stages + 1):
        together = [rows(plan) for plan in plans[first : first + stages]]
        assert sum(map(len, together)) == len(set().union(*together)) == num_rows


def test_one_plan_more_is_in_flight_than_there_are_stages() -> None:
    """Its rows are those of the oldest: what they draw is there when its stage is."""
    worker = decoding(6, 2)
    while not worker.is_full:
        assert worker.launch() is not None
    first, second, third = worker.plans[-3:]
    assert rows(third) == rows(first)
    assert not rows(third) & rows(second)
    assert all(work.token_ids is None for work in third.work)
    worker.run()


def test_one_sequence_alone_is_one_step_ahead_of_itself_and_no_more() -> None:
    worker = decoding(1, 3)
    worker.launch()
    worker.launch()
    assert len(worker.flights) == 2
    assert worker.launch() is None
    worker.run()


def test_a_plan_computes_its_share_of_the_budget() -> None:
    worker = CheckedWorker(NO_EOS, max_step_tokens=16, num_micro_batches=2)
    worker.scheduler.submit(request("a", 20, max_tokens=2), 0.0)
    while not worker.is_full and worker.launch() is not None:
        pass
    assert [plan.num_tokens for plan in worker.plans] == [8, 8, 4]
    worker.run()


def test_the_last_prompts_are_shared_out_over_plans() -> None:
    """The last stage begins when the first has done a share, and not the whole; what others follow is not cut."""
    sizes = {"max_step_tokens": 8192, "num_blocks": 300, "block_size": 32}
    worker = CheckedWorker(NO_EOS, num_micro_batches=2, **sizes)
    worker.scheduler.submit(request("alone", 3000, max_tokens=1), 0.0)
    worker.run()
    assert [plan.num_tokens for plan in worker.plans] == [1500, 1024, 476]
    worker = CheckedWorker(NO_EOS, num_micro_batches=2, max_num_seqs=1, **sizes)
    for number in (1, 2):
        worker.scheduler.submit(request(f"r{number}", 2000, max_tokens=1, first=number), 0.0)
    worker.run()
    assert [plan.num_tokens for plan in worker.plans] == [2000, 1024, 976]


def test_a_row_beside_a_long_prompt_is_in_every_other_chunk_alone() -> None:
    """In every one it would hold each chunk up until the one before has left the last stage."""
    worker = decoding(1, 2, max_step_tokens=16)
    worker.run()
    worker.scheduler.submit(request("row", 4, max_tokens=60), 0.0)
    while not worker.plans[-1].num_decodes:
        worker.turn()
    worker.scheduler.submit(request("long", 200, max_tokens=1, first=9), 0.0)
    for _ in range(16):
        worker.turn()
    assert [plan.num_decodes for plan in worker.plans[-8:]] in ([0, 1] * 4, [1, 0] * 4)
    worker.run()


def test_whoever_waits_longest_is_next_when_nothing_is_in_flight() -> None:
    """An engine that lags lets a share of the rows in, and then the others."""
    worker = decoding(6, 2)
    while worker.flights:
        worker.land()
    seen = []
    for _ in range(4):
        plan = worker.launch()
        assert plan is not None
        seen.append(rows(plan))
        worker.land()
    assert seen[0] | seen[1] == seen[2] | seen[3] == set(range(6))


def test_a_step_of_some_rows_teaches_what_a_token_of_all_takes() -> None:
    """A sequence waits for all turns: who predicts by what runs here must find the time of both."""
    fit = StepFit()
    for num_rows in [8, 16, 32, 48] * 20:
        seconds = 4e-3 + 2e-5 * num_rows
        fit.add(StepWork(StepKind.DECODE, num_rows, 0, 0, 0.0, 500 * num_rows, 2), seconds)
    assert fit.model.decode_step_seconds(64, 32_000) == pytest.approx(2 * (4e-3 + 2e-5 * 32), rel=0.02)
