"""headrace.metrics and what processes measure are the same names, and labels that are promised bounded are."""

import pathlib
import re

import pytest

from headrace import metrics
from headrace.metrics import Stage, span_of
from tests.measured import measured, names

MEASURED = measured()
SAID = dict(
    re.findall(r"^(\w+): Final = \"headrace_\w+\"  # (.+)$", pathlib.Path(metrics.__file__).read_text("utf-8"), re.M)
)
# Who answers a query knows these already: his scrape adds them.
CLOSED = {
    *(
        "worker",
        "role",
        "model",
        "stage",
        "outcome",
        "reason",
        "why",
        "tenant",
        "service_class",
        "quota",
        "how",
        "kind",
    ),
    *("state", "side", "tier", "pool", "phase", "gpu", "revision"),
}


@pytest.mark.parametrize("name", names().values())
def test_every_name_is_measured_by_somebody(name: str) -> None:
    assert {name, f"{name}_bucket"} & MEASURED.keys()


def test_every_series_has_its_name_there() -> None:
    known = {name.removesuffix("_total") for name in names().values()}
    assert {re.sub("_(bucket|sum|count|created|total)$", "", name) for name in MEASURED} <= known


@pytest.mark.parametrize("constant", names())
def test_the_labels_are_those_that_are_said_and_none_is_a_clients(constant: str) -> None:
    name = names()[constant]
    labels = MEASURED.get(name, set()) | MEASURED.get(f"{name}_bucket", set()) - {"le"}
    _, _, said = SAID[constant].partition(";")
    assert labels == {word.strip() for word in said.split(",") if word.strip() in CLOSED}
    assert labels <= CLOSED


def test_spans_have_names_of_their_own() -> None:
    spans = [span_of(stage) for stage in Stage] + [metrics.SPAN_REQUEST, metrics.SPAN_DECODE]
    assert len(set(spans)) == len(spans)
