"""`headrace controller`: a controller of what others run, a Ray cluster or the workers themselves, as in Kubernetes."""

import asyncio
import os
import pathlib

import click

from cluster import keeper
from cluster.advisor import Elsewhere
from cluster.config_place import load
from cluster.console.serve import PATH
from cluster.session import Session, SessionFolder, remembered
from cluster.signals import Signals
from headrace.config import ClusterConfig
from router.keyring import read_keys


def _ports(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for value in values:
        pool, _, port = value.partition("=")
        if not pool or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise click.BadParameter(f"expected POOL=PORT, got {value!r}")
        found[pool] = int(port)
    return found


@click.command(name="controller")
@click.argument("config", type=click.Path(path_type=pathlib.Path), default="headrace.yaml")
@click.option("--redis-url", help="Instead of redis.url of the configuration.")
@click.option("--ray-address", help="Instead of ray.address of the configuration.")
@click.option(
    "--worker-prefix",
    default="",
    help="Without Ray: what workers' ids begin with, before POOL-INDEX; a StatefulSet names its pods so.",
)
@click.option(
    "--worker-metrics-port",
    "metrics_ports",
    metavar="POOL=PORT",
    multiple=True,
    callback=_ports,
    help="Without Ray: where the workers of a pool have their metrics, for /targets.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where it answers over HTTP.")
@click.option("--http-port", type=click.IntRange(1, 65535), default=8001, show_default=True)
@click.option(
    "--api-keys-file",
    type=click.Path(path_type=pathlib.Path),
    help="Keys of the operator, one a line, beside router.api_keys: who holds one may look at the console.",
)
@click.option("--router-http-url", default="http://127.0.0.1:8000", show_default=True, help="For `headrace why`.")
@click.option("--router-grpc-address", default="127.0.0.1:50051", show_default=True, help="For `headrace chat`.")
def command(
    config: pathlib.Path,
    redis_url: str | None,
    ray_address: str | None,
    worker_prefix: str,
    metrics_ports: dict[str, int],
    host: str,
    http_port: int,
    api_keys_file: pathlib.Path | None,
    router_http_url: str,
    router_grpc_address: str,
) -> None:
    """Keep the controller of the cluster that CONFIG describes on its Ray cluster, until SIGTERM.

    What CONFIG says of pools becomes what is desired, where it says something else than last time. Without Ray, where
    `autoscaling.mode` is external (or dry-run), it sees workers by their leases, flips their roles (or does not), and says
    how many each pool should have (/metrics, `headrace autoscale`); it starts and ends none. Workers, routers and Redis are
    started and ended by others, and serve on when this ends. Beside it, `headrace status`, `why`, `chat` and
    `generate` find the cluster. HTTP: /health, /ready (a controller leads), /metrics (sizes of pools), /targets (where
    workers' metrics are, for Prometheus' HTTP service discovery), /console/ (the operator's page).
    """
    cluster = load(config)
    keys = read_keys(api_keys_file, "--api-keys-file") if api_keys_file is not None else ()
    redis = cluster.redis.model_copy(update={"url": redis_url or cluster.redis.url})
    ray = cluster.ray.model_copy(update={"address": ray_address or cluster.ray.address})
    session = Session(
        cluster=cluster.name,
        pid=os.getpid(),
        config_path=str(config),
        model_name=cluster.model_name,
        http_url=router_http_url,
        grpc_address=router_grpc_address,
        redis_url=redis.url or "",
        ray_address=ray.address or "",
        ready=True,
        tls=remembered(cluster.router.tls),
        console_url=f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{http_port}{PATH}",
    )
    cluster = cluster.model_copy(update={"redis": redis, "ray": ray})
    asyncio.run(_keep(cluster, session, host, http_port, keys, Elsewhere(worker_prefix, metrics_ports)))


async def _keep(
    config: ClusterConfig, session: Session, host: str, port: int, keys: tuple[str, ...], workers: Elsewhere
) -> None:
    """Until a signal asks for the end. The session is there for as long as this runs."""
    signals = Signals(lambda step: None)
    folder = SessionFolder(config.name)

    def joined() -> None:
        signals.install()
        if config.ray.address is not None:
            click.echo(f"headrace: joined {config.ray.address}", err=True)

    with folder.owned():
        folder.write(session)
        try:
            await keeper.keep(
                *(config, host, port),
                api_keys=keys,
                connected=joined,
                say=_say_waiting,
                workers=workers,
            )
        except asyncio.CancelledError:
            if signals.received is None:
                raise
        finally:
            folder.clear()


def _say_waiting(reason: str) -> None:
    click.echo(f"headrace: waits: {' '.join(reason.split())}", err=True)
