"""Qwen2 and Qwen2.5: biases on q, k and v, whatever config.json says."""

from workers.models.config import Family, ServedContext, Traits, capped_to_window
from workers.models.fields import Fields


def traits(fields: Fields) -> Traits:
    return Traits(qkv_bias=True)


def context(fields: Fields, tokens: int) -> ServedContext:
    """`sliding_window` means nothing unless use_sliding_window is true, and then only from max_window_layers on (28
    where it is not named)."""
    num_layers = fields.integer("num_hidden_layers")
    windowed = fields.flag("use_sliding_window", False)
    if not windowed or fields.integer("max_window_layers", 28, low=0) >= num_layers:
        return ServedContext(tokens)
    return capped_to_window(fields, tokens)


FAMILY = Family("qwen2", traits, context)
