"""Options that `chat` and `generate` share: which router, and how tokens are drawn."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from cluster.commands.status import read
from cluster.commands.tls_options import tls_options
from cluster.talk import AsyncClient, Options
from headrace.tls import ClientTls


@dataclass(frozen=True, slots=True)
class Target:
    """The router to talk to: a cluster that runs here, or any address."""

    cluster: str | None
    address: str | None
    model: str | None
    api_key: str | None
    tls: ClientTls | None = None

    def client(self) -> AsyncClient:
        address, tls = self.address, self.tls
        if address is None:
            session = read(self.cluster)
            address, tls = session.grpc_address, tls or session.client_tls
        return AsyncClient(address, model=self.model, api_key=self.api_key, tls=tls)


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets `target` and `options`."""

    @click.option("--cluster", help="The cluster's name; not needed when there is one.")
    @click.option(
        "--address", help="A router's gRPC address, instead of a cluster that runs here; grpcs://HOST:PORT is TLS."
    )
    @click.option("--model", help="The model's name; the one that is served, unless given.")
    @click.option("--api-key", envvar="HEADRACE_API_KEY", help="Or $HEADRACE_API_KEY.")
    @click.option("--max-tokens", type=click.IntRange(min=1))
    @click.option("--temperature", type=click.FloatRange(min=0))
    @click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True))
    @click.option("--seed", type=click.IntRange(min=0))
    @tls_options
    @functools.wraps(command)
    def wrapped(
        cluster: str | None,
        address: str | None,
        model: str | None,
        api_key: str | None,
        max_tokens: int | None,
        temperature: float | None,
        top_p: float | None,
        seed: int | None,
        tls: ClientTls | None,
        **others: Any,
    ) -> Any:
        target = Target(cluster, address, model, api_key, tls)
        return command(target=target, options=Options(max_tokens, temperature, top_p, seed), **others)

    return wrapped
