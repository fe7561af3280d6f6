"""workers.ranks.runner on one rank: what a plan does to rows, blocks and the draw. Layouts: tests/conformance."""

import pathlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from headrace.config import EngineConfig
from headrace.errors import ConfigError, IncompatiblePeer
from headrace.values import ParallelLayout, SamplingParams
from tests.model_steps import ENGINE, GREEDY, Steps, alone, random_ids
from tests.tiny import make_checkpoint
from workers.kv.layout import block_bytes, num_blocks, slab_of
from workers.models.checkpoint import Checkpoint
from workers.ranks.runner import Runner, served_context
from workers.scheduling.plan import RowStart, RowWork, StepPlan, StepResult

pytestmark = pytest.mark.torch

SEEDED = SamplingParams(max_tokens=100, temperature=1.0, seed=42, presence_penalty=0.5)
SIZE = ENGINE.block_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")
    torch.set_num_threads(threads)


@pytest.fixture
def steps(folder: pathlib.Path) -> Steps:
    return Steps.of(folder, alone())


def token(result: StepResult | None, index: int = -1) -> int:
    assert result is not None
    return result.token_ids[index]


def generate(
    steps: Steps, row: int, ids: Sequence[int], blocks: Sequence[int], count: int, sampling: SamplingParams
) -> list[int]:
    drawn = [token(steps.prompt(row, ids, blocks, sampling=sampling))]
    positions = range(len(ids), len(ids) + count - 1)
    return drawn + [token(steps.decode((row,), position, (blocks,))) for position in positions]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_token_named_and_a_token_remembered_are_the_same(steps: Steps, sampling: SamplingParams) -> None:
    """token_ids None, one step ahead, against the plain loop that names every token."""
    ids, blocks = random_ids(13, seed=1), (4, 9, 2, 7)
    ahead = generate(steps, 0, ids, blocks, 12, sampling)
    plain = [token(steps.prompt(1, ids, (20, 21, 22, 23), sampling=sampling))]
    for position in range(13, 24):
        new = (20 + position // SIZE,) if position % SIZE == 0 else ()
        plain.append(token(steps.plan(RowWork(1, position, 1, (plain[-1],), new), num_decodes=1)))
    assert ahead == plain


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_preempted_sequence_goes_on_as_if_it_had_not_been(steps: Steps, sampling: SamplingParams) -> None:
    ids, blocks = random_ids(13, seed=2), (4, 9, 2, 7)
    whole = generate(steps, 0, ids, blocks, 12, sampling)
    steps.plan(ends=(0,))
    start = RowStart(5, tuple(ids), tuple(whole[:6]), sampling)
    again = (*ids, *whole[:6])
    work = RowWork(5, 0, len(again), again, (30, 31, 32))
    rest = [token(steps.plan(work, starts=(start,)))]
    rest += [token(steps.decode((5,), position, ((30, 31, 32, 33),))) for position in range(19, 24)]
    assert rest == whole[6:]


def test_a_sequence_from_another_worker_begins_with_its_last_token(steps: Steps) -> None:
    ids, blocks = random_ids(13, seed=3), (4, 9, 2, 7)
    whole = generate(steps, 0, ids, blocks, 4, SEEDED)
    steps.plan(ends=(0,))
    arrived = RowStart(6, tuple(ids), tuple(whole[:1]), SEEDED)
    result = steps.plan(RowWork(6, 13, 1, None, (4, 9)), num_decodes=1, starts=(arrived,))
    assert token(result) == whole[1]


def test_a_prompt_answered_n_times_shares_its_blocks(steps: Steps) -> None:
    """Sample i is what a request with sample index i alone draws; the partly filled block is copied for each."""
    ids = tuple(random_ids(13, seed=4))
    first = steps.plan(RowWork(0, 0, 13, ids, (4, 9), num_samples=3), starts=(RowStart(0, ids, (), SEEDED),))
    assert first is not None
    assert len(first.token_ids) == 3
    tables = [(4, 9, 12), (4, 10, 13), (4, 11, 14)]
    drawn = [[t] for t in first.token_ids]
    changes = {
        "copies": ((9, 10), (9, 11)),
        "starts": tuple(RowStart(i, ids, (drawn[i][0],), SEEDED, sample_index=i) for i in (1, 2)),
    }
    for position in range(13, 19):
        work = []
        for row, table in enumerate(tables):
            new = table[:2] if position == 13 and row else (table[2],) if position == 16 else ()
            work.append(RowWork(row, position, 1, None, new))
        result = steps.plan(*work, num_decodes=3, **changes)
        changes = {}
        for row in range(3):
            drawn[row].append(token(result, row))
    assert len({tuple(tokens) for tokens in drawn}) == 3
    steps.plan(ends=(0, 1, 2))
    for index in range(3):
        start = RowStart(7, ids, (), SEEDED, sample_index=index)
        alone_drawn = [token(steps.plan(RowWork(7, 0, 13, ids, (40, 41)), starts=(start,)))]
        alone_drawn += [token(steps.decode((7,), position, ((40, 41, 42),))) for position in range(13, 19)]
        assert alone_drawn == drawn[index]


def test_decodes_and_chunks_in_one_step_are_those_of_steps_of_their_own(steps: Steps) -> None:
    old, new = random_ids(10, seed=5), random_ids(21, seed=6)
    expected = generate(steps, 0, old, (1, 2), 2, GREEDY)[1], token(steps.prompt(1, new, (3, 4, 5)))
    steps.plan(ends=(0, 1))
    steps.prompt(0, old, (1, 2))
    mixed = steps.plan(
        RowWork(0, 10, 1, None),
        RowWork(1, 0, 21, tuple(new), (8, 9, 10)),
        num_decodes=1,
        starts=(RowStart(1, tuple(new), (), GREEDY),),
    )
    assert mixed is not None
    assert mixed.token_ids == expected


def test_chunks_that_draw_nothing_answer_with_nothing(steps: Steps) -> None:
    ids = tuple(random_ids(9, seed=7))
    result = steps.plan(RowWork(0, 0, 9, ids, (1, 2), num_samples=0), starts=(RowStart(0, ids, (), GREEDY),))
    assert result is not None
    assert (result.number, result.token_ids, result.logprobs, result.margins) == (1, (), (), ())
    assert steps.plan(ends=(0,)) == StepResult(2, ())


def test_fresh_blocks_carry_their_new_epoch(steps: Steps) -> None:
    steps.plan(fresh=((3, 17), (5, 2)))
    assert steps.runner.pool.epochs[[3, 5, 4]].tolist() == [17, 2, 0]


def test_warm_up_touches_no_block_but_the_trash_block(steps: Steps) -> None:
    steps.runner.warm_up()
    pool = steps.runner.pool
    assert not pool.tensor[: pool.trash_block].any()
    assert pool.tensor[pool.trash_block].any()


def test_margins_are_recorded_on_demand(folder: pathlib.Path) -> None:
    steps = Steps.of(folder, alone(), record_margins=True)
    result = steps.prompt(0, random_ids(5, seed=8), (1,))
    assert result is not None
    top = steps.logits[0][0].topk(2).values
    assert result.margins == (pytest.approx((top[0] - top[1]).item()),)


class TestSizes:
    def test_kv_bytes_are_shared_by_all_ranks(self, folder: pathlib.Path) -> None:
        shape = Checkpoint.open(folder).config.shape
        each = 2 * SIZE * 16 * 2 * 3 * 4  # K and V, positions, head dimension, heads, layers, bytes
        engine = EngineConfig(kv_bytes=100_000, block_size=SIZE)
        for layout, copies in ((ParallelLayout(), 1), (ParallelLayout(2, 1), 1), (ParallelLayout(4, 1), 2)):
            assert block_bytes(shape, layout, engine) == copies * each
            assert num_blocks(shape, layout, engine) == 100_000 // (copies * each)

    def test_too_few_kv_bytes_are_named(self, folder: pathlib.Path) -> None:
        shape = Checkpoint.open(folder).config.shape
        engine = EngineConfig(kv_bytes=2**16, block_size=1024)
        with pytest.raises(ConfigError, match=r"engine\.kv_bytes: must be at least 1572864: two blocks"):
            num_blocks(shape, ParallelLayout(), engine)

    def test_a_context_beyond_the_models_is_refused(self, folder: pathlib.Path) -> None:
        checkpoint = Checkpoint.open(folder)
        assert served_context(checkpoint, EngineConfig()) == 256
        assert served_context(checkpoint, EngineConfig(max_context_tokens=100)) == 100
        with pytest.raises(ConfigError, match=r"engine\.max_context_tokens: must be at most the model's 256, got 257"):
            served_context(checkpoint, EngineConfig(max_context_tokens=257))

    def test_a_layout_that_the_heads_do_not_allow_is_refused(self, folder: pathlib.Path) -> None:
        shape = Checkpoint.open(folder).config.shape
        with pytest.raises(IncompatiblePeer, match="4 attention heads"):
            slab_of(shape, ParallelLayout(3, 1), 0, ENGINE)

    def test_bfloat16_runs(self, folder: pathlib.Path) -> None:
        context = alone()
        engine = ENGINE.model_copy(update={"dtype": "bfloat16"})
        runner = Runner(Checkpoint.open(folder), ParallelLayout(), 0, engine, context)
        result = runner.run(
            StepPlan(1, (RowWork(0, 0, 3, (4, 5, 6), (0,)),), 0, starts=(RowStart(0, (4, 5, 6), (), GREEDY),))
        )
        assert runner.pool.tensor.dtype == torch.bfloat16
        assert token(result) in range(259)
