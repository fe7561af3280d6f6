"""Rules and dashboards against what is measured: names, labels, the arithmetic of alerts, and the way to the runbook."""

import json
import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

from headrace.config import EngineConfig
from tests.conftest import ROOT
from tests.helm.conftest import CHART, example, named, of_kind, rendered, tool
from tests.measured import measured

RELEASE = "llm.hr-headrace"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
UNITS = sorted((ROOT / "tests" / "helm" / "rules").glob("*.yaml"))
OURS = re.compile(r"\bheadrace_\w+")
# What the DCGM exporter shows by itself, then what it shows when it is told to.
DCGM = {
    *(f"DCGM_FI_DEV_{name}" for name in ("GPU_UTIL", "GPU_TEMP", "FB_USED", "FB_FREE", "XID_ERRORS")),
    *(f"DCGM_FI_DEV_{name}" for name in ("PCIE_REPLAY_COUNTER", "UNCORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_FAILURE")),
    *(f"DCGM_FI_DEV_NVLINK_{name}_ERROR_COUNT_TOTAL" for name in ("CRC_FLIT", "CRC_DATA", "RECOVERY")),
}
# What Prometheus and the chart's monitors add to every series.
GIVEN = {"release", "component", "instance", "job", "worker", "pool", "role", "le"}


MEASURED = measured()


def rule_groups(*settings: str) -> list[dict[str, Any]]:
    """As the chart renders them."""
    rules = of_kind(rendered(example("one-8-gpu-node"), *settings), "PrometheusRule")
    return [group for rule in rules for group in rule["spec"]["groups"]]


def queries() -> list[tuple[str, str]]:
    """(where, expression) of all rules and panels."""
    found = [(rule.get("alert") or rule["record"], rule["expr"]) for group in rule_groups() for rule in group["rules"]]
    for path in DASHBOARDS:
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        found += [
            (f"{path.stem}: {panel['title']}", target["expr"])
            for panel in panels
            for target in panel.get("targets", [])
        ]
    return found


RECORDED = {rule["record"] for group in rule_groups() for rule in group["rules"] if "record" in rule}
ALERTS = [rule for group in rule_groups() for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize(("where", "expression"), queries(), ids=lambda value: value if ":" in value else None)
def test_every_query_names_series_that_exist_by_labels_that_they_have(where: str, expression: str) -> None:
    names = set(OURS.findall(re.sub(r'"[^"]*"', '""', expression)))
    unknown = names - MEASURED.keys() - RECORDED
    assert not unknown, f"{where} asks for {unknown}"
    unknown = set(re.findall(r"DCGM_\w+", expression)) - DCGM
    assert not unknown, f"{where} asks for {unknown}"
    scoped = ("release", 'exported_namespace="llm"')
    assert any(word in expression for word in scoped), f"{where} asks all releases at once"
    for name, matchers in re.findall(r"(headrace_\w+)\{([^}]*)\}", expression):
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert used <= MEASURED.get(name, set()) | GIVEN, f"{where}: {name} has no {used}"


def test_a_query_of_a_series_that_is_gone_would_be_found() -> None:
    assert "headrace_kv_blocks" in MEASURED
    assert "headrace_ttft_seconds_bucket" in MEASURED
    assert "headrace_prefix_hits_total" not in MEASURED
    assert MEASURED["headrace_pool_workers"] == {"pool", "phase"}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_an_alert_leads_to_its_heading_in_the_runbook(alert: dict[str, Any]) -> None:
    heading = re.search(rf"^### {alert['alert']}$", RUNBOOK, re.MULTILINE)
    assert heading, f"docs/runbook.md has no heading {alert['alert']}"
    assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
    section = RUNBOOK[heading.end() :].partition("\n### ")[0]
    assert "```" in section or "`" in section, f"{alert['alert']} has no command"


def test_the_runbook_has_no_alert_that_is_gone() -> None:
    assert set(re.findall(r"^### (Headrace\w+)$", RUNBOOK, re.MULTILINE)) == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ((), 32768),  # the example's steps are of 8,192
        (("config.engine.max_step_tokens=512",), 16384),
        (("autoscaling.targets.backlogTokensPerWorker=9000",), 9000),
    ],
)
def test_case_two_steps_under_way_are_no_full_backlog(settings: tuple[str, ...], tokens: int) -> None:
    """16,384 were what a worker with steps of 8,192 computes while nothing waits: its pool counted as full."""
    rules = [rule for group in rule_groups(*settings) for rule in group["rules"]]
    pressure = next(rule["expr"] for rule in rules if rule.get("record") == "headrace_pool_pressure")
    assert f'/ {tokens}, "signal", "backlog"' in pressure
    assert 4 * EngineConfig().max_step_tokens <= 16384, "where the configuration says nothing"


def test_no_word_of_the_rules_is_left_open() -> None:
    assert "@" not in yaml.safe_dump(rule_groups())


@pytest.fixture(scope="session")
def rules_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": rule_groups()}), encoding="utf-8")
    return path


def test_promtool_takes_the_rules(rules_file: pathlib.Path) -> None:
    done = subprocess.run([tool("promtool"), "check", "rules", str(rules_file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_the_alerts_fire_when_they_should_and_no_sooner(unit: pathlib.Path, rules_file: pathlib.Path) -> None:
    here = rules_file.parent / unit.name
    here.write_text(unit.read_text(encoding="utf-8").replace("RELEASE", RELEASE), encoding="utf-8")
    done = subprocess.run([tool("promtool"), "test", "rules", str(here)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_a_unit_test() -> None:
    units = [test for path in UNITS for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]]
    fired = {check["alertname"] for test in units for check in test.get("alert_rule_test", []) if check["exp_alerts"]}
    assert fired == {alert["alert"] for alert in ALERTS}


def test_a_panel_says_what_panels_say() -> None:
    """A comma in a title without quotes makes two keys of it."""
    boards = yaml.safe_load((ROOT / "helm" / "dashboards.yaml").read_text(encoding="utf-8"))
    panels = [panel for board in boards.values() for panel in board["panels"]]
    assert {key for panel in panels for key in panel} == {"title", "unit", "draw", "stacked"}


def test_dashboards_are_in_the_chart_as_they_are_in_its_files() -> None:
    data = named(rendered(example("one-8-gpu-node")), "ConfigMap", "hr-headrace-dashboards")["data"]
    assert {json.loads(text)["uid"] for text in data.values()} == {f"headrace-{path.stem}" for path in DASHBOARDS}
