"""Options of whatever talks to routers: how to meet those that speak TLS."""

import functools
from collections.abc import Callable
from typing import Any

import click

from headrace.tls import ClientTls


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets `tls`, None where none is given: a cluster that runs here says it itself."""

    @click.option("--ca-file", help="By TLS: who signed the router's certificate, in PEM.")
    @click.option("--client-cert-file", help="By mutual TLS: the certificate that the router is shown.")
    @click.option("--client-key-file", help="And its key.")
    @click.option("--server-name", help="By TLS: a name in the router's certificate, where its address is none.")
    @functools.wraps(command)
    def wrapped(
        ca_file: str | None,
        client_cert_file: str | None,
        client_key_file: str | None,
        server_name: str | None,
        **others: Any,
    ) -> Any:
        tls = ClientTls(ca_file, client_cert_file, client_key_file, server_name)
        return command(tls=tls if tls != ClientTls() else None, **others)

    return wrapped
