"""Qwen3: norms over each head of q and k instead of biases."""

from workers.models.config import Family, Traits
from workers.models.fields import Fields
from workers.models.qwen2 import context


def traits(fields: Fields) -> Traits:
    biased = fields.flag("attention_bias", False)
    return Traits(qkv_bias=biased, output_bias=biased, qk_norm=True)


FAMILY = Family("qwen3", traits, context)
