"""Our connection to Ray: a Ray of this machine alone, ended with us, or one that the configuration names."""

import contextlib
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import grpc
import ray
from ray._private.gcs_utils import create_gcs_channel
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from cluster.control_actor import NAME, ControlActor, namespace, rank_resources, settings_digest
from cluster.pools import describe_resources, why
from headrace.config import ClusterConfig
from headrace.errors import ConfigError, InternalError, Unavailable

LOOPBACK = "127.0.0.1"
REPLACE_SECONDS = 30.0
REPLACE_LOOK_SECONDS = 0.2
ANSWER_SECONDS = 60.0
LISTENS_SECONDS = 2.0
ADDRESS = re.compile(r"auto|(ray://)?[^/\s]+:\d{1,5}")
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
# What is no answer of a head, and what that means where gRPC's own words would not help; anything else, such as that a
# token is wanted, is one.
NO_HEAD = {
    grpc.StatusCode.UNAVAILABLE: "",
    grpc.StatusCode.DEADLINE_EXCEEDED: f"nothing answered within {LISTENS_SECONDS:g} s",
    grpc.StatusCode.UNIMPLEMENTED: "what answers is none (its client server is ray://HOST:PORT)",
}


def start(config: ClusterConfig) -> None:
    """Connects this process. Blocks for seconds. ConfigError when the ranks cannot all fit, ever."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    needed = total_resources(config)
    if config.ray.address is None:
        try:
            ray.init(
                address="local",
                namespace=namespace(config.name),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=config.ray.object_store_bytes,
                **_grants(config, needed),
            )
        except Exception as error:  # it raises whatever a folder, a socket or a process of it does
            raise Unavailable(f"ray: none can be started on this machine: {why(error)}") from error
    else:
        connect(config.ray.address, config.name)
    _check_fits(needed)


def connect(address: str, cluster: str) -> None:
    """Joins a Ray cluster that somebody else runs. Unavailable within seconds when none answers, or one that this process
    may not join: another version, another token. ConfigError when the address is none."""
    if not ADDRESS.fullmatch(address):
        allowed = "auto, HOST:PORT of a Ray head (6379 unless told otherwise), or ray://HOST:PORT of its client server"
        raise ConfigError.out_of_range("ray.address", address, allowed)
    try:
        _check_answers(address)
        ray.init(address=address, namespace=namespace(cluster), log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        raise Unavailable(f"ray.address: no Ray cluster answers at {address}: {error}") from error
    except (RayError, RuntimeError) as error:
        raise Unavailable(f"ray.address: the Ray cluster at {address} cannot be joined: {why(error)}") from error


def _check_answers(address: str) -> None:
    """ConnectionError unless a Ray is there: Ray itself takes half a minute to say so, and more than four at a head."""
    if address == "auto":  # as Ray reads it
        address = os.environ.get("RAY_ADDRESS") or address
    if address.startswith("ray://"):
        where = urlsplit(address)
        socket.create_connection((where.hostname or "", where.port or 0), LISTENS_SECONDS).close()
        return
    place = canonicalize_bootstrap_address_or_die(address)
    with create_gcs_channel(place) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=LISTENS_SECONDS)
        except grpc.RpcError as error:
            if error.code() in NO_HEAD:
                raise ConnectionError(f"no head at {place}: {NO_HEAD[error.code()] or error.details()}") from error


def head_address() -> str:
    """host:port where the head of the Ray that we joined listens."""
    return str(ray.get_runtime_context().gcs_address)


def stop() -> None:
    """Leaves Ray; a Ray of our own ends, with everything in it."""
    ray.shutdown()


def start_controller(config: ClusterConfig, redis_url: str) -> Any:
    """The controller actor: its handle."""
    actor: Any = (
        ray.remote(ControlActor)
        .options(
            name=NAME,
            namespace=namespace(config.name),
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=4,
        )
        .remote(*_settings(config, redis_url))
    )
    try:
        ray.get(actor.ping.remote())
    except RayError as error:
        raise InternalError(f"the controller did not start: {why(error)}") from error
    return actor


def keep_controller(config: ClusterConfig, redis_url: str) -> Any:
    """The handle of a controller with these settings: of the one that runs with them, else of one in the place of
    whichever runs. Workers serve on: a new one takes them over, once the old one's lease is over."""
    with _answering():
        actor = _controller(config.name)
        if actor is not None and _runs_with(actor, settings_digest(*_settings(config, redis_url))):
            return actor
        deadline = time.monotonic() + REPLACE_SECONDS
        while actor is not None:
            ray.kill(actor, no_restart=True)
            if time.monotonic() > deadline:
                raise Unavailable(f"the old controller did not end within {REPLACE_SECONDS:.0f} s")
            time.sleep(REPLACE_LOOK_SECONDS)
            actor = _controller(config.name)
        return start_controller(config, redis_url)


