"""A GGUF file as an ordinary checkpoint folder: config.json, weights as float32 safetensors, tokenizer, chat template.

Weights are dequantised once; what llama.cpp's converter did to a checkpoint (names, and for the Llama family the order
of the rows of q and k) is undone. The folder's revision is the digest of the GGUF file and of this conversion.
"""

import json
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from safetensors.numpy import save_file

from headrace.errors import CheckpointError
from workers.models.gguf_tokenizer import write_tokenizer

CONVERSION = b"headrace gguf conversion 1"
SHARD_BYTES = 4 * 2**30

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _Family:
    """What a GGUF architecture is called in config.json, and whether its q and k rows were reordered."""

    architecture: str
    permuted: bool
    fixed: dict[str, Any]


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", True, {"hidden_act": "silu"}),
    "qwen2": _Family("Qwen2ForCausalLM", False, {"hidden_act": "silu"}),
    "qwen3": _Family("Qwen3ForCausalLM", False, {"hidden_act": "silu", "attention_bias": False}),
}

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """An open GGUF file. CheckpointError names the file and the key or tensor that is missing or odd."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise CheckpointError(f"{path} is not a whole GGUF file: {error}") from error
        self.architecture = str(self.need("general.architecture"))
        if self.architecture not in _FAMILIES:
            raise CheckpointError(
                f"{path}: general.architecture must be one of {', '.join(_FAMILIES)}, got {self.architecture!r}"
            )
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata key {key!r} is missing")
        return value

    def own(self, key: str, default: Any = None) -> Any:
        """A key of the architecture's own section, such as block_count."""
        return self.get(f"{self.architecture}.{key}", default)

    def need_own(self, key: str) -> Any:
        return self.need(f"{self.architecture}.{key}")


def convert(source: pathlib.Path, folder: pathlib.Path, progress: Progress) -> None:
    """Writes the checkpoint folder of a GGUF file; `folder` exists and is empty."""
    file = GgufFile(source)
    config = config_of(file)
    write_tokenizer(file, folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(file))
    _write_weights(file, config, folder, progress)
    (folder / "revision").write_text(_digest(source, progress) + "\n", encoding="utf-8")


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json as transformers writes it for this family."""
    family = _FAMILIES[file.architecture]
    heads = int(file.need_own("attention.head_count"))
    hidden = int(file.need_own("embedding_length"))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": file.architecture,
        "hidden_size": hidden,
        "intermediate_size": int(file.need_own("feed_forward_length")),
        "num_hidden_layers": int(file.need_own("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.own("attention.head_count_kv", heads)),
        "head_dim": int(file.own("attention.key_length", hidden // heads)),
        "rms_norm_eps": _short(file.need_own("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(file.own("rope.freq_base", 10000.0)),
        "max_position_embeddings": int(file.need_own("context_length")),
        "vocab_size": int(embedding.shape[1]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
        **family.fixed,
    }
    if file.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if scaling := _rope_scaling(file, config):
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = file.own("rope.scaling.type", "none")
    factor = float(file.own("rope.scaling.factor", 1.0))
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = int(file.need_own("rope.scaling.original_context_length"))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind not in ("none", "linear"):
        raise CheckpointError(f"{file.path}: rope.scaling.type must be none, linear or yarn, got {kind!r}")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    return None


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The converter folded llama3's parameters into one divisor per frequency; the published parameters are taken when
    they give those divisors back."""
    divisors = np.asarray(file.tensors["rope_freqs.weight"].data, dtype=np.float64)
    scaling = {
        "rope_type": "llama3",
        "factor": _short(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(len(divisors)) / len(divisors))
    smooth = np.clip((8192 / wavelengths - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise CheckpointError(f"{file.path}: rope_freqs.weight fits no rope scaling that config.json can name")
    return scaling


def _generation_config(file: GgufFile) -> dict[str, Any]:
    eos = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(int(token) for token in eos if token is not None))
    config: dict[str, Any] = {"_from_model_config": True}
    if (bos := file.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = int(bos)
    if ids:
        config["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return config


def _write_weights(file: GgufFile, config: dict[str, Any], folder: pathlib.Path, progress: Progress) -> None:
    """In files of at most SHARD_BYTES, so that a model larger than memory converts too."""
    names = {name: _target_name(file, name) for name in file.tensors if name != "rope_freqs.weight"}
    shards: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = 4 * int(np.prod(file.tensors[name].shape))
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    weight_map: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, 1):
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        content: dict[str, np.ndarray[Any, Any]] = {}
        for name in shard:
            content[names[name]] = _dequantise(file, config, name)
            weight_map[names[name]] = file_name
            done += 1
            progress("converting weights", done, len(names))
        save_file(content, folder / file_name, metadata={"format": "pt"})
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _target_name(file: GgufFile, name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    raise CheckpointError(f"{file.path}: tensor {name!r} belongs to no {file.architecture} model that is served")


def _dequantise(file: GgufFile, config: dict[str, Any], name: str) -> np.ndarray[Any, Any]:
    tensor = file.tensors[name]
    shape = tuple(int(size) for size in reversed(tensor.shape))
    try:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
    except (ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{file.path}: tensor {name!r} cannot be dequantised: {error}") from error
    if _FAMILIES[file.architecture].permuted and ".attn_q." in name:
        weight = _unpermute(weight, config["num_attention_heads"])
    elif _FAMILIES[file.architecture].permuted and ".attn_k." in name:
        weight = _unpermute(weight, config["num_key_value_heads"])
    return np.ascontiguousarray(weight)


def _unpermute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp pairs dimension 2i with 2i + 1; a checkpoint pairs i with i + head_dim / 2."""
    rows = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def _short(value: float) -> float:
    """A float32 as the shortest decimal that names it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _digest(path: pathlib.Path, progress: Progress) -> str:
    state = blake2b(CONVERSION, digest_size=20)
    size, done = path.stat().st_size, 0
    for chunk in _chunks(path):
        state.update(chunk)
        done += len(chunk)
        progress("hashing", done, size)
    return state.hexdigest()


def _chunks(path: pathlib.Path, size: int = 4 * 2**20) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(size):
            yield chunk


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
