"""GGUF files made from checkpoint folders, as llama.cpp's converter makes them."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import load_file

from tests.tiny import SPECIAL

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    folder: pathlib.Path,
    path: pathlib.Path,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    quantised: gguf.GGMLQuantizationType | None = None,
) -> pathlib.Path:
    """`keys` override metadata (None leaves one out), `tensors` are added, matrices are `quantised` where they can be."""
    config = json.loads((folder / "config.json").read_text())
    metadata = {**_metadata(config), **_vocabulary(folder), **(keys or {})}
    architecture = metadata.pop("general.architecture")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, weight in {**_tensors(folder, config), **_divisors(config), **(tensors or {})}.items():
        if quantised is not None and weight.ndim == 2:
            writer.add_tensor(name, quantize(weight, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    family = config["model_type"]
    own: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    scaling = config.get("rope_scaling")
    if scaling and scaling["rope_type"] == "yarn":
        own["rope.scaling.type"] = "yarn"
        own["rope.scaling.factor"] = scaling["factor"]
        own["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    return {"general.architecture": family, **{f"{family}.{key}": value for key, value in own.items()}}


def _vocabulary(folder: pathlib.Path) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = json.loads((folder / "tokenizer_config.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": vocab[names["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocab[names["eos_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": names["chat_template"],
    }


def _tensors(folder: pathlib.Path, config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        prefix, _, kind = name.rpartition(".")
        if prefix.startswith("model.layers."):
            _, _, number, part = prefix.split(".", 3)
            prefix, target = part, f"blk.{number}.{NAMES[part]}.{kind}"
        else:
            target = f"{NAMES[prefix]}.{kind}"
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(prefix)
        if config["model_type"] == "llama" and heads:
            rows = weight.reshape(config[heads], 2, config["head_dim"] // 2, *weight.shape[1:])
            weight = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)
        found[target] = weight
    return found


def _divisors(config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """llama3's scaling as the converter writes it: by how much each frequency is divided."""
    scaling = config.get("rope_scaling")
    if not scaling or scaling["rope_type"] != "llama3":
        return {}
    divisors = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / config["head_dim"])
        turns = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / scaling["factor"] + kept))
    return {"rope_freqs.weight": np.array(divisors, dtype=np.float32)}
