"""workers.models.checkpoint and workers.models.read: what a folder says, and what is wrong with it."""

import json
import pathlib
from typing import Any

import pytest

from headrace.errors import CheckpointError
from tests.tiny import CHAT_TEMPLATE, VARIANTS, make_checkpoint, make_variant
from workers.models.checkpoint import Checkpoint
from workers.models.config import DefaultRope, LinearRope, Llama3Rope, ServedContext, Traits, YarnRope
from workers.models.read import read_config

pytestmark = pytest.mark.torch


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_checkpoint(tmp_path / "model")


def change(folder: pathlib.Path, file: str = "config.json", /, **values: Any) -> None:
    """Sets fields; None removes one."""
    path = folder / file
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


class TestConfig:
    @pytest.mark.parametrize("name", VARIANTS)
    def test_every_variant_opens(self, tmp_path: pathlib.Path, name: str) -> None:
        config = Checkpoint.open(make_variant(tmp_path, name)).config
        assert config.family == VARIANTS[name][0]
        assert config.eos_ids == (2,)
        assert config.shape.num_layers == 3

    @pytest.mark.parametrize(
        ("family", "dims", "traits"),
        [
            ("llama", {}, Traits()),
            ("llama", {"attention_bias": True}, Traits(qkv_bias=True, output_bias=True)),
            ("mistral", {}, Traits()),
            ("qwen2", {}, Traits(qkv_bias=True)),
            ("qwen3", {}, Traits(qk_norm=True)),
        ],
    )
    def test_traits(self, tmp_path: pathlib.Path, family: str, dims: dict[str, Any], traits: Traits) -> None:
        assert read_config(make_checkpoint(tmp_path, family, **dims)).traits == traits

    def test_head_dim_defaults_to_its_share_of_the_width(self, folder: pathlib.Path) -> None:
        change(folder, head_dim=None, num_key_value_heads=None)
        config = read_config(folder)
        assert (config.head_dim, config.num_kv_heads) == (16, 4)

    def test_end_ids_of_both_files_count(self, folder: pathlib.Path) -> None:
        change(folder, "generation_config.json", eos_token_id=[7, 2, 5, 100_000])
        assert read_config(folder).eos_ids == (2, 7, 5)

    def test_a_window_shorter_than_the_context_caps_it(self, tmp_path: pathlib.Path) -> None:
        config = read_config(make_checkpoint(tmp_path, "mistral", sliding_window=100))
        assert config.context == ServedContext(100, "attention is windowed: sliding_window is 100 of 256 positions")
        change(tmp_path, sliding_window=4096)
        assert read_config(tmp_path).context == ServedContext(256)

    @pytest.mark.parametrize(("window", "served"), [({}, 4096), ({"sliding_window": None}, 8192)])
    def test_mistral_without_a_word_of_its_window_has_the_first_versions(
        self, tmp_path: pathlib.Path, window: dict[str, None], served: int
    ) -> None:
        """As transformers reads it: null is none, absent is 4096."""
        make_checkpoint(tmp_path, "mistral", max_position_embeddings=8192, **window)
        assert read_config(tmp_path).max_context_tokens == served

    def test_qwen_windows_from_its_28th_layer_on_unless_it_says_otherwise(self, tmp_path: pathlib.Path) -> None:
        make_checkpoint(tmp_path, "qwen2", sliding_window=100, use_sliding_window=True)
        change(tmp_path, num_hidden_layers=28)
        assert read_config(tmp_path).max_context_tokens == 256
        change(tmp_path, num_hidden_layers=29)
        assert read_config(tmp_path).max_context_tokens == 100

    def test_qwen_windows_only_where_it_says_so(self, tmp_path: pathlib.Path) -> None:
        make_checkpoint(tmp_path, "qwen2", sliding_window=100, use_sliding_window=False, max_window_layers=1)
        assert read_config(tmp_path).max_context_tokens == 256
        change(tmp_path, use_sliding_window=True)
        assert read_config(tmp_path).max_context_tokens == 100
        change(tmp_path, max_window_layers=3)
        assert read_config(tmp_path).max_context_tokens == 256

    def test_rope_scaling_of_the_older_and_the_newer_form(self, folder: pathlib.Path) -> None:
        assert read_config(folder).rope == DefaultRope(10000.0)
        change(folder, rope_scaling={"type": "linear", "factor": 2.0})
        assert read_config(folder).rope == LinearRope(10000.0, 2.0)
        llama3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
        change(
            folder, rope_scaling=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8, **llama3}
        )
        assert read_config(folder).rope == Llama3Rope(5e5, 8.0, 1.0, 4.0, 64)

    def test_yarn_reaches_further(self, folder: pathlib.Path) -> None:
        change(folder, rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64})
        config = read_config(folder)
        assert isinstance(config.rope, YarnRope)
        assert config.rope.attention_factor == pytest.approx(1.2079441)
        assert config.max_context_tokens == 512


