"""The command: a table, JSON that says what was run, and errors of one line."""

import json
import pathlib

import pytest
from click.testing import CliRunner

from cluster.commands.simulate import command
from headrace.errors import ConfigError

SAMPLE = pathlib.Path(__file__).parents[4] / "examples" / "azure_sample.csv"


def test_a_trace_is_replayed_with_every_policy_asked_for(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out.json"
    words = (
        f"--trace {SAMPLE} --requests 20 --rate 20 --prefill 1 --decode 1 --policy ours --policy random --json {out}"
    )
    result = CliRunner().invoke(command, words.split(), catch_exceptions=False)
    assert result.exit_code == 0
    assert "azure_sample.csv: 20 requests, 20.00 a second" in result.output
    found = json.loads(out.read_text())
    assert [run["policy"] for run in found["runs"]] == ["ours", "random"]
    assert found["fleet"]["card"]["name"] == "h100"
    for run in found["runs"]:
        assert run["outcomes"] == {"finished": 20}
        assert set(run["workers"]) == {"prefill-0", "decode-0"}
        assert sum(run["workers"]["prefill-0"]["prefill_tokens"]) > 1000


def test_made_traffic_can_be_bent() -> None:
    words = "--shape shared-block --requests 8 --rate 4 --bursts --day --prefill 0 --decode 0 --unified 2"
    result = CliRunner().invoke(command, words.split(), catch_exceptions=False)
    assert result.exit_code == 0
    assert "ours" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace nowhere.csv", "nowhere.csv"),
        ("--shape round", "shape: must be one of"),
        ("--shape smooth --card b200", "no card 'b200'"),
        ("--shape smooth --policy best", "policy: must be one of"),
        ("--shape smooth --decode 0", "decode: must be at least 1"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(command, words.split(), catch_exceptions=False)


def test_a_trace_or_a_shape_must_be_given() -> None:
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 2
    assert "either --trace or --shape" in result.output
