import json
import pathlib
import socket
import struct

import pytest

from cluster.checks import check_ports, check_weight_file
from cluster.session import Session, SessionFolder
from headrace.config import ClusterConfig, ConsoleConfig, PoolConfig, RouterConfig
from headrace.errors import CheckpointError, ConfigError
from headrace.ports import free_port, port_is_free


def weight_file(path: pathlib.Path, cut: int = 0, extra: bytes = b"") -> pathlib.Path:
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(16) + extra
    path.write_bytes(content[: len(content) - cut])
    return path


def test_a_whole_weight_file_passes(tmp_path: pathlib.Path) -> None:
    check_weight_file(weight_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("cut", [1, 16, 40, 200])
def test_a_truncated_weight_file_is_refused_by_name(tmp_path: pathlib.Path, cut: int) -> None:
    path = weight_file(tmp_path / "model.safetensors")
    path.write_bytes(path.read_bytes()[:-cut] if cut < path.stat().st_size else b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        check_weight_file(path)


def test_an_overlong_weight_file_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="overlong"):
        check_weight_file(weight_file(tmp_path / "model.safetensors", extra=b"x"))


def test_a_header_that_is_no_header_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 4) + b"[1]]" + bytes(8))
    with pytest.raises(CheckpointError, match="header"):
        check_weight_file(path)


def config(**router: int | str) -> ClusterConfig:
    return ClusterConfig(model="m", pools={"all": PoolConfig(role="unified")}, router=RouterConfig(**router))


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        with pytest.raises(ConfigError, match=rf"router\.http_port: 127\.0\.0\.1:{port} is taken"):
            check_ports(config(http_port=port, grpc_port=0))
    check_ports(config(http_port=free_port("127.0.0.1"), grpc_port=0))


@pytest.mark.parametrize("key", ["http_port", "grpc_port"])
def test_a_port_that_another_cluster_has_is_refused_with_its_name(
    key: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path))
    folder = SessionFolder("other")
    with socket.socket() as taken, folder.owned():
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        places = {"http_port": "http://127.0.0.1:1", "grpc_port": "127.0.0.1:2"}
        places[key] = places[key].rpartition(":")[0] + f":{port}"
        folder.write(Session("other", 1, "", "m", places["http_port"], places["grpc_port"], ""))
        with pytest.raises(ConfigError, match=r"taken by the cluster 'other': .*headrace down --cluster other"):
            check_ports(config(**{"http_port": 0, "grpc_port": 0, key: port}))


@pytest.mark.parametrize("host", ["203.0.113.7", "fe80::1", "nowhere.invalid", "[::1]", "a..b"])
def test_a_host_that_is_not_here_is_no_taken_port(host: str) -> None:
    for ports in ({"http_port": 8000, "grpc_port": 0}, {"http_port": 0, "grpc_port": 0}):
        with pytest.raises(ConfigError, match=r"router\.host: must be an address of this machine") as caught:
            check_ports(config(host=host, **ports))
        assert f"got {host!r}" in caught.value.message
    here = config(http_port=0, grpc_port=0)
    elsewhere = here.model_copy(update={"console": ConsoleConfig(host=host)})
    with pytest.raises(ConfigError, match=r"console\.host: must be an address of this machine"):
        check_ports(elsewhere)
    check_ports(here.model_copy(update={"console": ConsoleConfig(host=host, enabled=False)}))


def test_both_edges_cannot_share_a_port() -> None:
    with pytest.raises(ConfigError, match=r"router\.http_port"):
        check_ports(config(http_port=9, grpc_port=9))
