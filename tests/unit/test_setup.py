"""What `make setup` says of the torch that it found."""

import pathlib
import runpy

import pytest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "torch_build.py"


@pytest.mark.parametrize("cuda", [None, "12.8"])
def test_which_torch_is_installed_is_read_without_importing_it(cuda: str | None, tmp_path: pathlib.Path) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: str | None = {cuda!r}\n")
    assert runpy.run_path(str(TOOL))["cuda_of"](tmp_path / "version.py") == ("2.13.0", cuda)
