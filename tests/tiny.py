"""Tiny random checkpoints of every family, each an ordinary folder with a tokenizer and a chat template of its own.

Weights are drawn from a seed and scaled so that logits differ by whole units, as a trained model's do.
"""

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = len(SPECIAL) + 256
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# every way in which the families differ, each at least once
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_scaling": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral-wide-heads": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-tied-mqa": ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}


def make_variant(folder: pathlib.Path, name: str, **dims: Any) -> pathlib.Path:
    """One of VARIANTS."""
    family, own = VARIANTS[name]
    return make_checkpoint(folder, family, **(own | dims))


def make_checkpoint(folder: pathlib.Path, family: str = "llama", *, seed: int = 0, **dims: Any) -> pathlib.Path:
    """Writes a checkpoint of `family`; `dims` are config.json's own fields and override the defaults."""
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
        **dims,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": EOS_ID})
    save_file(make_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(folder)
    return folder


def make_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    family, dim = config["model_type"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    output_bias = family != "qwen2" and config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    weights: dict[str, Tensor] = {}

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        weights[f"{name}.weight"] = draw(outputs, inputs) * inputs**-0.5
        if bias:
            weights[f"{name}.bias"] = draw(outputs) * 0.2

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1.0 + 0.2 * draw(size)

    weights["model.embed_tokens.weight"] = draw(vocab, hidden) * 0.4
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        norm(f"{layer}.input_layernorm", hidden)
        linear(f"{layer}.self_attn.q_proj", heads, hidden, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_heads, hidden, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_heads, hidden, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, heads, output_bias)
        if family == "qwen3":
            norm(f"{layer}.self_attn.q_norm", dim)
            norm(f"{layer}.self_attn.k_norm", dim)
        norm(f"{layer}.post_attention_layernorm", hidden)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", vocab, hidden, False)
    return weights


def make_tokenizer(folder: pathlib.Path) -> None:
    """A token for every byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
