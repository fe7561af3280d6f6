"""workers.ranks.prompt_graphs without a device: which step takes which graph, and that a padded step computes what the
step does."""

import pytest
import torch

from headrace.config import EngineConfig
from tests.model_steps import GREEDY, Steps, alone, random_ids
from tests.tiny import make_checkpoint
from workers.ranks.graphs import GraphMemory
from workers.ranks.prompt_graphs import PromptGraphs
from workers.ranks.rows import PromptShape
from workers.scheduling.plan import RowStart, RowWork, StepPlan
from workers.scheduling.work import GRAPH_PROMPTS

pytestmark = pytest.mark.torch
ENGINE = EngineConfig(num_blocks=64, block_size=8, max_num_seqs=20, max_step_tokens=700, max_context_tokens=256)


def graphs_of(steps: Steps) -> PromptGraphs:
    runner = steps.runner
    memory = GraphMemory(torch.device("cpu"))
    return PromptGraphs(
        runner._model, runner.pool.tensor, runner._rows, memory, ENGINE.max_num_seqs, ENGINE.max_step_tokens
    )


def chunk(row: int, start: int, count: int) -> RowWork:
    return RowWork(row, start, count, tuple(range(count)))


def decode(row: int) -> RowWork:
    return RowWork(row, 9, 1, None)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return Steps.of(make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama"), alone(), ENGINE)


@pytest.mark.parametrize(
    ("work", "shape"),
    [
        ((chunk(0, 0, 3),), PromptShape(16, 16, GRAPH_PROMPTS)),
        ((decode(1), chunk(0, 4, 63)), PromptShape(64, 20, GRAPH_PROMPTS)),
        ((chunk(0, 0, 500),), PromptShape(512, 0, 1, whole=True)),
        ((chunk(0, 1, 500),), PromptShape(512, 20, GRAPH_PROMPTS)),
        ((decode(1), chunk(0, 0, 500)), PromptShape(512, 20, GRAPH_PROMPTS)),
        ((chunk(0, 0, 701),), PromptShape(768, 0, 1, whole=True)),
        ((chunk(0, 0, 769),), None),
        (tuple(chunk(row, 0, 2) for row in range(GRAPH_PROMPTS)), PromptShape(16, 16, GRAPH_PROMPTS)),
        (tuple(chunk(row, 0, 2) for row in range(GRAPH_PROMPTS + 1)), None),
    ],
)
def test_a_step_takes_the_smallest_graph_that_holds_it(
    steps: Steps, work: tuple[RowWork, ...], shape: PromptShape | None
) -> None:
    plan = StepPlan(1, work, sum(item.token_ids is None for item in work))
    assert graphs_of(steps).shape_for(plan) == shape


@pytest.mark.parametrize("whole", [False, True])
def test_a_padded_step_computes_what_the_step_does(steps: Steps, whole: bool) -> None:
    """The residual stream of its tokens and the pool, beside rows that decode, a first and a later chunk."""
    ids = [tuple(random_ids(40, seed)) for seed in range(4)]
    steps.plan(ends=tuple(range(4)))
    for row in (0, 1):
        steps.prompt(row, ids[row][:15], (2 * row, 2 * row + 1))
    starts = tuple(RowStart(row, ids[row], (), GREEDY) for row in (2, 3))
    steps.plan(RowWork(2, 0, 16, ids[2][:16], (10, 11), num_samples=0), starts=starts)
    work = (
        (RowWork(3, 0, 21, ids[3][:21], (20, 21, 22)),)
        if whole
        else (
            RowWork(0, 15, 1, None),
            RowWork(1, 15, 1, (7,)),
            RowWork(2, 16, 9, ids[2][16:25], (12, 13)),
            RowWork(3, 0, 21, ids[3][:21], (20, 21, 22)),
        )
    )
    plan = StepPlan(99, work, 0 if whole else 2)
    graphs, runner = graphs_of(steps), steps.runner
    shape = PromptShape(48, 0, 1, whole=True) if whole else PromptShape(48, 20, GRAPH_PROMPTS)
    before = runner.pool.tensor.clone()
    with torch.inference_mode():
        padded = runner._rows.prompt_inputs(plan, shape)
        graphs._numbers[: shape.num_numbers] = padded.numbers
        found = graphs._step(shape)[: plan.num_tokens]
        pool = runner.pool.tensor.clone()
        runner.pool.tensor.copy_(before)
        inputs = runner._rows.inputs(
            StepPlan(99, tuple(item._replace(new_blocks=()) for item in work), plan.num_decodes)
        )
        expected = runner._forward(plan, inputs)
    assert torch.equal(padded.sample_at, inputs.sample_at)
    assert torch.equal(padded.sample_rows, inputs.sample_rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool, runner.pool.tensor, rtol=1e-4, atol=1e-4)
