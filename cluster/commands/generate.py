"""`headrace generate`: one prompt, completed as it comes."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict

import click

from cluster.commands.options import Target, target_options
from cluster.talk import Answer, Options, measured, summary
from headrace.errors import InternalError


@click.command(name="generate")
@click.argument("prompt")
@target_options
@click.option("--json", "as_json", is_flag=True, help="The whole answer with its timeline, as one object.")
def command(prompt: str, target: Target, options: Options, as_json: bool) -> None:
    """Complete PROMPT as plain text, without a chat template; - reads it from stdin."""
    text = sys.stdin.read() if prompt == "-" else prompt

    async def generate() -> Answer:
        async with target.client() as client:
            return await printed(measured(client.generate(text, **options.given())), quiet=as_json)

    answer = asyncio.run(generate())
    if as_json:
        click.echo(json.dumps(asdict(answer)))
    else:
        click.echo(click.style(summary(answer), dim=True), err=True)


async def printed(pieces: AsyncIterator[str | Answer], *, quiet: bool = False) -> Answer:
    """Prints the pieces as they come; the whole answer."""
    async for piece in pieces:
        match piece:
            case Answer():
                if not quiet:
                    click.echo()
                return piece
            case str() if not quiet:
                click.echo(piece, nl=False)
                sys.stdout.flush()
    raise InternalError("the answer ended without its usage")
