"""`headrace demo`: the promise that a newcomer sees first, kept by the real model."""

import pathlib

import pytest

from cluster.commands.demo import EXPECTED
from tests.e2e.operating import Operator

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.torch, pytest.mark.timeout(300)]


def test_the_demo_answers_shows_the_way_and_leaves_nothing(tmp_path: pathlib.Path, smollm2: pathlib.Path) -> None:
    operator = Operator(tmp_path / "state")
    said = operator.said("demo", "--model", str(smollm2))
    assert EXPECTED in said
    assert "on prefill-0, 0 of 37 prompt tokens cached" in said
    assert "on prefill-0, 32 of" in said, "the second turn finds the first one's block"
    assert "2 blocks, 2.81 MiB moved" in said
    assert operator.left() == []
