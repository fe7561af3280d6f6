"""Options that `chat` and `generate` share: which router, and how tokens are drawn."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from cluster.commands.status import read
from cluster.talk import Options, Talk


@dataclass(frozen=True, slots=True)
class Target:
    """The router to talk to: a cluster that runs here, or any address."""

    cluster: str | None
    address: str | None
    model: str | None
    api_key: str | None

    def talk(self) -> Talk:
        if self.address is not None:
            return Talk(self.address, self.model or "", self.api_key)
        session = read(self.cluster)
        return Talk(session.grpc_address, self.model or session.model_name, self.api_key)


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets `target` and `options`."""

    @click.option("--cluster", help="The cluster's name; not needed when there is one.")
    @click.option("--address", help="A router's gRPC address, instead of a cluster that runs here.")
    @click.option("--model", help="The model's name; needed with --address.")
    @click.option("--api-key", envvar="HEADRACE_API_KEY", help="Or $HEADRACE_API_KEY.")
    @click.option("--max-tokens", type=click.IntRange(min=1))
    @click.option("--temperature", type=click.FloatRange(min=0))
    @click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True))
    @click.option("--seed", type=click.IntRange(min=0))
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
        **others: Any,
    ) -> Any:
        if address is not None and model is None:
            raise click.UsageError("--address needs --model")
        target = Target(cluster, address, model, api_key)
        return command(target=target, options=Options(max_tokens, temperature, top_p, seed), **others)

    return wrapped
