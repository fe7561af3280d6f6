"""workers.models.weights: every rank reads its slices and nothing else, and says which tensor is wrong."""

import json
import pathlib
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError
from tests.tiny import make_checkpoint
from workers.models.checkpoint import Checkpoint
from workers.models.weights import Wanted, load

pytestmark = pytest.mark.torch


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_checkpoint(tmp_path / "model")


def split_in_two(folder: pathlib.Path) -> None:
    """As large checkpoints come: several files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("split", [False, True])
def test_slices_go_to_their_places(folder: pathlib.Path, split: bool) -> None:
    weights = load_file(folder / "model.safetensors")
    if split:
        split_in_two(folder)
    name, other = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"
    fused = torch.zeros(64 + 10, 30, dtype=torch.bfloat16)
    norm = torch.zeros(64)
    told: list[tuple[int, int]] = []
    load(
        Checkpoint.open(folder),
        [
            Wanted(name, (64, 90), fused[:64], (0, 64), (30, 60)),
            Wanted(name, (64, 90), fused[64:], (5, 15), (60, 90)),
            Wanted(other, (64,), norm, (0, 64)),
        ],
        lambda done, total: told.append((done, total)),
    )
    assert torch.equal(fused[:64], weights[name][:, 30:60].bfloat16())
    assert torch.equal(fused[64:], weights[name][5:15, 60:].bfloat16())
    assert torch.equal(norm, weights[other])
    assert told == [(1, 2), (2, 2)]


def test_a_missing_tensor_is_named(folder: pathlib.Path) -> None:
    wanted = [Wanted("model.lost.weight", (1,), torch.zeros(1), (0, 1))]
    with pytest.raises(CheckpointError, match=r"holds no tensor 'model\.lost\.weight' \(1 of 1 are missing\)"):
        load(Checkpoint.open(folder), wanted)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.uint8, "U8")], ids=str
)
def test_a_quantised_tensor_is_named_not_read_without_its_scale(
    folder: pathlib.Path, dtype: torch.dtype, name: str
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(64).to(dtype)
    save_file(weights, folder / "model.safetensors")
    wanted = [Wanted("model.norm.weight", (64,), torch.zeros(64), (0, 64))]
    with pytest.raises(CheckpointError, match=f"tensor 'model.norm.weight' must be one of F64, .*got {name}"):
        load(Checkpoint.open(folder), wanted)


def test_a_tensor_of_another_shape_is_named(folder: pathlib.Path) -> None:
    wanted = [Wanted("model.norm.weight", (65,), torch.zeros(65), (0, 65))]
    complaint = "tensor 'model.norm.weight' must have shape [65], got [64]"
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        load(Checkpoint.open(folder), wanted)


@pytest.mark.parametrize("kept", [0, 5, 1000, 100_000])
def test_a_truncated_file_is_named(folder: pathlib.Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    wanted = [Wanted("model.norm.weight", (64,), torch.zeros(64), (0, 64))]
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        load(Checkpoint.open(folder), wanted)


def test_missing_files_are_named(folder: pathlib.Path) -> None:
    split_in_two(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-2\.safetensors"):
        load(Checkpoint.open(folder), [])
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks a \.safetensors file"):
        load(Checkpoint.open(folder), [])
