"""Kernels compiled without a GPU: all that the engine launches, each once, and found where they are shipped."""

import ast
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.torch

NOT_THE_ENGINES = {"kernels.pull_blocks._count_stale"}  # benchmarks' own


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "tests.kernels_ahead", str(tmp_path_factory.mktemp("ahead"))]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def launched_in(path: pathlib.Path) -> set[str]:
    """The kernels that a file launches: NAME[grid](…)."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    grids = [call.func.value for call in calls if isinstance(call.func, ast.Subscript)]
    return {f"kernels.{path.stem}.{name.id}" for name in grids if isinstance(name, ast.Name) and name.id[0] == "_"}


def test_all_kernels_that_are_launched_are_compiled_ahead(said: dict[str, Any]) -> None:
    """One that is missing here has a launch that workers.ranks.ahead does not come to."""
    every = set().union(*(launched_in(path) for path in (ROOT / "kernels").glob("*.py")))
    assert set(said["listed"]) == every - NOT_THE_ENGINES


def test_what_was_compiled_is_found_by_the_same_launch(said: dict[str, Any]) -> None:
    assert said["twice"] == [[False], [True]]


def test_shipped_kernels_are_read_where_they_lie_and_others_compile_beside_them(said: dict[str, Any]) -> None:
    assert said["shipped"] == [True], "the folder was moved: its own paths are of nowhere"
    assert said["not shipped"] == [[False], [True]]
    assert said["written"] == []
