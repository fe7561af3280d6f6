"""What this router serves: a name for clients, and the model's words and limits behind it."""

import json
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from headrace.config import ClusterConfig
from headrace.errors import CheckpointError, ModelNotFound
from router.text.vocabulary import Text

WORD_FILES = ("*.json", "*.jinja", "revision")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as clients see it. `vocab_size` is the model's own, which may be padded beyond the tokenizer's;
    `tokenizer_digest` is that of workers' compatibility."""

    name: str
    revision: str
    max_context_tokens: int
    vocab_size: int
    text: Text
    tokenizer_digest: str = ""


class Models:
    """The served models by name. Immutable."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = dict(models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def get(self, name: str) -> ServedModel:
        """ModelNotFound when it is not served."""
        model = self._models.get(name)
        if model is None:
            shown = name if len(name) <= 80 else name[:77] + "..."
            raise ModelNotFound(
                f"model must be one of {', '.join(self._models)}, got {shown!r}", field="model", value=shown
            )
        return model

    def label(self, name: str) -> str:
        """The name as a metric label: what a client chose never becomes one."""
        return name if name in self._models else "unknown"


def load_models(config: ClusterConfig) -> Models:
    """The cluster's one model. CheckpointError when its folder lacks what a router needs."""
    folder = pathlib.Path(config.model)
    if not folder.is_dir():
        folder = _from_hub(config.model)
    shape = _shape(folder / "config.json")
    limit = config.engine.max_context_tokens or shape["max_position_embeddings"]
    revision = folder / "revision"
    model = ServedModel(
        name=config.model_name,
        revision=revision.read_text(encoding="utf-8").strip() if revision.is_file() else folder.name,
        max_context_tokens=min(limit, shape["max_position_embeddings"]),
        vocab_size=shape["vocab_size"],
        text=Text.load(folder),
        tokenizer_digest=blake2b((folder / "tokenizer.json").read_bytes(), digest_size=16).hexdigest(),
    )
    return Models({model.name: model})


def _shape(file: pathlib.Path) -> dict[str, int]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}", file=file) from error
    shape = {}
    for name in ("max_position_embeddings", "vocab_size"):
        value = config.get(name) if isinstance(config, dict) else None
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{file}: {name} must be a positive integer, got {value!r}", file=file, field=name)
        shape[name] = value
    return shape


def _from_hub(name: str) -> pathlib.Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=list(WORD_FILES)))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise CheckpointError(f"{name} is neither a folder nor reachable on the hub: {error}", model=name) from error
