"""Llama 2 and 3, SmolLM and all that call themselves so."""

from workers.models.config import Family, Traits, full_context
from workers.models.fields import Fields


def traits(fields: Fields) -> Traits:
    biased = fields.flag("attention_bias", False)
    return Traits(qkv_bias=biased, output_bias=biased, mlp_bias=fields.flag("mlp_bias", False))


FAMILY = Family("llama", traits, full_context)
