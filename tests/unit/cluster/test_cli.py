"""The command's errors: one line that names what is wrong, a status that is not 0, and nothing started."""

import os
import pathlib
import shutil
import socket
import sys

import pytest
import yaml

from cluster.cli import COMMANDS, main
from cluster.session import Session, SessionFolder
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def state(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


class Ran:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


class Command:
    """Runs the entry point in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        captured = self._capsys.readouterr()
        assert isinstance(left.value.code, int)
        return Ran(left.value.code, captured.out, captured.err)

    def refused(self, *arguments: str) -> str:
        """The one line of an error."""
        ran = self(*arguments)
        lines = ran.err.strip().splitlines()
        assert ran.status == 1
        assert len(lines) == 1, ran.err
        assert lines[0].startswith("headrace: ")
        return lines[0]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def write(tmp_path: pathlib.Path, model: pathlib.Path | str, **sections: object) -> str:
    path = tmp_path / "headrace.yaml"
    ports = {"http_port": 0, "grpc_port": 0}
    pools = {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}
    path.write_text(yaml.safe_dump({"model": str(model), "pools": pools, "router": ports, **sections}))
    return str(path)


def nothing_started(state: pathlib.Path) -> bool:
    return not list(state.glob("*/session.json")) and not list(state.glob("*/*.log"))


def test_a_canary_with_other_words_is_refused_before_anything_starts(
    command: Command, tmp_path: pathlib.Path, checkpoint: pathlib.Path, state: pathlib.Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")
    canary = {"revision": "v2", "model": "other", "pools": {"new": {"role": "decode", "tp": 64}}}
    said = command.refused("up", write(tmp_path, checkpoint, canary=canary))
    assert "canary.model: must be one whose tokenizer is that of `model`" in said
    said = command.refused("up", write(tmp_path, checkpoint, name="another", canary={**canary, "model": None}))
    assert "canary.pools.new.tp" in said
    assert nothing_started(state)


def test_help_names_every_command_and_imports_none_of_them(command: Command) -> None:
    ran = command("--help")
    assert ran.status == 0
    for name in COMMANDS:
        assert f"  {name} " in ran.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(command: Command, name: str) -> None:
    ran = command(name, "--help")
    assert ran.status == 0
    assert ran.out.startswith("Usage: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("status", "--nonsense"), "headrace: No such option '--nonsense' (see `headrace status --help`)"),
        (("nonsense",), "headrace: No such command 'nonsense' (see `headrace --help`)"),
        (("generate",), "headrace: Missing argument 'PROMPT' (see `headrace generate --help`)"),
        (("up", "a", "b"), "headrace: Got unexpected extra argument (b) (see `headrace up --help`)"),
    ],
)
def test_a_wrong_command_line_is_one_line(command: Command, arguments: tuple[str, ...], message: str) -> None:
    ran = command(*arguments)
    assert (ran.status, ran.out, ran.err) == (2, "", message + "\n")


@pytest.mark.parametrize("arguments", [(), ("model",)])
def test_without_a_word_it_says_what_there_is(command: Command, arguments: tuple[str, ...]) -> None:
    ran = command(*arguments)
    assert (ran.status, ran.err) == (2, "")
    assert "Commands:" in ran.out


def test_a_place_that_cannot_be_used_is_one_line(
    command: Command, tmp_path: pathlib.Path, checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, checkpoint)
    monkeypatch.setenv("HEADRACE_STATE", f"{path}/state")
    for options in ((), ("--detach",)):
        assert command.refused("up", path, *options) == f"headrace: cannot use {path}/state/headrace: Not a directory"


def test_a_missing_configuration_is_named(command: Command, tmp_path: pathlib.Path) -> None:
    assert f"{tmp_path} is a folder: give a configuration file" in command.refused("up", str(tmp_path))
    assert "nowhere.yaml does not exist" in command.refused("up", "nowhere.yaml")
    assert "headrace.yaml does not exist" in command.refused("up")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pools: [", "is not valid YAML"),
        ("- a", "must be a mapping"),
        ("model: m\npools:\n  a: {role: decode, tp: 1, tp: 2}", "key 'tp' stands twice in one mapping"),
        ("model: m\npools: {a: {role: decode, replica: 1}}", "pools.a.replica"),
        ("model: m\npools: {a: {role: decode, tp: 0}}", "pools.a.tp"),
        ("model: m\npools: {a: {role: prefill}}", "at least one pool that decodes"),
        ("model: m\npools: {'a/b': {role: decode}}", "pools.a/b"),
        ("model: m\npools: {a: {role: decode}}\nray: {rank_resources: {GPU: 0}}", "ray.rank_resources.GPU"),
        (
            "model: m\npools: {a: {role: decode}}\nrouter: {tls: {cert_file: c, key_file: k}}",
            "c cannot be read: No such",
        ),
    ],
)
def test_a_broken_configuration_is_named(command: Command, tmp_path: pathlib.Path, content: str, message: str) -> None:
    (tmp_path / "headrace.yaml").write_text(content)
    assert message in command.refused("up")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "model: there is no folder {here}/nowhere; it must be a folder with config.json"),
        ("../some/where/deep", "where/deep; it must be a folder with config.json"),
        ("empty", "model: cannot read {here}/empty/config.json: No such file or directory; it must be a folder"),
        ("headrace.yaml", "model: there is no folder {here}/headrace.yaml; it must be"),
        ("nowhere.gguf", "model: nowhere.gguf does not exist; it must be a folder with config.json"),
    ],
)
def test_a_missing_checkpoint_is_named(
    command: Command, tmp_path: pathlib.Path, state: pathlib.Path, model: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert message.format(here=tmp_path) in command.refused("up", write(tmp_path, model))
    assert nothing_started(state)


def test_a_truncated_checkpoint_is_named(command: Command, tmp_path: pathlib.Path, state: pathlib.Path) -> None:
    broken = make_checkpoint(tmp_path / "broken", "llama")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    error = command.refused("up", write(tmp_path, broken))
    assert "model.safetensors is truncated" in error
    assert str(weights.stat().st_size) in error
    assert nothing_started(state)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"role": "decode", "tp": 3}, "pools.decode.tp: tp must divide 4 attention heads"),
        ({"role": "decode", "pp": 9}, "pools.decode.pp: pp must be at most the 3 layers, got 9"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_named(
    command: Command,
    tmp_path: pathlib.Path,
    state: pathlib.Path,
    checkpoint: pathlib.Path,
    pool: dict[str, object],
    message: str,
) -> None:
    assert message in command.refused("up", write(tmp_path, checkpoint, pools={"decode": pool}))
    assert nothing_started(state)


def test_more_context_than_the_model_has_is_named(
    command: Command, tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    error = command.refused("up", write(tmp_path, checkpoint, engine={"max_context_tokens": 257}))
    assert "engine.max_context_tokens: must be at most the model's 256, got 257" in error


@pytest.mark.parametrize("where", ["", "canary."])
def test_kv_memory_that_no_worker_could_serve_with_is_named_before_one_starts(
    command: Command, tmp_path: pathlib.Path, state: pathlib.Path, checkpoint: pathlib.Path, where: str
) -> None:
    """A worker of tp 4 holds each of the 2 KV heads twice."""
    small, pool = {"kv_bytes": 2**16, "block_size": 1024}, {"decode": {"role": "decode", "tp": 4}}
    canary = {"revision": "v2", "engine": small, "pools": {"new": pool["decode"]}}
    sections = {"canary": canary} if where else {"engine": small, "pools": {"a": {"role": "decode"}, **pool}}
    error = command.refused("up", write(tmp_path, checkpoint, **sections))
    assert f"{where}engine.kv_bytes: must be at least 3145728: two blocks of 1572864 bytes, got 65536" in error
    assert nothing_started(state)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"key_env": ["NO_SUCH_KEY"]}, "tenants.acme.key_env[0]: must name an environment variable that holds a key"),
        ({"key_files": ["/no/such/keys"]}, "tenants.acme.key_files: cannot read /no/such/keys: No such file"),
    ],
)
def test_keys_that_are_not_there_are_named_before_anything_starts(
    command: Command,
    tmp_path: pathlib.Path,
    state: pathlib.Path,
    checkpoint: pathlib.Path,
    keys: dict[str, object],
    message: str,
) -> None:
    path = write(tmp_path, checkpoint, tenants={"acme": keys}, redis={"url": "redis://127.0.0.1:1/0"})
    assert message in command.refused("up", path)
    assert nothing_started(state)


def test_a_decision_log_that_cannot_be_written_is_named_before_anything_starts(
    command: Command, tmp_path: pathlib.Path, state: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    router = {"decision_log": {"path": str(tmp_path / "headrace.yaml" / "log")}}
    error = command.refused("up", write(tmp_path, checkpoint, router=router, redis={"url": "redis://127.0.0.1:1/0"}))
    assert "router.decision_log.path: cannot write" in error
    assert nothing_started(state)


@pytest.mark.parametrize("key", ["http_port", "grpc_port"])
def test_a_taken_port_is_named(
    command: Command, tmp_path: pathlib.Path, state: pathlib.Path, checkpoint: pathlib.Path, key: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = {"http_port": 0, "grpc_port": 0, key: port}
        error = command.refused("up", write(tmp_path, checkpoint, router=router))
    assert f"router.{key}: 127.0.0.1:{port} is taken" in error
    assert nothing_started(state)


def test_a_redis_that_is_away_is_named_without_its_password(
    command: Command, tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    error = command.refused("up", write(tmp_path, checkpoint, redis={"url": "redis://:secret@127.0.0.1:1/0"}))
    assert "redis.url: nothing serves at redis://127.0.0.1:1/0: Redis did not serve a call" in error
    assert "secret" not in error


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_look_at_a_cluster_whose_redis_is_away_has_failed(
    command: Command, tmp_path: pathlib.Path, checkpoint: pathlib.Path, form: tuple[str, ...]
) -> None:
    path = write(tmp_path, checkpoint, redis={"url": "redis://127.0.0.1:1/0"})
    ran = command("status", "--config", path, *form)
    assert ran.status == 1
    assert "Redis did not serve a call" in ran.out


@pytest.mark.parametrize("name", ["status", "down", "chat", "generate"])
def test_without_a_cluster_there_is_nothing_to_ask(command: Command, name: str) -> None:
    arguments = (name, "hello") if name == "generate" else (name,)
    assert "no cluster runs here" in command.refused(*arguments)
    assert "no cluster named 'other' runs here" in command.refused(*arguments, "--cluster", "other")


def test_a_session_whose_process_is_gone_is_cleaned_up_and_nobody_is_hurt(
    command: Command, state: pathlib.Path
) -> None:
    folder = SessionFolder("left", state)
    folder.path.mkdir(parents=True)
    ours = os.getpid()
    folder.write(Session("left", ours, "", "m", "http://h", "h", "redis://h", children={"router": ours}))
    assert "does not run any more: clean up with `headrace down`" in command.refused("status")
    ran = command("down")
    assert ran.status == 0
    assert "ended what it left: nothing" in ran.out
    assert folder.read() is None


def test_a_router_that_does_not_answer_is_one_line(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    assert command.refused("generate", "hello", "--address", address)


@pytest.mark.parametrize("address", ["http://127.0.0.1:8000", "grpc://h:1", "127.0.0.1", "h:port", "", "grpcs://"])
def test_an_address_that_is_none_is_answered_with_its_form(command: Command, address: str) -> None:
    said = command.refused("generate", "hello", "--address", address)
    assert "address: must be HOST:PORT, where the router serves gRPC, or grpcs://HOST:PORT by TLS" in said
    assert f"got {address!r}" in said


@pytest.mark.parametrize("router", ["127.0.0.1:8000", "ftp://h", "localhost"])
def test_a_router_to_ask_is_given_as_a_url(command: Command, router: str) -> None:
    said = command.refused("why", "r1", "--router", router)
    assert f"--router: must be http://HOST:PORT or https://HOST:PORT of a router, got {router!r}" in said


def test_a_profile_finds_the_cluster_as_other_commands_do(
    command: Command, tmp_path: pathlib.Path, state: pathlib.Path
) -> None:
    assert "no cluster runs here" in command.refused("profile", "decode-0")
    assert "no cluster named 'other' runs here" in command.refused("profile", "decode-0", "--cluster", "other")
    path = write(tmp_path, "m")
    assert "redis.url must be given" in command.refused("profile", "decode-0", "--config", path)
    folder = SessionFolder("headrace", state)
    with folder.owned():
        folder.write(Session("headrace", os.getpid(), "", "m", "http://h", "h", "redis://127.0.0.1:1/0"))
        for where in ((), ("--cluster", "headrace"), ("--config", path)):
            assert "Redis did not serve a call" in command.refused("profile", "decode-0", *where)
    given = ("--config", path, "--redis-url", "redis://127.0.0.1:1/0")
    assert "Redis did not serve a call" in command.refused("profile", "decode-0", *given)


def test_a_model_that_is_no_model_cannot_be_fetched(command: Command, tmp_path: pathlib.Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty" in command.refused("model", "fetch", str(empty))
    assert "nowhere.gguf does not exist" in command.refused("model", "fetch", "nowhere.gguf")
