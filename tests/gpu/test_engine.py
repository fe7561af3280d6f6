"""The runner on a CUDA device in bfloat16 against the same weights on a CPU in float32: prompts whole, in chunks and
behind a cached prefix, then decode steps, which replay graphs. Greedy ids are the CPU's up to its margins."""

import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import EngineConfig
from headrace.values import ParallelLayout
from tests.model_steps import Steps, random_ids
from tests.tiny import make_variant
from workers.models.parallel import form
from workers.scheduling.plan import RowWork

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

# those whose head dimension is a power of two, as the kernels want
NAMES = (
    "llama",
    "llama-mha-tied",
    "llama-mqa",
    "llama-biased",
    "llama-llama3-rope",
    "mistral-wide-heads",
    "qwen2-yarn",
)
LIMIT = 2e-2
MARGIN = 0.1  # of a row's standard deviation: below, rounding may decide which token is best
DECODES = 6


def steps_on(device: str, dtype: str, folder: pathlib.Path) -> Steps:
    engine = EngineConfig.model_validate(
        {
            "device": device,
            "dtype": dtype,
            "num_blocks": 64,
            "block_size": 16,
            "max_num_seqs": 8,
            "max_step_tokens": 256,
        }
    )
    return Steps.of(folder, form(ParallelLayout(), 0, None, device=torch.device(device)), engine)


def prompts(steps: Steps) -> None:
    """Two prompts, one whole and one in chunks, and a third behind the first one's blocks."""
    first, second = random_ids(70, 1), random_ids(45, 2)
    third = [*first[:64], *random_ids(9, 3)]
    steps.prompt(0, first, range(5))
    steps.prompt(1, second, range(8, 11), chunks=(17, 16))
    steps.prompt(2, third, [*range(4), 20], cached=64)


def decodes(steps: Steps, named: list[tuple[int, ...]] | None = None) -> list[tuple[int, ...]]:
    """Steps of all three rows, of the tokens named or of those drawn last; what was drawn. Row 1 meets a new block."""
    drawn = []
    for number in range(DECODES):
        work = [
            RowWork(
                row,
                length + number,
                1,
                None if named is None else named[number][row : row + 1],
                (11,) if (row, length + number) == (1, 48) else (),
            )
            for row, length in enumerate((70, 45, 73))
        ]
        result = steps.plan(*work, num_decodes=3)
        assert result is not None
        drawn.append(result.token_ids)
    return drawn


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_cpus(name: str, tmp_path: pathlib.Path) -> None:
    folder = make_variant(tmp_path, name)
    weights = {key: value.to(torch.bfloat16) for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = steps_on("cuda", "bfloat16", folder), steps_on("cpu", "float32", folder)
    prompts(ours)
    prompts(theirs)
    begun = tuple(int(ours.logits[at][0].argmax()) for at in (0, 3, 4))
    drawn = decodes(ours)
    decodes(theirs, [begun, *drawn[:-1]])
    assert len(ours.logits) == len(theirs.logits) == 5 + DECODES
    for found, expected in zip((logits.float().cpu() for logits in ours.logits), theirs.logits, strict=True):
        distance = float((found - expected).norm() / expected.norm())
        print(f"{name}: {distance:.2e}")
        assert distance < LIMIT
    for token_ids, expected in zip(drawn, theirs.logits[5:], strict=True):
        chosen = expected[range(3), list(token_ids)]
        assert ((expected.amax(-1) - chosen) < MARGIN * expected.std(-1)).all()
