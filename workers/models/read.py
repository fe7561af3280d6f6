"""config.json as a ModelConfig. CheckpointError names the file and the field that is missing or odd."""

import math
import pathlib

from workers.models import FAMILIES
from workers.models.config import DefaultRope, LinearRope, Llama3Rope, ModelConfig, Rope, YarnRope
from workers.models.fields import Fields


def read_config(folder: pathlib.Path) -> ModelConfig:
    """config.json, with the end ids of generation_config.json. CheckpointError names the file and the field."""
    fields = Fields.read(folder / "config.json")
    family = FAMILIES.get(fields.text("model_type", ""))
    if family is None:
        raise fields.wrong("model_type", f"one of {', '.join(FAMILIES)}")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of the {heads} attention heads")
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.wrong("head_dim", "even")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.wrong("hidden_act", "silu")
    rope, context = read_rope(fields, fields.integer("max_position_embeddings"))
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        family=family.name,
        traits=family.traits(fields),
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        context=family.context(fields, context),
        eos_ids=_eos_ids(fields, folder / "generation_config.json", vocab_size),
    )


def read_rope(fields: Fields, context: int) -> tuple[Rope, int]:
    """The rotation, and the context that it reaches: of `rope_parameters`, or of `rope_theta` beside `rope_scaling`."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta = fields.number("rope_theta", 10000.0)
    for holder in filter(None, (section, fields)):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.wrong("partial_rotary_factor", "1.0")
    if section is None:
        return DefaultRope(theta), context
    theta = section.number("rope_theta", theta)
    kind = section.values.get("rope_type", section.values.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise section.wrong("rope_type", "default, linear, llama3 or yarn")
    if kind == "default":
        return DefaultRope(theta), context
    factor = section.number("factor")
    if kind == "linear":
        return LinearRope(theta, factor), context
    original = section.integer("original_max_position_embeddings", context)
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if low >= high:
            raise section.wrong("high_freq_factor", f"above low_freq_factor, {low}")
        return Llama3Rope(theta, factor, low, high, original), context
    fast, slow = section.number("beta_fast", 32.0), section.number("beta_slow", 1.0)
    attention = _yarn_attention_factor(section, factor)
    rope = YarnRope(theta, factor, original, fast, slow, attention, section.flag("truncate", True))
    return rope, max(context, int(original * factor))


def _yarn_attention_factor(section: Fields, factor: float) -> float:
    """The paper's 0.1 ln(factor) + 1, unless the checkpoint says otherwise."""

    def scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if section.values.get("attention_factor") is not None:
        return section.number("attention_factor")
    if section.values.get("mscale") and section.values.get("mscale_all_dim"):
        return scale(section.number("mscale")) / scale(section.number("mscale_all_dim"))
    return scale()


def _eos_ids(fields: Fields, generation: pathlib.Path, vocab_size: int) -> tuple[int, ...]:
    """Of both files: either may name more than the other."""
    ids = fields.ids("eos_token_id")
    if generation.is_file():
        ids += Fields.read(generation).ids("eos_token_id")
    return tuple(dict.fromkeys(token for token in ids if token < vocab_size))
