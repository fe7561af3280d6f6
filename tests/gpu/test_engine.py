"""The runner on a CUDA device in bfloat16 against the same weights on a CPU in float32: prompts whole, in chunks and
behind a cached prefix."""

import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.config import EngineConfig
from headrace.values import ParallelLayout
from tests.model_steps import Steps, random_ids
from tests.tiny import make_variant
from workers.parallel import form

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


def logits_of(steps: Steps) -> list[Tensor]:
    """Two prompts, one whole and one in chunks, and a third behind the first one's blocks."""
    first, second = random_ids(70, 1), random_ids(45, 2)
    third = [*first[:64], *random_ids(9, 3)]
    steps.prompt(0, first, range(5))
    steps.prompt(1, second, range(8, 11), chunks=(17, 16))
    steps.prompt(2, third, [*range(4), 20], cached=64)
    return [logits.float().cpu() for logits in steps.logits]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_cpus(name: str, tmp_path: pathlib.Path) -> None:
    folder = make_variant(tmp_path, name)
    weights = {key: value.to(torch.bfloat16) for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(steps_on("cpu", "float32", folder))
    found = logits_of(steps_on("cuda", "bfloat16", folder))
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        distance = float((ours - theirs).norm() / theirs.norm())
        print(f"{name}: {distance:.2e}")
        assert distance < LIMIT
