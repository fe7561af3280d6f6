import pathlib
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.config import EngineConfig, HandoffConfig
from headrace.values import Role
from workers.__main__ import main, spec_of

pytestmark = pytest.mark.torch


def parsed(*options: str) -> dict[str, Any]:
    return main.make_context("workers", ["--model", "m", *options]).params


def test_every_field_of_the_configuration_is_an_option() -> None:
    assert EngineConfig.model_fields.keys() | HandoffConfig.model_fields.keys() <= parsed().keys()


def test_without_options_a_worker_is_what_the_configuration_says() -> None:
    spec = spec_of(parsed())
    assert spec.engine == EngineConfig()
    assert spec.handoff == HandoffConfig()
    assert spec.role is Role.UNIFIED
    assert spec.generation > 0


def test_options_reach_the_spec() -> None:
    options = parsed("--role", "decode", "--tp", "2", "--num-blocks", "9", "--no-overlap", "--pin-seconds", "3")
    spec = spec_of(options)
    assert (spec.role, spec.layout.tp, spec.engine.num_blocks) == (Role.DECODE, 2, 9)
    assert (spec.engine.overlap, spec.handoff.pin_seconds) == (False, 3.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tp", "0"), "'--tp'"),
        (("--role", "cook"), "'--role'"),
        (("--block-size", "0"), "--block-size: Input should be greater than or equal to 1"),
        (("--pin-seconds", "-1"), "--pin-seconds: Input should be greater than 0"),
        (
            ("--otlp-endpoint", "collector:4317"),
            "must be grpc://HOST:PORT or http(s)://HOST:PORT, got 'collector:4317'",
        ),
        (("--bogus",), "--bogus"),
    ],
)
def test_a_wrong_option_is_named_and_ends_the_command(options: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["--model", "m", *options])
    assert result.exit_code == 2
    assert said in result.output


def test_a_model_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(main, ["--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "config.json" in result.output
