"""What is shipped of Triton's cache, where it is whole and where it is not."""

import json
import pathlib

import pytest

pytestmark = pytest.mark.torch

KEY, LIST = "KERNEL", "__grp__k.json"
FILES = ("k.json", "k.cubin")


@pytest.fixture
def shipped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """One kernel, whose list names the paths that its files had elsewhere."""
    monkeypatch.setenv("HEADRACE_KERNELS", str(tmp_path / "shipped"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    folder = tmp_path / "shipped" / KEY
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("{}")
    (folder / LIST).write_text(json.dumps({"child_paths": {name: f"/elsewhere/{name}" for name in FILES}}))
    return folder


def group() -> dict[str, str] | None:
    cache = pytest.importorskip("kernels.shipped", reason="triton is not installed").ShippedCache(KEY)
    found: dict[str, str] | None = cache.get_group("k.json")
    return found


def test_a_whole_kernel_is_found_where_it_lies(shipped: pathlib.Path) -> None:
    assert group() == {name: str(shipped / name) for name in FILES}


@pytest.mark.parametrize("broken", ["", "[]", '{"child_paths": {}}', '{"child_paths": {"k.js'])
def test_a_list_that_is_broken_ships_nothing(shipped: pathlib.Path, broken: str) -> None:
    (shipped / LIST).write_text(broken)
    assert group() is None


def test_a_kernel_that_lacks_a_file_is_compiled_instead(shipped: pathlib.Path) -> None:
    """Its metadata alone would count as a hit, and the kernel that is not there end the worker."""
    (shipped / "k.cubin").unlink()
    assert group() is None
    own = shipped.parent.parent / "own" / KEY
    for name in FILES:
        (own / name).write_text("{}")
    (own / LIST).write_text(json.dumps({"child_paths": {name: str(own / name) for name in FILES}}))
    assert group() == {name: str(own / name) for name in FILES}


def test_what_is_shipped_needs_no_folder_that_may_be_written(
    shipped: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A read-only root file system, and no volume: only what would have to be compiled fails."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert group() == {name: str(shipped / name) for name in FILES}
    monkeypatch.setenv("HEADRACE_KERNELS", str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match="file"):
        group()
