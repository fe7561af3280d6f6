"""`headrace generate`: one prompt, completed as it comes."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict

import click

from cluster.commands.options import Target, target_options
from cluster.talk import Answer, Options, summary


@click.command(name="generate")
@click.argument("prompt")
@target_options
@click.option("--json", "as_json", is_flag=True, help="The whole answer with its timeline, as one object.")
def command(prompt: str, target: Target, options: Options, as_json: bool) -> None:
    """Complete PROMPT as plain text, without a chat template; - reads it from stdin."""
    text = sys.stdin.read() if prompt == "-" else prompt

    async def generate() -> Answer:
        async with target.talk() as talk:
            return await printed(talk.generate(text, options), quiet=as_json)

    answer = asyncio.run(generate())
    if as_json:
        click.echo(json.dumps(asdict(answer)))
    else:
        click.echo(click.style(summary(answer), dim=True), err=True)


async def printed(pieces: AsyncIterator[str | Answer], *, quiet: bool = False) -> Answer:
    """Prints the pieces as they come; the whole answer."""
    answer: Answer | None = None
    async for piece in pieces:
        if isinstance(piece, Answer):
            answer = piece
        elif not quiet:
            click.echo(piece, nl=False)
            sys.stdout.flush()
    if not quiet:
        click.echo()
    if answer is None:
        raise click.ClickException("the answer ended without its usage")
    return answer
