"""`headrace drain`: what runs before a host is taken away, as the preStop hook of a pod of workers."""

import asyncio
import json
import pathlib

import click

from cluster.config_place import load
from cluster.leased import leased_workers
from cluster.worker_client import WorkerClient
from headrace.errors import ConfigError, InternalError, WorkerLost
from headrace.store import connect

BUDGET_SECONDS = 2.0


@click.command(name="drain")
@click.argument("config", type=click.Path(path_type=pathlib.Path), default="headrace.yaml")
@click.option(
    "--host",
    required=True,
    envvar="HEADRACE_HOST",
    help="The address by which the workers of that host are reached. Or $HEADRACE_HOST.",
)
@click.option(
    "--redis-url",
    envvar="HEADRACE_REDIS_URL",
    help="Instead of redis.url of the configuration. Or $HEADRACE_REDIS_URL.",
)
@click.option(
    "--grace-seconds", type=click.FloatRange(0, 86400), default=30.0, show_default=True, help="How long it waits."
)
@click.option("--json", "as_json", is_flag=True, help="One object: how many requests of each worker were cut.")
def command(config: pathlib.Path, host: str, redis_url: str | None, grace_seconds: float, as_json: bool) -> None:
    """Drain every worker on one host of the cluster that CONFIG describes: no new requests, those in flight finish.

    Returns when they have, or the grace is over. The workers stay, and take nothing: whoever runs them ends them.
    """
    cluster = load(config)
    url = redis_url or cluster.redis.url
    if url is None:
        raise ConfigError("redis.url must be given: it is where the workers are found", key="redis.url")
    cut = asyncio.run(drain_host(cluster.name, url, host, grace_seconds))
    if as_json:
        click.echo(json.dumps(cut))
        return
    for worker, outcome in cut.items():
        click.echo(f"{worker}: {outcome if isinstance(outcome, str) else f'drained, {outcome} requests cut'}")
    if not cut:
        click.echo(f"no worker of {cluster.name} is on {host}")


async def drain_host(cluster: str, redis_url: str, host: str, grace_seconds: float) -> dict[str, int | str]:
    """The number of requests that were cut, or why a worker could not be drained, by worker id."""
    addresses = await addresses_on(cluster, redis_url, host)
    outcomes = await asyncio.gather(*(_drain(address, grace_seconds) for address in addresses.values()))
    return dict(zip(addresses, outcomes, strict=True))


async def addresses_on(cluster: str, redis_url: str, host: str) -> dict[str, str]:
    """Where the workers with a lease on that host answer. StoreUnavailable when Redis does not."""
    store = connect(redis_url, BUDGET_SECONDS)
    try:
        workers = await leased_workers(store, cluster)
    finally:
        await store.close()
    return {worker.info.worker_id: worker.info.address for worker in workers if worker.host == host.strip("[]")}


async def _drain(address: str, grace_seconds: float) -> int | str:
    try:
        async with WorkerClient(address) as client:
            return await client.drain(grace_seconds)
    except (WorkerLost, InternalError) as error:
        return error.message
