"""What a model is: the frozen configuration that the decoder is built from. No torch.

A family is what its name in config.json stands for: which parts have biases or norms of their own, and how much of the
context can be served. Each has a file beside this one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.kv.layout import ModelShape
from workers.models.fields import Fields


@dataclass(frozen=True, slots=True)
class DefaultRope:
    theta: float


@dataclass(frozen=True, slots=True)
class LinearRope:
    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """`attention_factor` scales cos and sin, and so attention's temperature."""

    theta: float
    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope


@dataclass(frozen=True, slots=True)
class Traits:
    """Where dense decoders differ. `qk_norm`: RMS norm over each head of q and k before the rotation."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class ServedContext:
    """`reason` says why `tokens` is less than the checkpoint names; empty when it is not."""

    tokens: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """`name` is config.json's model_type; `context` is given the checkpoint's own."""

    name: str
    traits: Callable[[Fields], Traits]
    context: Callable[[Fields, int], ServedContext]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder-only transformer. `head_dim` need not be hidden_size / num_heads; `eos_ids` end a sequence."""

    family: str
    traits: Traits
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool
    context: ServedContext
    eos_ids: tuple[int, ...]

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.num_layers, self.num_kv_heads, self.head_dim, self.num_heads)

    @property
    def max_context_tokens(self) -> int:
        return self.context.tokens


def full_context(fields: Fields, tokens: int) -> ServedContext:
    """For families that attend to everything."""
    return ServedContext(tokens)


def capped_to_window(fields: Fields, tokens: int) -> ServedContext:
    """Within its window, windowed attention is full attention: what lies beyond is not served."""
    window = fields.integer("sliding_window") if fields.values.get("sliding_window") is not None else tokens
    if window >= tokens:
        return ServedContext(tokens)
    return ServedContext(window, f"attention is windowed: sliding_window is {window} of {tokens} positions")
