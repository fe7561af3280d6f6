"""The door to load tests: what it passes on is a plan that they take, and what it refuses never gets there."""

import json
import os
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.commands.bench import command
from headrace.goodput import Slo
from loadtests.open_loop.plan import Plan


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """(plan, environment) of each process that the door would become."""
    found: list[tuple[dict[str, Any], dict[str, str]]] = []

    def become(path: str, words: list[str], environment: dict[str, str]) -> None:
        assert words[1:3] == ["-m", "loadtests.open_loop"]
        found.append((json.loads(words[3]), environment))

    monkeypatch.setattr(os, "execve", become)
    return found


def test_every_option_is_a_key_that_a_plan_has(passed: list[tuple[dict[str, Any], dict[str, str]]]) -> None:
    words = (
        "--url http://h:1 --model m --trace t.jsonl --bend day --rates 1,2 --seconds 9 --requests 7 --input-tokens 5 "
        "--output-tokens 6 --slo ttft=1,tpot=20ms --warmup 2 --timeout 30 --seed 4 --salt 8 --out o --api-key k"
    )
    ran = CliRunner().invoke(command, words.split())
    assert ran.exit_code == 0, ran.output
    ((given, environment),) = passed
    assert (given.pop("out"), given.pop("dry_run")) == ("o", False)
    assert Plan.of(given) == Plan(
        *("http", "http://h:1", "m", "t.jsonl"),
        bend="day",
        rates=(1.0, 2.0),
        seconds=9.0,
        requests=7,
        input_tokens=5,
        output_tokens=6,
        seed=4,
        salt=8,
        slo=Slo(1.0, 0.02),
        warmup=2.0,
        timeout=30.0,
    )
    assert environment["HEADRACE_API_KEY"] == "k"
    assert "k" not in given.values(), "a key on a command line is everybody's to read"


def test_what_is_not_said_is_left_to_the_plan(passed: list[tuple[dict[str, Any], dict[str, str]]]) -> None:
    assert CliRunner().invoke(command, ["--address", "h:2"]).exit_code == 0
    assert CliRunner().invoke(command, ["--dry-run", "--rate", "3", "--shape", "paced"]).exit_code == 0
    (plain, _), (dry, _) = passed
    assert Plan.of({name: value for name, value in dry.items() if name != "dry_run"}).rates == (3.0,)
    assert plain == {"edge": "grpc", "address": "h:2", "dry_run": False}
    assert dry == {"edge": "grpc", "address": "", "dry_run": True, "rates": [3.0], "shape": "paced"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rate 1 --rates 1,2", "give either --rate or --rates"),
        ("--address h:1 --url http://h", "give either --address or --url"),
        ("--trace a.csv --shape smooth", "give either --trace or --shape"),
        ("--rate 0", "0.0 is not in the range x>0"),
        ("--requests 0", "0 is not in the range x>=1"),
        ("--salt -1", "-1 is not in the range 0<=x<=1073741823"),
    ],
)
def test_what_cannot_be_is_refused_here(
    passed: list[tuple[dict[str, Any], dict[str, str]]], words: str, message: str
) -> None:
    ran = CliRunner().invoke(command, words.split())
    assert ran.exit_code == 2
    assert message in ran.output
    assert passed == []
