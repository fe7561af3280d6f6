import json
import pathlib
import sys

import pytest

from cluster.planning import foreseen
from headrace.deployments import Deployment
from headrace.values import Role
from loadtests.judged import Point, verdicts
from router.decisions.tenants import Targets


def test_a_deployment_is_the_fleet_that_its_name_says() -> None:
    known = {"tight": Targets(1.0, 0.012)}
    fleet = foreseen.fleet_of(Deployment.parse("1P3D+tight/256:2048"), "h200", known)
    assert (fleet.prefill, fleet.decode, fleet.unified, fleet.router.targets) == (1, 3, 0, known["tight"])
    assert [fleet.machine(role).scheduler.max_step_tokens for role in (Role.PREFILL, Role.DECODE)] == [2048, 256]
    assert [fleet.info("w", role).capacity.max_step_tokens for role in (Role.PREFILL, Role.DECODE)] == [2048, 256]
    pool = foreseen.fleet_of(Deployment.parse("2U:512"), "h200", known)
    assert (pool.num_workers, pool.unified, pool.step_tokens(Role.UNIFIED), bool(pool.router.targets)) == (
        2,
        2,
        512,
        False,
    )


def test_what_is_foreseen_is_judged_as_what_was_measured(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, state = tmp_path / "short.csv", tmp_path / "runs.jsonl"
    rows = "".join(f"2023-11-16 18:00:{n:02d}.0000000,{200 + 10 * n},5\n" for n in range(12))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows, encoding="utf-8")
    asked = ["--deployments", "1P1D+tight/256:2048", "2U:256", "--targets", "tight=1,0.012", "--rates", "4"]
    asked += ["--run-seconds", "3", "--state", str(state)]
    monkeypatch.setattr(sys, "argv", ["foreseen", "--traces", f"short={trace}", *asked])
    foreseen.main()
    assert "short 2U:256 at 4/s" in capsys.readouterr().out
    points = [Point.from_json(json.loads(line)) for line in state.read_text(encoding="utf-8").splitlines()]
    assert [(point.deployment, point.num_gpus, len(point.answers)) for point in points] == [
        ("1P1D+tight/256", 2, 9),
        ("2U", 2, 9),
    ]
    verdict = next(each for each in verdicts(points) if each.slo == "long")
    assert verdict.split == pytest.approx(verdict.aggregated)
    assert verdict.split > 1
