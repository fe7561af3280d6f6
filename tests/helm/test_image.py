"""The Dockerfile, as far as it can be read without building it."""

import re
import subprocess
import tomllib

import yaml

from tests.conftest import ROOT
from tests.helm.conftest import CHART, tool

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_all_that_the_wheel_is_made_of_is_copied_and_nothing_that_is_not_there() -> None:
    copied = set(re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE))
    sources = {word for line in copied for word in line.split()}
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {package.partition("/")[0] for package in packages} <= sources
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{source}" for source in sources} <= set(ignored)


def test_the_chart_names_the_versions_that_are_inside() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == project["version"]
    ray = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["ray"]["version"]
    assert f"ray=={ray}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_what_is_installed_is_compiled_where_nothing_can_be_written_later() -> None:
    """Without, Ray's own processes took two to four times the CPU to start, and it gives a head's agent 15 s."""
    assert "PYTHONDONTWRITEBYTECODE=1" in DOCKERFILE
    assert "UV_COMPILE_BYTECODE=1" in DOCKERFILE


def test_it_runs_as_the_user_that_the_chart_names() -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE)[0] == "10001:10001"
    assert "--uid 10001" in DOCKERFILE
