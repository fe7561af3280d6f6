"""`deterministic: true` on a CPU: an answer and its log-probabilities are the same to the bit alone and in any batch."""

import pathlib
from collections.abc import Iterator

import pytest
import torch

from tests.determinism import NUM_TOKENS, alone_and_together, at_once
from tests.model_steps import ENGINE, alone
from tests.tiny import make_variant
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import RankContext
from workers.ranks.runner import Runner

pytestmark = pytest.mark.torch

DETERMINISTIC = ENGINE.model_copy(update={"deterministic": True})
LENGTHS = (26, 9, 1, 17)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def runner_of(folder: pathlib.Path, context: RankContext) -> Runner:
    return Runner(Checkpoint.open(folder), context.layout, context.rank, DETERMINISTIC, context)


def test_an_answer_does_not_depend_on_who_is_in_the_batch(tmp_path: pathlib.Path) -> None:
    runner = runner_of(make_variant(tmp_path, "llama-biased"), alone())
    by_itself, together = alone_and_together(at_once(runner.run), DETERMINISTIC, LENGTHS)
    assert all(len(tokens) == NUM_TOKENS for tokens in by_itself.values())
    for found in together:
        assert found == by_itself
