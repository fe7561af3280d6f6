"""`headrace up` where Ray does not do what it should: it ends when it is told to, with everything that it started."""

import json
import os
import pathlib
import signal

import pytest
import yaml

from tests.e2e.operating import Operator
from tests.ray_heads import listening
from tests.tiny import make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.timeout(300)]

END_SECONDS = 40.0  # Ray itself gives a head that is gone a minute, and one that never answers more than four


@pytest.fixture
def operator(tmp_path: pathlib.Path) -> Operator:
    return Operator(tmp_path / "state")


def write(tmp_path: pathlib.Path, **sections: object) -> str:
    make_checkpoint(tmp_path / "tiny", "llama")
    path = tmp_path / "headrace.yaml"
    settings = {
        "name": "launch",
        "model": "tiny",
        "pools": {"all": {"role": "unified"}},
        "engine": {"block_size": 8, "kv_bytes": 2**21, "max_num_seqs": 4},
        "router": {"http_port": 0, "grpc_port": 0},
        "redis": {"embedded_port": 0},
    }
    path.write_text(yaml.safe_dump({**settings, **sections}))
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_up_that_waits_for_a_head_which_never_answers(
    operator: Operator, tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    with listening() as (address, head):
        path = write(tmp_path, ray={"address": address})
        with operator.starts("up", path) as up:
            assert head.asked.wait(60)
            up.send_signal(number)
            _, said = up.communicate(timeout=END_SECONDS)
    assert up.returncode == 128 + number
    assert said.endswith(f"headrace: interrupted by {number.name}\n")
    assert operator.left() == []


def test_a_signal_to_all_processes_at_once_ends_them_too(operator: Operator, tmp_path: pathlib.Path) -> None:
    """As systemd sends it: Ray's head ends before anybody could ask it for an orderly end of the workers."""
    with operator.starts("up", write(tmp_path), "--json", in_own_group=True) as up:
        assert up.stdout is not None
        while "session" not in json.loads(up.stdout.readline()):
            pass
        os.killpg(up.pid, signal.SIGTERM)
        up.communicate(timeout=END_SECONDS)
    assert up.returncode == 0
    assert operator.left() == []
