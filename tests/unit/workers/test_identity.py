"""What a worker says it is, by which others know whether its KV is theirs to read."""

import pathlib
from dataclasses import replace

import pytest

from headrace.config import EngineConfig
from headrace.values import Role
from tests.tiny import make_checkpoint
from workers.identity import Identity
from workers.spec import WorkerSpec

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> WorkerSpec:
    folder = make_checkpoint(tmp_path_factory.mktemp("a") / "m")
    return WorkerSpec("w", 1, Role.UNIFIED, str(folder), engine=EngineConfig(dtype="float32", block_size=16))


def difference(one: WorkerSpec, other: WorkerSpec) -> str | None:
    return Identity.of(one).compatibility.first_difference(Identity.of(other).compatibility)


def test_case_61_other_weights_of_the_same_shapes_and_name_are_another_revision(
    spec: WorkerSpec, tmp_path: pathlib.Path
) -> None:
    same, trained = make_checkpoint(tmp_path / "same" / "m"), make_checkpoint(tmp_path / "trained" / "m", seed=1)
    assert difference(spec, replace(spec, model_path=str(same))) is None
    assert difference(spec, replace(spec, model_path=str(trained))) == "revision"


def test_case_61_kv_of_another_dtype_or_block_size_is_told_apart(spec: WorkerSpec) -> None:
    its = Identity.of(spec).compatibility
    assert (its.dtype, its.kv_dtype, its.block_size) == ("float32", "float32", 16)
    halved = Identity.of(replace(spec, engine=EngineConfig(dtype="bfloat16", block_size=16))).compatibility
    assert its.kv_format != halved.kv_format
    assert its.first_difference(replace(halved, dtype=its.dtype)) == "kv_dtype"
    assert difference(spec, replace(spec, engine=EngineConfig(dtype="float32", block_size=32))) == "block_size"
