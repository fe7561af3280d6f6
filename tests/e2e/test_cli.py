"""The command as an operator uses it, each run a process of its own: up in the background, asked, ended, gone."""

import json
import os
import pathlib
import signal
from contextlib import suppress
from typing import Any

import httpx
import pytest
import yaml

from cluster.session import SessionFolder, wait_unlocked
from tests.e2e.operating import Operator
from tests.tiny import make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.timeout(300)]


def find_child(pid: int, name: str) -> int:
    """A descendant process with this in its command line."""
    waiting = [pid]
    while waiting:
        for children in pathlib.Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):  # it ended while we looked
                for child in map(int, children.read_text().split()):
                    if name in pathlib.Path(f"/proc/{child}/cmdline").read_text():
                        return child
                    waiting.append(child)
    raise AssertionError(f"no {name} under {pid}")


@pytest.fixture
def operator(tmp_path: pathlib.Path) -> Operator:
    return Operator(tmp_path / "state")


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    make_checkpoint(tmp_path / "tiny", "llama")
    path = tmp_path / "headrace.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "cli",
                "model": "tiny",
                "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
                "engine": {"block_size": 8, "kv_bytes": 2**21, "max_num_seqs": 4},
                "handoff": {"local_prefill_max_tokens": 0},
                "router": {"http_port": 0, "grpc_port": 0},
                "redis": {"embedded_port": 0},
            }
        )
    )
    return path


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_case_65_without_rays_head_serving_goes_on_until_the_cluster_is_ended_in_order(
    operator: Operator, config: pathlib.Path
) -> None:
    """Ray ends whatever it started, and whoever joined it, a minute later: by then nothing is left to lose."""
    up = operator.starts("up", str(config), "--json")
    assert up.stdout is not None
    assert up.stderr is not None
    with up:
        while "session" not in (said := json.loads(up.stdout.readline())):
            pass
        os.kill(find_child(up.pid, "gcs_server"), signal.SIGKILL)
        while "does not answer; what serves goes on" not in up.stdout.readline():
            assert up.poll() is None
        body = {"model": "tiny", "prompt": "hello there", "max_tokens": 2, "ignore_eos": True}
        for _ in range(5):
            answer = httpx.post(f"{said['session']['http_url']}/v1/completions", json=body, timeout=20, trust_env=False)
            assert answer.json()["usage"]["completion_tokens"] == 2
        assert up.wait(90) == 1
        assert "Ray's head" in up.stderr.read()
    assert not [line for line in operator.processes() if "router" in line or "valkey" in line or "Engine" in line]


def test_up_status_generate_chat_down(operator: Operator, config: pathlib.Path) -> None:
    events = lines(operator.said("up", str(config), "--detach", "--json"))
    done = [event["name"] for event in events if event.get("done")]
    assert done == ["model", "redis", "console", "ray", "workers", "router"]
    session = events[-1]["session"]
    assert session["ready"]
    assert operator.said("console") == f"{session['console_url']}\n"
    with httpx.stream("GET", f"{session['console_url']}stream", trust_env=False) as stream:
        scenes = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith('data: {"at"'))
        pools = ([(pool["name"], pool["ready"]) for pool in scene["pools"]] for scene in scenes)
        assert next(ready for ready in pools if ready == [("decode", 1), ("prefill", 1)])

    again = operator.run("up", str(config))
    assert again.returncode == 1
    assert "a cluster named 'cli' runs already" in again.stderr

    answer = json.loads(operator.said("generate", "hello there", "--max-tokens", "4", "--temperature", "0", "--json"))
    assert answer["completion_tokens"] <= 4
    assert (answer["path"]["prefill_worker"], answer["path"]["decode_worker"]) == ("prefill-0", "decode-0")

    said = operator.said("chat", "--max-tokens", "4", "--temperature", "0", stdin="hello\nand again\n\n")
    assert said.count("TTFT") == 2
    assert "prefilled by prefill-0" in said

    turns = lines(
        operator.said("chat", "--json", "--max-tokens", "4", "--temperature", "0", stdin="hello\nand again\n\n")
    )
    assert [turn["path"]["decode_worker"] for turn in turns] == ["decode-0", "decode-0"]

    refused = operator.run("generate", "hello", "--model", "other")
    assert refused.returncode == 1
    assert "model must be one of tiny, got 'other'" in refused.stderr

    snapshot = json.loads(operator.said("status", "--json"))
    assert {worker["record"]["worker_id"]: worker["report"]["role"] for worker in snapshot["workers"]} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }
    assert sum(worker["report"]["num_handoffs_in"] for worker in snapshot["workers"]) >= 2
    table = operator.said("status")
    assert "decode-0.1" in table
    assert "decode-0 ← prefill-0  gloo" in table

    assert json.loads(operator.said("down", "--json")) == {"cluster": "cli", "how": "ended"}
    assert operator.left() == []
    assert operator.run("down").returncode == 1


def test_down_cleans_up_after_an_up_that_was_killed(operator: Operator, config: pathlib.Path) -> None:
    session = lines(operator.said("up", str(config), "--detach", "--json"))[-1]["session"]
    os.kill(session["pid"], signal.SIGKILL)
    folder = SessionFolder("cli", operator.state)
    assert wait_unlocked(folder.lock("up"), 30.0)
    said = operator.said("down")
    assert "ended what it left: router, redis" in said
    assert [process for process in operator.processes() if "router" in process or "valkey" in process] == []


@pytest.mark.parametrize(
    ("options", "during", "number"),
    [((), "ray", signal.SIGTERM), (("--detach",), "workers", signal.SIGINT)],
)
def test_an_interrupted_start_ends_all_that_it_started_and_says_so(
    operator: Operator, config: pathlib.Path, options: tuple[str, ...], during: str, number: signal.Signals
) -> None:
    with operator.starts("up", str(config), "--json", *options) as up:
        assert up.stdout is not None
        while json.loads(up.stdout.readline())["name"] != during:
            pass
        up.send_signal(number)
        _, said = up.communicate(timeout=120)
    assert up.returncode == 128 + number
    assert said == f"headrace: interrupted by {number.name}\n"
    assert operator.left() == []
    assert "no cluster runs here" in operator.run("status").stderr
