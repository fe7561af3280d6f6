"""What a model is to a planner: parameters, KV a token, arithmetic a token. From config.json, or a published one by its id.

Tokens, bytes, floating point operations (a multiply and an add are two).
"""

import pathlib
from dataclasses import dataclass

from headrace.errors import ConfigError
from workers.kv.layout import ModelShape
from workers.models.config import ModelConfig
from workers.models.read import read_config

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
KV_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}
SERVED = ("float32", "bfloat16", "float16")  # what the engine can run; the others are arithmetic alone
WHOLE_BYTES = 2.0  # embeddings, head and norms stay as they are where linear layers are quantised


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights and KV are held. int4: groups of 128 with a scale of 16 bits."""

    weights: str = "bfloat16"
    kv: str = "bfloat16"

    def __post_init__(self) -> None:
        for key, value, known in (("precision", self.weights, WEIGHT_BYTES), ("kv_precision", self.kv, KV_BYTES)):
            if value not in known:
                raise ConfigError.out_of_range(key, value, f"one of {', '.join(known)}")

    @property
    def is_served(self) -> bool:
        return self.weights in SERVED and self.kv in SERVED and self.weights == self.kv


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder. `source` says where its shape is from; `num_biases` and `num_qk_norms` are values a layer."""

    name: str
    source: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_context_tokens: int
    num_biases: int = 0
    num_qk_norms: int = 0

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.num_layers, self.num_kv_heads, self.head_dim, self.num_heads)

    @property
    def attention(self) -> str:
        """How query heads share KV heads."""
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else f"GQA {self.num_heads}:{self.num_kv_heads}"

    @property
    def layer_linear_params(self) -> int:
        """Of the matrices of one layer."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        small = 2 * self.hidden_size + self.num_biases + self.num_qk_norms
        embeddings = self.embedding_params * (1 if self.tied_embeddings else 2)
        return self.num_layers * (self.layer_linear_params + small) + embeddings + self.hidden_size

    def weight_bytes(self, precision: Precision) -> float:
        linear = self.num_layers * self.layer_linear_params
        rest = min(WEIGHT_BYTES[precision.weights], WHOLE_BYTES) if precision.is_served else WHOLE_BYTES
        if precision.weights == "float32":
            rest = 4.0
        return linear * WEIGHT_BYTES[precision.weights] + (self.num_params - linear) * rest

    def read_bytes(self, precision: Precision) -> float:
        """What a decode step reads of the weights: all but the input embeddings, of which it takes a row a token."""
        if self.tied_embeddings:
            return self.weight_bytes(precision)
        return self.weight_bytes(precision) - self.embedding_params * (4.0 if precision.weights == "float32" else 2.0)

    def kv_bytes_per_token(self, precision: Precision) -> float:
        """K and V of every layer and KV head."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * KV_BYTES[precision.kv]

    @property
    def linear_flops_per_token(self) -> float:
        """Of a prompt's token; the head is computed for its last one alone."""
        return 2.0 * self.num_layers * self.layer_linear_params

    @property
    def decode_flops_per_token(self) -> float:
        return self.linear_flops_per_token + 2.0 * self.embedding_params

    @property
    def attention_flops_per_token_context(self) -> float:
        """Of one token for each token that it attends to: scores and their weighted sum."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim


def from_config(name: str, source: str, config: ModelConfig) -> ModelSpec:
    traits, qkv = config.traits, config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    biases = qkv * traits.qkv_bias + config.hidden_size * traits.output_bias
    biases += (2 * config.intermediate_size + config.hidden_size) * traits.mlp_bias
    return ModelSpec(
        name=name,
        source=source,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tied_embeddings,
        max_context_tokens=config.max_context_tokens,
        num_biases=biases,
        num_qk_norms=2 * config.head_dim * traits.qk_norm,
    )


def read(path: pathlib.Path, name: str = "") -> ModelSpec:
    """A checkpoint's folder or its config.json; called as the folder unless named. Names what is missing."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name != "config.json":
        raise ConfigError(f"model: a file must be called config.json, got {path}")
    name = name or folder.resolve().name
    return from_config(name, f"config.json of {name}", read_config(folder))


def _llama(name: str, layers: int, hidden: int, wide: int, heads: int, kv: int, vocab: int, context: int) -> ModelSpec:
    source = "its published config.json"
    return ModelSpec(name, source, layers, hidden, wide, heads, kv, hidden // heads, vocab, False, context)


def _qwen2(
    name: str, layers: int, hidden: int, wide: int, heads: int, kv: int, vocab: int, *, tied: bool = False
) -> ModelSpec:
    dim = hidden // heads
    biases = dim * (heads + 2 * kv)
    source = "its published config.json"
    return ModelSpec(name, source, layers, hidden, wide, heads, kv, dim, vocab, tied, 32_768, biases)


def _qwen3(
    name: str, layers: int, hidden: int, wide: int, heads: int, kv: int, *, dim: int = 128, tied: bool = False
) -> ModelSpec:
    source = "its published config.json"
    return ModelSpec(name, source, layers, hidden, wide, heads, kv, dim, 151_936, tied, 40_960, 0, 2 * dim)


_SPECS = (
    _llama("meta-llama/Llama-2-7b-hf", 32, 4096, 11008, 32, 32, 32_000, 4096),
    _llama("meta-llama/Llama-2-13b-hf", 40, 5120, 13824, 40, 40, 32_000, 4096),
    _llama("meta-llama/Llama-2-70b-hf", 80, 8192, 28672, 64, 8, 32_000, 4096),
    _llama("meta-llama/Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128_256, 131_072),
    _llama("meta-llama/Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128_256, 131_072),
    _llama("meta-llama/Llama-3.1-405B", 126, 16384, 53248, 128, 8, 128_256, 131_072),
    _llama("mistralai/Mistral-7B-v0.3", 32, 4096, 14336, 32, 8, 32_768, 32_768),
    _qwen2("Qwen/Qwen2.5-7B", 28, 3584, 18944, 28, 4, 152_064),
    _qwen2("Qwen/Qwen2.5-14B", 48, 5120, 13824, 40, 8, 152_064),
    _qwen2("Qwen/Qwen2.5-32B", 64, 5120, 27648, 40, 8, 152_064),
    _qwen2("Qwen/Qwen2.5-72B", 80, 8192, 29568, 64, 8, 152_064),
    _qwen3("Qwen/Qwen3-8B", 36, 4096, 12288, 32, 8),
    _qwen3("Qwen/Qwen3-32B", 64, 5120, 25600, 64, 8),
)
KNOWN = {spec.name: spec for spec in _SPECS}


def known(name: str) -> ModelSpec | None:
    """By its hub id; tuned variants (-Instruct, -Chat) have the shape of what they were tuned from."""
    for suffix in ("", "-Instruct", "-instruct"):
        found = KNOWN.get(name.removesuffix(suffix) if suffix else name)
        if found is not None:
            return found
    if name.startswith("meta-llama/Llama-2-"):
        return KNOWN.get(name.replace("-chat-hf", "-hf"))
    return None