class TestBadConfig:
    @pytest.mark.parametrize(
        ("values", "complaint"),
        [
            ({"model_type": "mamba"}, r"model_type must be one of llama, mistral, qwen2, qwen3, got 'mamba'"),
            ({"hidden_size": None}, r"hidden_size must be an integer from 1 to 2147483647, got None"),
            ({"hidden_size": "64"}, r"hidden_size must be an integer"),
            ({"num_hidden_layers": 0}, r"num_hidden_layers must be an integer from 1"),
            ({"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor of the 4 attention heads, got 3"),
            ({"head_dim": 15}, r"head_dim must be even, got 15"),
            ({"hidden_act": "gelu"}, r"hidden_act must be silu, got 'gelu'"),
            ({"rms_norm_eps": 0}, r"rms_norm_eps must be a number above 0.0, got 0"),
            ({"rms_norm_eps": float("nan")}, r"rms_norm_eps must be a number above 0.0, got nan"),
            ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings must be true or false"),
            ({"eos_token_id": [1, "x"]}, r"eos_token_id must be a token id or a list"),
            (
                {"rope_scaling": {"rope_type": "dynamic"}},
                r"rope_scaling\.rope_type must be default, linear, llama3 or yarn",
            ),
            ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor must be a number above 0"),
            ({"rope_scaling": [1]}, r"rope_scaling must be an object"),
            (
                {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "default"}},
                "partial_rotary_factor must be 1.0",
            ),
        ],
    )
    def test_names_file_field_value_and_range(
        self, folder: pathlib.Path, values: dict[str, Any], complaint: str
    ) -> None:
        change(folder, **values)
        with pytest.raises(CheckpointError, match=rf"config\.json: .*{complaint}"):
            Checkpoint.open(folder)

    def test_partial_rotation_is_refused_without_scaling_too(self, folder: pathlib.Path) -> None:
        change(folder, partial_rotary_factor=0.5)
        with pytest.raises(CheckpointError, match=r"partial_rotary_factor must be 1\.0, got 0\.5"):
            Checkpoint.open(folder)

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [("", "is not valid JSON"), ("[1]", "must hold a JSON object, got list"), ('{"a": ', "is not valid JSON")],
    )
    def test_broken_json(self, folder: pathlib.Path, text: str, complaint: str) -> None:
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=complaint):
            Checkpoint.open(folder)

    def test_missing_file(self, folder: pathlib.Path) -> None:
        (folder / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: No such file"):
            Checkpoint.open(folder)


class TestIdentity:
    def test_revision_is_the_files_word(self, folder: pathlib.Path) -> None:
        (folder / "revision").write_text("abc123\n")
        assert Checkpoint.open(folder).revision == "abc123"

    def test_revision_is_the_hubs_commit(self, tmp_path: pathlib.Path) -> None:
        assert Checkpoint.open(make_checkpoint(tmp_path / "snapshots" / "0123abcd")).revision == "0123abcd"

    def test_revision_else_tells_two_trainings_of_one_shape_apart(self, tmp_path: pathlib.Path) -> None:
        """Case 61: equal shapes, other weights."""
        one, same, other = (make_checkpoint(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1)))
        revisions = [Checkpoint.open(folder).revision for folder in (one, same, other)]
        assert revisions[0] == revisions[1] != revisions[2]
        change(same, rope_theta=500.0)
        assert Checkpoint.open(same).revision != revisions[0]

    def test_tokenizer_and_template_have_digests(self, folder: pathlib.Path) -> None:
        before = Checkpoint.open(folder)
        tokenizer, template = before.tokenizer_digest, before.chat_template_digest
        assert before.chat_template == CHAT_TEMPLATE
        change(folder, "tokenizer_config.json", chat_template="{{ other }}")
        (folder / "tokenizer.json").write_text("{}")
        after = Checkpoint.open(folder)
        assert after.chat_template_digest != template
        assert after.tokenizer_digest != tokenizer
        assert len(after.tokenizer_digest) == 32

    def test_a_template_of_its_own_file_comes_first(self, folder: pathlib.Path) -> None:
        (folder / "chat_template.jinja").write_text("{{ mine }}")
        assert Checkpoint.open(folder).chat_template == "{{ mine }}"

    def test_several_templates_and_none(self, folder: pathlib.Path) -> None:
        templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        change(folder, "tokenizer_config.json", chat_template=templates)
        assert Checkpoint.open(folder).chat_template == "d"
        change(folder, "tokenizer_config.json", chat_template=None)
        assert Checkpoint.open(folder).chat_template is None
        assert Checkpoint.open(folder).chat_template_digest == ""

    def test_a_missing_tokenizer_is_named(self, folder: pathlib.Path) -> None:
        (folder / "tokenizer.json").unlink()
        with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
            _ = Checkpoint.open(folder).tokenizer_digest


def test_what_is_neither_folder_nor_model_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="no-such-owner/no-such-model is neither a folder here nor a model"):
        Checkpoint.open("no-such-owner/no-such-model")
