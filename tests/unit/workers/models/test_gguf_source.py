"""workers.models.gguf_source: what llama.cpp's converter did to a checkpoint is undone; what cannot be served is not."""

import json
import pathlib
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

from headrace.errors import CheckpointError
from tests.gguf_files import write_gguf
from tests.tiny import LLAMA3, YARN, make_checkpoint
from workers.models import gguf_source
from workers.models.checkpoint import Checkpoint
from workers.models.gguf_source import convert

pytestmark = pytest.mark.torch


def no_progress(stage: str, done: int, total: int) -> None: ...


def convert_to(source: pathlib.Path, folder: pathlib.Path) -> Checkpoint:
    folder.mkdir()
    convert(source, folder, no_progress)
    return Checkpoint.open(folder)


def json_of(path: pathlib.Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}, "rope_theta": 500_000.0}),
        ("qwen2", {"rope_scaling": YARN}),
        ("qwen3", {"head_dim": 24, "rope_theta": 1e6, "rms_norm_eps": 1e-6}),
    ],
)
def test_weights_and_configuration_come_back(tmp_path: pathlib.Path, family: str, dims: dict[str, Any]) -> None:
    original = make_checkpoint(tmp_path / "original", family, **dims)
    converted = convert_to(write_gguf(original, tmp_path / "model.gguf"), tmp_path / "converted")
    before, after = load_file(original / "model.safetensors"), load_file(converted.folder / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name
    assert converted.config == Checkpoint.open(original).config


def test_quantised_weights_are_dequantised(tmp_path: pathlib.Path) -> None:
    original = make_checkpoint(tmp_path / "original", intermediate_size=96)
    source = write_gguf(original, tmp_path / "model.gguf", quantised=gguf.GGMLQuantizationType.Q8_0)
    converted = convert_to(source, tmp_path / "converted")
    before, after = load_file(original / "model.safetensors"), load_file(converted.folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(quantize(before[name].numpy(), kind), kind)
    assert np.array_equal(after[name].numpy(), expected)
    assert after[name].dtype == torch.float32
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, atol=0.02, rtol=0.02)


def test_the_tokenizer_reads_as_the_original_did(tmp_path: pathlib.Path) -> None:
    from tokenizers import Tokenizer

    original = make_checkpoint(tmp_path / "original")
    converted = convert_to(write_gguf(original, tmp_path / "model.gguf"), tmp_path / "converted")
    before, after = (Tokenizer.from_file(str(f / "tokenizer.json")) for f in (original, converted.folder))
    for text in ("<|im_start|>user\nHéllo,  wörld 123<|im_end|>\n", "", "\t\n \r\n", "日本語 🙂"):
        assert before.encode(text).ids == after.encode(text).ids
        assert after.decode(after.encode(text).ids, skip_special_tokens=False) == text
    assert converted.chat_template == Checkpoint.open(original).chat_template
    names = json_of(converted.folder / "tokenizer_config.json")
    assert (names["bos_token"], names["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_revision_is_a_digest_of_the_file(tmp_path: pathlib.Path) -> None:
    folders = [make_checkpoint(tmp_path / f"o{i}", seed=seed) for i, seed in enumerate((0, 0, 1))]
    found = [
        convert_to(write_gguf(folder, tmp_path / f"{i}.gguf"), tmp_path / f"c{i}").revision
        for i, folder in enumerate(folders)
    ]
    assert found[0] == found[1] != found[2]
    assert len(found[0]) == 40


def test_a_large_model_comes_in_several_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_source, "SHARD_BYTES", 100_000)
    original = make_checkpoint(tmp_path / "original")
    converted = convert_to(write_gguf(original, tmp_path / "model.gguf"), tmp_path / "converted")
    assert len(converted.weight_files) > 3
    assert converted.weight_files[0].name == f"model-00001-of-{len(converted.weight_files):05}.safetensors"
    held = {name for file in converted.weight_files for name in load_file(file)}
    assert held == load_file(original / "model.safetensors").keys()


class TestRefusals:
    @pytest.fixture
    def original(self, tmp_path: pathlib.Path) -> pathlib.Path:
        return make_checkpoint(tmp_path / "original")

    @pytest.mark.parametrize(
        ("keys", "complaint"),
        [
            (
                {"general.architecture": "mamba"},
                r"general\.architecture must be one of llama, qwen2, qwen3, got 'mamba'",
            ),
            ({"llama.block_count": None}, r"metadata key 'llama\.block_count' is missing"),
            ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model must be gpt2 \(byte-level BPE\), got 'llama'"),
            ({"tokenizer.ggml.pre": "exotic"}, r"tokenizer\.ggml\.pre must be one of .*, got 'exotic'"),
            (
                {"llama.rope.scaling.type": "longrope"},
                r"rope\.scaling\.type must be none, linear or yarn, got 'longrope'",
            ),
        ],
    )
    def test_odd_metadata_is_named(
        self, tmp_path: pathlib.Path, original: pathlib.Path, keys: dict[str, Any], complaint: str
    ) -> None:
        with pytest.raises(CheckpointError, match=rf"odd\.gguf: .*{complaint}"):
            convert_to(write_gguf(original, tmp_path / "odd.gguf", keys=keys), tmp_path / "converted")

    def test_odd_tensors_are_named(self, tmp_path: pathlib.Path, original: pathlib.Path) -> None:
        odd = {"blk.0.ffn_gate_exps.weight": np.zeros((4, 32), dtype=np.float32)}
        with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.ffn_gate_exps\.weight' belongs to no llama model"):
            convert_to(write_gguf(original, tmp_path / "odd.gguf", tensors=odd), tmp_path / "converted")

    def test_frequencies_that_fit_no_scaling_are_refused(self, tmp_path: pathlib.Path, original: pathlib.Path) -> None:
        odd = {"rope_freqs.weight": np.array([1, 2, 3, 4, 5, 6, 7, 8], dtype=np.float32)}
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight fits no rope scaling"):
            convert_to(write_gguf(original, tmp_path / "odd.gguf", tensors=odd), tmp_path / "converted")

    @pytest.mark.parametrize("kept", [0, 3, 100, 20_000, -100])
    def test_a_truncated_file_is_named(self, tmp_path: pathlib.Path, original: pathlib.Path, kept: int) -> None:
        path = write_gguf(original, tmp_path / "cut.gguf")
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(CheckpointError, match=r"cut\.gguf is not a whole GGUF file"):
            convert_to(path, tmp_path / "converted")
