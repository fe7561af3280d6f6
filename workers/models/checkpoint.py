"""A checkpoint folder, opened: what the model is and who it is, before any weight is read. No torch.

CheckpointError names the file and the field that is missing or odd.
"""

import pathlib
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from headrace.errors import CheckpointError
from workers.models.config import ModelConfig
from workers.models.fields import Fields
from workers.models.read import read_config

DIGEST_BYTES = 16
SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "revision")


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


def _from_hub(name: str) -> pathlib.Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{name} is neither a folder here nor a model the hub can give: {why}") from error
