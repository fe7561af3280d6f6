"""The one form of a benchmark's result."""

import argparse
import json
import pathlib

import pytest

from loadtests.report import Report, Row, add_arguments


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("value", "better", "must", "met"),
    [(1.0, "lower", 1.0, True), (1.1, "lower", 1.0, False), (1.0, "higher", 1.0, True), (0.9, "higher", 1.0, False)],
)
def test_a_row_says_whether_its_must_is_met(value: float, better: str, must: float, met: bool) -> None:
    assert Row("r", value, "ms", better, must=must).met is met


def test_the_last_line_and_the_file_are_one_object(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_COMMIT", "abc")
    monkeypatch.setattr("sys.argv", ["/some/where/loadtests/bench_engine.py", "--trace", "/else/where/a.csv", "--gate"])
    report = Report("engine", packages=("pytest", "no-such-package"), hardware="a CPU")
    report.add(Row("step_ms", 2.0, "ms", "lower", must=1.0, aim=0.5, samples=(1.0, 2.0, 3.0)))
    report.add(Row("free", 2.0, "ms", "lower"))
    out = tmp_path / "new" / "engine.json"

    assert report.close(parsed("--out", str(out))) == 0
    assert report.close(parsed("--gate")) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result.keys() == json.loads(out.read_text(encoding="utf-8")).keys()
    assert (result["bench"], result["commit"], result["hardware"]) == ("engine", "abc", "a CPU")
    assert result["command"] == "python -m loadtests.bench_engine --trace a.csv --gate"
    assert result["versions"]["no-such-package"] == "absent"
    assert result["calibration_ms"] > 0
    assert result["rows"][0] == {
        "name": "step_ms",
        "value": 2.0,
        "unit": "ms",
        "better": "lower",
        "must": 1.0,
        "aim": 0.5,
        "samples": [1.0, 2.0, 3.0],
        "peer": None,
        "peer_name": None,
        "ratio": None,
        "met": False,
    }
    assert result["rows"][1]["met"] is None
