import json
import pathlib
import sys

import pytest

from cluster.planning import foreseen
from loadtests.judged import Point, verdicts


def test_what_is_foreseen_is_judged_as_what_was_measured(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, state = tmp_path / "short.csv", tmp_path / "runs.jsonl"
    rows = "".join(f"2023-11-16 18:00:{n:02d}.0000000,{200 + 10 * n},5\n" for n in range(12))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows, encoding="utf-8")
    asked = ["--deployments", "1P1D:2048", "2U:256", "--rates", "4", "--run-seconds", "3", "--state", str(state)]
    monkeypatch.setattr(sys, "argv", ["foreseen", "--traces", f"short={trace}", *asked])
    foreseen.main()
    assert "short 2U:256 at 4/s" in capsys.readouterr().out
    points = [Point.from_json(json.loads(line)) for line in state.read_text(encoding="utf-8").splitlines()]
    assert [(point.deployment, point.num_gpus, len(point.answers)) for point in points] == [
        ("1P1D", 2, 9),
        ("2U", 2, 9),
    ]
    verdict = next(each for each in verdicts(points) if each.slo == "long")
    assert verdict.split == pytest.approx(verdict.aggregated)
    assert verdict.split > 1
