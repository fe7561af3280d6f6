"""workers.ranks.graphs without a device: which decode step replays which graph, and that a padded step computes what the
step does."""

import pytest
import torch

from headrace.config import EngineConfig
from kernels.reference import ReferenceOps
from tests.model_steps import Steps, alone, random_ids
from tests.tiny import make_checkpoint
from workers.ranks.graphs import DecodeGraphs, DecodeShape, GraphMemory
from workers.scheduling.plan import RowWork, StepPlan

pytestmark = pytest.mark.torch
ENGINE = EngineConfig(num_blocks=64, block_size=8, max_num_seqs=20, max_step_tokens=64, max_context_tokens=250)
MOST = 256  # of the blocks that hold 250 tokens


class TwoWays(ReferenceOps):
    """As on a card that takes long contexts of up to two rows of two KV heads in another way."""

    def decode_contexts(self, num_rows: int, num_kv_heads: int) -> tuple[int, ...]:
        return (100, 10_000) if num_rows * num_kv_heads <= 4 else ()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return Steps.of(make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama"), alone(), ENGINE)


def graphs_of(steps: Steps) -> DecodeGraphs:
    runner = steps.runner
    memory = GraphMemory(torch.device("cpu"))
    parts = (runner._model, runner.pool.tensor, runner._rows, memory, ENGINE.max_num_seqs)
    return DecodeGraphs(*parts, alone(), TwoWays())


def decodes(*positions: int) -> StepPlan:
    work = tuple(RowWork(row, position, 1, None) for row, position in enumerate(positions))
    return StepPlan(1, work, len(work))


@pytest.mark.parametrize(
    ("positions", "shape"),
    [
        ((0,), DecodeShape(1, 99)),
        ((98,), DecodeShape(1, 99)),
        ((99,), DecodeShape(1, MOST)),
        ((249,), DecodeShape(1, MOST)),
        ((3, 98), DecodeShape(2, 99)),
        ((99, 3), DecodeShape(2, MOST)),
        ((3, 3, 200), DecodeShape(4, MOST)),
        ((1,) * 17, DecodeShape(24, MOST)),
    ],
)
def test_a_step_replays_the_graph_of_its_size_and_its_longest_context(
    steps: Steps, positions: tuple[int, ...], shape: DecodeShape
) -> None:
    assert graphs_of(steps).shape_for(decodes(*positions)) == shape


def test_only_sizes_that_differ_have_two_graphs(steps: Steps) -> None:
    """No bound that no context comes to makes one."""
    shapes = graphs_of(steps)._shapes
    assert {size: len(found) for size, found in shapes.items()} == {1: 2, 2: 2, 4: 1, 8: 1, 16: 1, 24: 1}


@pytest.mark.parametrize("lengths", [(20,), (20, 101), (9, 30, 17)])
def test_a_padded_step_computes_what_the_step_does(steps: Steps, lengths: tuple[int, ...]) -> None:
    """The logits of its rows, and the pool but for the trash block."""
    steps.plan(ends=tuple(range(3)))
    first = 0
    for row, length in enumerate(lengths):
        held = -(-(length + 1) // ENGINE.block_size)
        steps.prompt(row, random_ids(length, row), range(first, first + held), chunks=(64,))
        first += held
    # the block of the new token, where it begins one
    new = [() if length % ENGINE.block_size else (60 + row,) for row, length in enumerate(lengths)]
    work = tuple(RowWork(row, length, 1, None, new[row]) for row, length in enumerate(lengths))
    plan = StepPlan(99, work, len(work))
    graphs, runner = graphs_of(steps), steps.runner
    shape = graphs.shape_for(plan)
    before = runner.pool.tensor.clone()
    with torch.inference_mode():
        inputs = runner._rows.decode_inputs(plan, shape.num_columns)
        graphs._numbers[: inputs.numbers.numel()] = inputs.numbers.view(-1)
        found = graphs._step(shape)
        assert found is not None
        pool = runner.pool.tensor.clone()
        runner.pool.tensor.copy_(before)
        again = StepPlan(99, tuple(item._replace(new_blocks=()) for item in work), len(work))
        expected = runner._model.logits(runner._forward(again, runner._rows.inputs(again)))
    assert expected is not None
    torch.testing.assert_close(found[: len(work)], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool, runner.pool.tensor, rtol=1e-4, atol=1e-4)
