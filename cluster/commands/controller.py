"""`headrace controller`: a controller on a Ray cluster that others run, as in Kubernetes."""

import asyncio
import os
import pathlib

import click

from cluster import keeper
from cluster.commands.up import load
from cluster.session import Session, SessionFolder
from cluster.signals import Signals
from headrace.config import ClusterConfig


@click.command(name="controller")
@click.argument("config", type=click.Path(path_type=pathlib.Path), default="headrace.yaml")
@click.option("--redis-url", help="Instead of redis.url of the configuration.")
@click.option("--ray-address", help="Instead of ray.address of the configuration.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where it answers over HTTP.")
@click.option("--http-port", type=click.IntRange(1, 65535), default=8001, show_default=True)
@click.option("--router-http-url", default="http://127.0.0.1:8000", show_default=True, help="For `headrace why`.")
@click.option("--router-grpc-address", default="127.0.0.1:50051", show_default=True, help="For `headrace chat`.")
def command(
    config: pathlib.Path,
    redis_url: str | None,
    ray_address: str | None,
    host: str,
    http_port: int,
    router_http_url: str,
    router_grpc_address: str,
) -> None:
    """Keep the controller of the cluster that CONFIG describes on its Ray cluster, until SIGTERM.

    What CONFIG says of pools becomes what is desired, where it says something else than last time. Workers, routers and
    Redis are started and ended by others, and serve on when this ends. Beside it, `headrace status`, `why`, `chat` and
    `generate` find the cluster. HTTP: /health, /ready (a controller leads), /metrics (sizes of pools), /targets (where
    workers' metrics are, for Prometheus' HTTP service discovery).
    """
    cluster = load(config)
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
    )
    asyncio.run(_keep(cluster.model_copy(update={"redis": redis, "ray": ray}), session, host, http_port))


async def _keep(config: ClusterConfig, session: Session, host: str, port: int) -> None:
    """Until a signal asks for the end. The session is there for as long as this runs."""
    signals = Signals(lambda step: None)
    folder = SessionFolder(config.name)
    with folder.owned():
        folder.write(session)
        try:
            await keeper.keep(config, host, port, connected=signals.install, say=_say_waiting)
        except asyncio.CancelledError:
            if signals.received is None:
                raise
        finally:
            folder.clear()


def _say_waiting(reason: str) -> None:
    click.echo(f"headrace: waits: {' '.join(reason.split())}", err=True)
