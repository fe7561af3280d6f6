"""What a router is started with."""

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.values import Role
from router.__main__ import main, unready
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


def core(**workers: tuple[Role, str]) -> Any:
    """A core that these workers are connected to, each with its role and why it is not well."""
    views = [SimpleNamespace(role=role, draining=bool(why)) for role, why in workers.values()]
    live = [
        SimpleNamespace(info=SimpleNamespace(worker_id=name), report=SimpleNamespace(unhealthy_reason=why))
        for name, (_, why) in workers.items()
    ]
    return SimpleNamespace(
        requests=SimpleNamespace(view=lambda: SimpleNamespace(workers=views)),
        sessions=SimpleNamespace(live=lambda: live),
    )


def test_case_59_a_router_is_unready_where_nobody_decodes_and_names_who_is_not_well() -> None:
    prefill, stuck = (Role.PREFILL, ""), (Role.DECODE, "no step finished for 9.0 s though there is work (limit 5 s)")
    assert unready(core(d0=(Role.UNIFIED, ""), d1=stuck)) is None
    assert unready(core(p0=prefill)) == "no worker that decodes is connected (1 connected in all)"
    reason = unready(core(p0=prefill, d0=stuck))
    assert reason == f"no worker that decodes takes requests (2 connected in all; d0: {stuck[1]})"
