"""What must hold before anything starts: the checkpoint is whole, pools' layouts and KV fit the model, ports are free.

A worker would find the same faults, but minutes later and one at a time. Each raises one error that names the key,
the value and what is allowed.
"""

import errno
import json
import pathlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from cluster.config_place import is_path
from cluster.model_cache import local_source
from cluster.session import all_folders
from headrace.client import TLS_SCHEME
from headrace.config import CanaryConfig, ClusterConfig, EngineConfig, PoolConfig
from headrace.errors import CheckpointError, ConfigError, IncompatiblePeer
from headrace.ports import why_not_free
from workers.kv.layout import block_bytes, num_blocks, shard
from workers.models.checkpoint import Checkpoint
from workers.models.fetch import KNOWN, no_progress
from workers.models.gguf_source import Progress

MAX_HEADER_BYTES = 100 * 2**20


def check_checkpoint(model: str, progress: Progress = no_progress) -> Checkpoint:
    """The checkpoint, opened, and fetched first where it is named: its configuration is known, and its weight files are
    as long as they say they are. ConfigError says what is wrong with it, or what `model` may be."""
    place = pathlib.Path(model)
    if not place.is_dir() and (is_path(model) or (place.exists() and place.suffix != ".gguf")):
        raise _no_model(model, f"there is no folder {model}")
    try:
        checkpoint = Checkpoint.open(local_source(model, progress))
    except CheckpointError as error:
        raise _no_model(model, error.message) from error
    try:
        for path in checkpoint.weight_files:
            check_weight_file(path)
        if not (checkpoint.folder / "tokenizer.json").is_file():
            raise CheckpointError(f"{checkpoint.folder} lacks tokenizer.json")
    except CheckpointError as error:
        raise ConfigError(f"model: {error.message}", key="model", value=model) from error
    return checkpoint


def _no_model(model: str, why: str) -> ConfigError:
    folder = "a folder with config.json, tokenizer.json and .safetensors files"
    allowed = f"{folder}, a .gguf file, {', '.join(KNOWN)}, or a hub id"
    return ConfigError(f"model: {why}; it must be {allowed}", key="model", value=model, allowed=allowed)


def check_weight_file(path: pathlib.Path) -> None:
    """A safetensors file is 8 bytes of length, a JSON header of that length, and the tensors it lists, no byte more."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is no whole safetensors file: {size} bytes, its header alone says {length}")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path} has a header that cannot be read: {error}") from error
    expected = 8 + length + end
    if size != expected:
        raise CheckpointError(f"{path} is truncated or overlong: {size} bytes, {expected} by its header")


def check_canary_model(canary: CanaryConfig, checkpoint: Checkpoint) -> None:
    """ConfigError when the canary's model is none, does not fit its pools, or has other words than the one that serves:
    routers render and tokenise once for both."""
    its = check_checkpoint(canary.model) if canary.model is not None else checkpoint
    for name, theirs, ours in (
        ("tokenizer", its.tokenizer_digest, checkpoint.tokenizer_digest),
        ("chat template", its.chat_template_digest, checkpoint.chat_template_digest),
    ):
        if theirs != ours:
            raise ConfigError.out_of_range("canary.model", canary.model, f"one whose {name} is that of `model`")
    _check_pools("canary.", canary.pools, canary.engine, its)


def check_layouts(config: ClusterConfig, checkpoint: Checkpoint) -> None:
    """ConfigError when a pool's tp or pp does not fit the model, KV memory holds no two blocks, or more context is asked
    for than the model has."""
    _check_pools("", config.pools, config.engine, checkpoint)


def _check_pools(where: str, pools: Mapping[str, PoolConfig], engine: EngineConfig, checkpoint: Checkpoint) -> None:
    for name, pool in pools.items():
        try:
            shard(checkpoint.config.shape, pool.layout, 0)
        except IncompatiblePeer as error:
            key = f"{where}pools.{name}.{error.numbers.get('field', 'tp')}"
            raise ConfigError(f"{key}: {error.message}", key=key, value=error.numbers.get("value")) from error
    shape = checkpoint.config.shape
    # Ranks may hold the same heads, so blocks differ between layouts: what is enough for the largest is for all.
    largest = max((pool.layout for pool in pools.values()), key=lambda layout: block_bytes(shape, layout, engine))
    num_blocks(shape, largest, engine, f"{where}engine")
    asked, most = engine.max_context_tokens, checkpoint.config.max_context_tokens
    if asked is not None and asked > most:
        raise ConfigError.out_of_range(f"{where}engine.max_context_tokens", asked, f"at most the model's {most}")


def check_ports(config: ClusterConfig) -> None:
    """ConfigError when the router or the console could not listen where it is told to."""
    router = config.router
    _check_host("router.host", router.host)
    if config.console.enabled:
        _check_host("console.host", config.console.host)
    if router.http_port and router.http_port == router.grpc_port:
        raise ConfigError.out_of_range("router.http_port", router.http_port, "another port than router.grpc_port")
    for key, port in (("router.http_port", router.http_port), ("router.grpc_port", router.grpc_port)):
        why = why_not_free(router.host, port) if port else None
        if why is None:
            continue
        if why.errno == errno.EADDRINUSE:
            raise ConfigError(f"{key}: {router.host}:{port} is taken{_by_whom(port)}", key=key, value=port)
        raise ConfigError(f"{key}: cannot listen on {router.host}:{port}: {why.strerror}", key=key, value=port)


def _check_host(key: str, host: str) -> None:
    why = why_not_free(host, 0)
    if why is not None:
        allowed = f"an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them ({why.strerror})"
        raise ConfigError.out_of_range(key, host, allowed)


def _by_whom(port: int) -> str:
    """Where a cluster that runs here has the port: which, and what to do about it."""
    for folder in all_folders():
        session = folder.read() if folder.running else None
        places = (session.http_url, f"//{session.grpc_address.removeprefix(TLS_SCHEME)}") if session is not None else ()
        if port in {urlsplit(place).port for place in places}:
            name = folder.cluster
            return f" by the cluster {name!r}: end it with `headrace down --cluster {name}`, or choose another port"
    return ""
