"""What a checkpoint folder says before any weight is read: the model's configuration and its identity. No torch.

Everything that is read from a file is checked here, once; CheckpointError names the file and the field.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from headrace.errors import CheckpointError
from workers.layout import ModelShape

DIGEST_BYTES = 16
SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "revision")


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
class ModelConfig:
    """A dense decoder-only transformer. `head_dim` need not be hidden_size / num_heads.

    `max_context_tokens` is what can be served; `context_reason` says why it is less than the checkpoint names, or is
    empty. `eos_ids` end a sequence.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    max_context_tokens: int
    context_reason: str
    eos_ids: tuple[int, ...]

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.num_layers, self.num_kv_heads, self.head_dim, self.num_heads)


class Fields:
    """One JSON file's object, read field by field; every complaint names the file and the field."""

    def __init__(self, path: pathlib.Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    @classmethod
    def read(cls, path: pathlib.Path) -> "Fields":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return cls(path, values)

    def wrong(self, name: str, allowed: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {self.prefix}{name} must be {allowed}, got {self.values.get(name)!r}",
            file=self.path,
            field=self.prefix + name,
        )

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.values.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= above:
            raise self.wrong(name, f"a number above {above}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def section(self, name: str) -> "Fields | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids given as nothing, one or a list."""
        value = self.values.get(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in listed):
            raise self.wrong(name, "a token id or a list of token ids")
        return tuple(listed)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that holds a model, opened: configuration and identity are known, weights are untouched."""

    folder: pathlib.Path
    config: ModelConfig

    @classmethod
    def open(cls, source: str | pathlib.Path) -> "Checkpoint":
        """A local folder as it is; anything else is a hub id, and goes through the hub's cache."""
        folder = pathlib.Path(source)
        if not folder.is_dir():
            folder = _from_hub(str(source))
        return cls(folder, read_config(folder))

    @cached_property
    def weight_files(self) -> tuple[pathlib.Path, ...]:
        """The safetensors files, in order; those that an index names must all be there."""
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            fields = Fields.read(index)
            section = fields.section("weight_map")
            if section is None:
                raise fields.wrong("weight_map", "an object")
            files = [self.folder / str(name) for name in sorted(set(section.values.values()))]
        else:
            files = sorted(self.folder.glob("*.safetensors"))
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            raise CheckpointError(f"{self.folder} lacks {', '.join(missing) or 'a .safetensors file'}")
        return tuple(files)

    @cached_property
    def revision(self) -> str:
        """The `revision` file's word, else the hub's commit, else a digest of configuration and weights: names, sizes,
        headers and samples of the content, so that two trainings of one shape differ."""
        named = self.folder / "revision"
        if named.is_file():
            return named.read_text(encoding="utf-8").strip()
        if self.folder.parent.name == "snapshots":
            return self.folder.name
        state = blake2b((self.folder / "config.json").read_bytes(), digest_size=DIGEST_BYTES)
        for file in self.weight_files:
            size = file.stat().st_size
            state.update(f"\0{file.name}\0{size}\0".encode())
            with file.open("rb") as stream:
                header = int.from_bytes(stream.read(8), "little")
                state.update(stream.read(min(header, size)))
                for sample in range(SAMPLES_PER_FILE):
                    stream.seek(size * sample // SAMPLES_PER_FILE)
                    state.update(stream.read(SAMPLE_BYTES))
        return state.hexdigest()

    @cached_property
    def tokenizer_digest(self) -> str:
        """Of tokenizer.json, which decides what token ids mean."""
        path = self.folder / "tokenizer.json"
        try:
            return blake2b(path.read_bytes(), digest_size=DIGEST_BYTES).hexdigest()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    @cached_property
    def chat_template(self) -> str | None:
        """chat_template.jinja, else tokenizer_config.json's; the one called default where it names several."""
        separate = self.folder / "chat_template.jinja"
        if separate.is_file():
            return separate.read_text(encoding="utf-8")
        path = self.folder / "tokenizer_config.json"
        if not path.is_file():
            return None
        fields = Fields.read(path)
        template = fields.values.get("chat_template")
        if isinstance(template, list):
            template = next((t.get("template") for t in template if t.get("name") == "default"), None)
        if template is not None and not isinstance(template, str):
            raise fields.wrong("chat_template", "a string, or a list of named templates")
        return template

    @cached_property
    def chat_template_digest(self) -> str:
        """Empty when the model has none."""
        template = self.chat_template
        return "" if template is None else blake2b(template.encode(), digest_size=DIGEST_BYTES).hexdigest()


def read_config(folder: pathlib.Path) -> ModelConfig:
    """config.json, with the end ids of generation_config.json."""
    from workers.models.families import FAMILIES

    fields = Fields.read(folder / "config.json")
    family = FAMILIES.get(fields.text("model_type", ""))
    if family is None:
        raise fields.wrong("model_type", f"one of {', '.join(FAMILIES)}")
    eos = fields.ids("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos += Fields.read(generation).ids("eos_token_id")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of {heads} attention heads")
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.wrong("head_dim", "even")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.wrong("hidden_act", "silu")
    context = fields.integer("max_position_embeddings")
    rope = read_rope(fields, context)
    served, reason = family.context(fields, context)
    traits = family.traits(fields)
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        family=family.name,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        max_context_tokens=served,
        context_reason=reason,
        eos_ids=tuple(dict.fromkeys(token for token in eos if token < vocab_size)),
    )


def read_rope(fields: Fields, context: int) -> Rope:
    """Of `rope_parameters` (newer) or `rope_theta` beside `rope_scaling` (older)."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta = fields.number("rope_theta", 10000.0)
    if section is None:
        return DefaultRope(theta)
    theta = section.number("rope_theta", theta)
    kind = section.values.get("rope_type", section.values.get("type", "default"))
    if kind == "default":
        return DefaultRope(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise section.wrong("rope_type", "default, linear, llama3 or yarn")
    factor = section.number("factor")
    if kind == "linear":
        return LinearRope(theta, factor)
    original = section.integer("original_max_position_embeddings", fields.integer("original_max_position_embeddings", context))
    if kind == "llama3":
        return Llama3Rope(
            theta, factor, section.number("low_freq_factor"), section.number("high_freq_factor"), original
        )
    return YarnRope(
        theta,
        factor,
        original,
        section.number("beta_fast", 32.0),
        section.number("beta_slow", 1.0),
        _yarn_attention_factor(section, factor),
        section.flag("truncate", True),
    )


def _yarn_attention_factor(section: Fields, factor: float) -> float:
    """The paper's 0.1 ln(factor) + 1, unless the checkpoint says otherwise."""

    def scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if section.values.get("attention_factor") is not None:
        return section.number("attention_factor")
    if section.values.get("mscale") and section.values.get("mscale_all_dim"):
        return scale(section.number("mscale")) / scale(section.number("mscale_all_dim"))
    return scale()


def _from_hub(name: str) -> pathlib.Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{name} is neither a folder here nor a model the hub can give: {error}") from error
