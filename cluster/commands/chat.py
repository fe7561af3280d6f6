"""`headrace chat`: a conversation, streamed, with what each answer cost underneath."""

import asyncio
import json
import sys
from dataclasses import asdict

import click

from cluster.commands.generate import printed
from cluster.commands.options import Target, target_options
from cluster.talk import AsyncClient, Options, measured, summary
from headrace.errors import InvalidRequest


@click.command(name="chat")
@target_options
@click.option("--system", help="A system message to begin with.")
@click.option("--json", "as_json", is_flag=True, help="Each answer with its timeline, as one object a line.")
def command(target: Target, options: Options, system: str | None, as_json: bool) -> None:
    """Talk to the model, turn by turn; an empty line or Ctrl-D ends it.

    Under each answer: TTFT, tokens/s, which worker prefilled, and how much of the prompt was cached.
    """
    asyncio.run(_converse(target, options, system, as_json))


async def _converse(target: Target, options: Options, system: str | None, as_json: bool) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    async with target.client() as client:
        while question := await asyncio.to_thread(_ask):
            messages.append({"role": "user", "content": question})
            answer = await _turn(client, messages, options, as_json)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


async def _turn(client: AsyncClient, messages: list[dict[str, str]], options: Options, as_json: bool) -> str | None:
    """The answer's text, or None when the router refused this turn: the conversation goes on without it."""
    try:
        answer = await printed(measured(client.chat(messages, **options.given())), quiet=as_json)
    except InvalidRequest as error:
        click.echo(f"refused: {error.message}", err=True)
        return None
    click.echo(json.dumps(asdict(answer)) if as_json else click.style(summary(answer), dim=True))
    return answer.text


def _ask() -> str:
    """The next line, without its end; empty at the end of the input."""
    if sys.stdin.isatty():
        click.echo("\n> ", nl=False)
    return sys.stdin.readline().strip()
