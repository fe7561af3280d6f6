"""What a router is started with."""

import pathlib

import pytest

from headrace.errors import ConfigError
from router.__main__ import main
from router.keyring import read_keys


def test_keys_are_a_files_lines(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two \n", encoding="utf-8")
    assert read_keys(file, "--api-keys-file") == ("one", "two")


@pytest.mark.parametrize(("content", "why"), [(None, "cannot read"), (b"\n \n", "holds no key"), (b"\xff", "cannot")])
def test_a_file_of_keys_that_has_none_never_opens_the_door(
    tmp_path: pathlib.Path, content: bytes | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = tmp_path / "keys", tmp_path / "headrace.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        read_keys(file, "--api-keys-file")
    config.write_text(f"model: {tmp_path}\npools: {{all: {{role: unified}}}}\n", encoding="utf-8")
    assert main([str(config), "--api-keys-file", str(file)]) == 1
    assert "--api-keys-file" in capsys.readouterr().err