def check_controller(cluster: str, actor: Any) -> Any:
    """The controller: `actor`, or who is in its place. Unavailable when the Ray cluster does not answer, or has none; one
    that Ray just starts again is waited for. The handle is kept from look to look, since Ray's client begins a process on
    the cluster with every handle that it gets by a name."""
    with _answering():
        try:
            ray.get(actor.ping.remote(), timeout=ANSWER_SECONDS)
        except ActorUnavailableError:
            pass
        except ActorDiedError:
            actor = _controller(cluster)
            if actor is None:
                raise Unavailable("the Ray cluster has no controller any more") from None
            ray.get(actor.ping.remote(), timeout=ANSWER_SECONDS)
    return actor


def _settings(config: ClusterConfig, redis_url: str) -> tuple[str, str, str]:
    """What a controller is started with. On a Ray of our own, workers listen on the loopback; elsewhere on their node's
    address."""
    return config.model_dump_json(), redis_url, LOOPBACK if config.ray.address is None else ""


def _runs_with(actor: Any, digest: str) -> bool:
    """Whether it turns, and with these settings; one of an older version cannot say."""
    try:
        return bool(ray.get(actor.started_with.remote(), timeout=ANSWER_SECONDS) == digest)
    except (AttributeError, RayError):
        return False


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Whatever a Ray cluster that is lost fails with, as Unavailable."""
    try:
        yield
    except ConnectionError as error:
        raise Unavailable(f"the Ray cluster does not answer: {error}") from error
    except RayError as error:
        raise Unavailable(f"the controller does not answer: {why(error)}") from error


def _controller(cluster: str) -> Any:
    """Its handle, or None when there is none."""
    try:
        return ray.get_actor(NAME, namespace=namespace(cluster))
    except ValueError:
        return None


def stop_controller(cluster: str, seconds: float) -> bool:
    """Has every worker drained and removed, then ends the controller; whether there was one."""
    actor = _controller(cluster)
    if actor is None:
        return False
    try:
        ray.get(actor.stop.remote(), timeout=seconds)
    finally:
        ray.kill(actor, no_restart=True)
    return True


def total_resources(config: ClusterConfig) -> dict[str, float]:
    """What all ranks of all pools take together, those of a canary too."""
    total: dict[str, float] = {}
    pools = [(pool, config.engine) for pool in config.pools.values()]
    pools += [(pool, config.canary.engine) for pool in config.canary.pools.values()] if config.canary else []
    for pool, engine in pools:
        ranks = pool.replicas * pool.layout.world_size
        for name, amount in rank_resources(config, pool, engine).items():
            total[name] = total.get(name, 0.0) + amount * ranks
    return total


def _grants(config: ClusterConfig, needed: Mapping[str, float]) -> dict[str, Any]:
    """What a Ray of our own is told that this machine has. CPUs are a number to it, and so is whatever is asked for on a
    machine where nothing computes on a GPU; only real GPUs are left for Ray to count."""
    custom = {name: amount for name, amount in needed.items() if name not in ("CPU", "GPU")}
    grants: dict[str, Any] = {
        "num_cpus": max(os.cpu_count() or 1, math.ceil(needed.get("CPU", 0.0))),
        "resources": custom,
    }
    if config.engine.device == "cpu":
        grants["num_gpus"] = math.ceil(needed.get("GPU", 0.0))
    return grants


def _check_fits(needed: Mapping[str, float]) -> None:
    available: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for name, amount in needed.items():
        if available.get(name, 0.0) < amount:
            raise ConfigError(
                f"pools: all ranks together need {describe_resources([{name: amount}]).removesuffix(' on one node')}, "
                f"the Ray cluster has {available.get(name, 0.0):g}",
                key="pools",
                needed=amount,
                available=available.get(name, 0.0),
            )
