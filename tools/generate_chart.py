"""Writes what the chart can be told from elsewhere: values.schema.json from helm/values.schema.yaml and the sections of
headrace.config, README.md from values.yaml, dashboards from helm/dashboards.yaml. With --check, says which of them is out
of date, and writes nothing."""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import yaml
from prometheus_client import REGISTRY

import router.__main__  # noqa: F401  # with all of a router's metrics
from headrace.config import ClusterConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "headrace"
SOURCE = ROOT / "helm" / "values.schema.yaml"
DASHBOARDS = ROOT / "helm" / "dashboards.yaml"

Schema = dict[str, Any]


def schema() -> str:
    """The schema as JSON, every object in it closed."""
    source: Schema = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    pod = source["$defs"].pop("pod")["properties"]
    sections = ClusterConfig.model_json_schema()["$defs"]
    closed = _closed(source, pod, sections)
    return json.dumps(closed, indent=1) + "\n"


def _closed(node: Any, pod: Schema, sections: Schema) -> Any:
    """The node with its sections put in. An object that lists its properties has no others; what stands under `if`,
    `then`, `else`, `anyOf` and `allOf` only adds to one that is closed already."""
    if isinstance(node, list):
        return [_closed(item, pod, sections) for item in node]
    if not isinstance(node, dict):
        return node
    if "buckets" in node:
        return {"enum": bounds(node["buckets"])}
    node = dict(node)
    if name := node.pop("section", None):
        hidden = set(node.pop("without", ()))
        fields = {key: value for key, value in sections[name]["properties"].items() if key not in hidden}
        node["properties"] = {**_inlined(fields, sections), **node.get("properties", {})}
    if node.pop("pod", False):
        node["properties"] = {**node["properties"], **pod}
    conditions = {key: node.pop(key) for key in ("if", "then", "else", "anyOf", "allOf") if key in node}
    known = {
        key: {name: _closed(value, pod, sections) for name, value in part.items()}
        if key in ("properties", "patternProperties", "$defs")
        else _closed(part, pod, sections)
        for key, part in node.items()
    }
    if "properties" in known or "patternProperties" in known:
        known = {"type": "object", "additionalProperties": False, **known}
    return {**known, **conditions}


def _inlined(node: Any, sections: Schema) -> Any:
    """Without references to other sections, titles and defaults: what a section allows, and nothing that it says."""
    if isinstance(node, list):
        return [_inlined(item, sections) for item in node]
    if not isinstance(node, dict):
        return node
    if reference := node.get("$ref"):
        return _inlined(sections[reference.rpartition("/")[2]], sections)
    return {
        key: {name: _inlined(value, sections) for name, value in part.items()}
        if key == "properties"
        else _inlined(part, sections)
        for key, part in node.items()
        if key not in ("title", "default", "description")
    }


def bounds(metric: str) -> list[float]:
    """The bucket bounds of a router's histogram: an objective between two of them could not be told."""
    histogram: Any = REGISTRY._names_to_collectors[metric]
    return [bound for bound in histogram._upper_bounds if bound != float("inf")]


def readme() -> str:
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    lines = [f"| `{key}` | {_code(default)} | {what} |" for key, default, what in rows(values)]
    return "\n".join((HEAD, *lines)) + "\n"


HEAD = """# The Headrace chart

Generated from values.yaml by `make helm-docs`. How to install, upgrade, drain and scale, and what each topology allows:
[docs/operations.md](../../docs/operations.md). Examples: [examples/helm](../../examples/helm).

| value | default | what |
|---|---|---|"""


def rows(text: str) -> Iterator[tuple[str, Any, str]]:
    """(key, default, what) of each value with a `# --` comment, and of each leaf without one that is under no such value
    with a whole object."""
    values = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment, inside = "", -1
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if stripped.startswith("# --"):
            comment = stripped.removeprefix("# --").strip()
        if not stripped or stripped.startswith(("#", "-")):
            continue
        if inside >= 0 and indent > inside:
            continue
        inside = -1
        while path and path[-1][0] >= indent:
            path.pop()
        path.append((indent, stripped.partition(":")[0]))
        default = values
        for _, key in path:
            default = default[key]
        leaf = not isinstance(default, dict) or not default or path[-1][1] in ("resources",)
        if comment or leaf:
            yield ".".join(key for _, key in path), default, comment
            inside = indent
        comment = ""


def _code(value: Any) -> str:
    return f"`{json.dumps(value)}`" if value not in ("", None) else ""


def dashboard(name: str) -> str:
    """One of helm/dashboards.yaml as Grafana takes it: panels two in a row, for the release that is chosen above."""
    source = yaml.safe_load(DASHBOARDS.read_text(encoding="utf-8"))[name]
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": at + 1,
            "type": "timeseries",
            "title": panel["title"],
            "datasource": datasource,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (at % 2), "y": 8 * (at // 2)},
            "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0, **_stacking(panel)}, "overrides": []},
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
            "targets": [
                {"refId": chr(ord("A") + number), "legendFormat": legend, "expr": _query(query)}
                for number, (legend, query) in enumerate(panel["draw"].items())
            ],
        }
        for at, panel in enumerate(source["panels"])
    ]
    chosen = "label_values(headrace_workers_ready, release)"
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {"name": "release", "type": "query", "datasource": datasource, "query": chosen, "refresh": 2},
    ]
    whole = {
        "uid": f"headrace-{name}",
        "title": source["title"],
        "tags": ["headrace"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "links": [
            {"type": "dashboards", "tags": ["headrace"], "title": "Headrace", "asDropdown": True, "includeVars": True}
        ],
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _stacking(panel: dict[str, Any]) -> dict[str, Any]:
    return {"custom": {"stacking": {"mode": "normal"}, "fillOpacity": 40}} if panel.get("stacked") else {}


def described() -> str:
    """The dashboards as a page: what each panel draws, and in which unit."""
    parts = [DESCRIBED]
    for name, board in yaml.safe_load(DASHBOARDS.read_text(encoding="utf-8")).items():
        parts.append(
            f"## {board['title']}\n\n`files/dashboards/{name}.json`\n\n| panel | unit | draws |\n|---|---|---|"
        )
        for panel in board["panels"]:
            lines = (f"{legend.strip()}: `{_cell(query)}`" for legend, query in panel["draw"].items())
            stacked = ", stacked" if panel.get("stacked") else ""
            parts.append(f"| {_cell(panel['title'])} | {panel['unit']}{stacked} | {'<br>'.join(map(_cell, lines))} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


DESCRIBED = """# Dashboards

Generated from `helm/dashboards.yaml` by `make helm-docs`. The chart puts them where Grafana's sidecar finds them
(`monitoring.dashboards`). SEL is the release that is chosen above, RATE Grafana's own interval.
"""


def _cell(text: str) -> str:
    return text.replace("\\|", "|").replace("|", "\\|")


def _query(short: str) -> str:
    return short.replace("SEL", 'release="$release"').replace("[RATE]", "[$__rate_interval]")


def outputs() -> dict[pathlib.Path, Callable[[], str]]:
    names = yaml.safe_load(DASHBOARDS.read_text(encoding="utf-8"))
    folder = CHART / "files" / "dashboards"
    return {
        CHART / "values.schema.json": schema,
        CHART / "README.md": readme,
        ROOT / "docs" / "images" / "dashboards.md": described,
        **{folder / f"{name}.json": partial(dashboard, name) for name in names},
    }


def main(arguments: list[str]) -> int:
    made = {path: make() for path, make in outputs().items()}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run `make helm-docs`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(made[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
