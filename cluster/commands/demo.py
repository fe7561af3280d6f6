"""`headrace demo`: one prefill and one decode worker on this machine's CPU, asked two questions.

It fails (status 1) when the first answer is not the one that the model gives by itself, or when the prompt was not
computed by the prefill worker: then what is on the screen is not what Headrace promises.
"""

import asyncio
import json
import pathlib
from collections.abc import Sequence
from dataclasses import asdict

import click
import yaml
from rich.console import Console
from rich.markup import escape

from cluster.commands.up import detach, reporting, say_ready
from cluster.launch import Report, running
from cluster.model_cache import cache_folder
from cluster.session import Session, SessionFolder
from cluster.signals import Interrupted, Signals
from cluster.talk import Answer, AsyncClient, Options, measured, timeline
from headrace.config import ClusterConfig, EngineConfig, HandoffConfig, PoolConfig, RouterConfig
from headrace.errors import InternalError
from headrace.ports import port_is_free
from workers.models import fetch

MODEL = "smollm2-135m-instruct"
QUESTIONS = ("What is the capital of France?", "Name one famous tower there.")
EXPECTED = "The capital of France is Paris."
GREEDY = Options(max_tokens=48, temperature=0.0)


@click.command(name="demo")
@click.option("--keep", is_flag=True, help="Leave it serving, and say how to talk to it.")
@click.option("--model", type=click.Path(path_type=pathlib.Path), help="Its folder; fetched when there is none yet.")
@click.option("--json", "as_json", is_flag=True, help="Progress and answers as JSON lines.")
def command(keep: bool, model: pathlib.Path | None, as_json: bool) -> None:
    """Serve SmolLM2-135M-Instruct through one prefill and one decode worker here, and ask it two questions.

    Prints where each request went: queue, prefill, the blocks handed over, decode, TTFT and TPOT.
    """
    console = Console(stderr=as_json)
    folder = fetch.fetch(MODEL, model or default_folder())
    config = demo_config(folder)
    if keep:
        session = detach(_written(config), as_json, console)
        answers = asyncio.run(_ask(session))
    else:
        with reporting(as_json, console) as report:
            answers = asyncio.run(_serve_and_ask(config, report))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        if as_json:
            click.echo(json.dumps({"question": question, **asdict(answer)}))
        else:
            _print(console, question, answer)
    check(answers)
    if keep:
        say_ready(session, as_json, console)
        if not as_json:
            console.print(_curl(session), highlight=False, soft_wrap=True)


def default_folder() -> pathlib.Path:
    """models/ of where we are when it has the model, else the user's cache."""
    here = pathlib.Path("models") / MODEL
    if (here / "config.json").is_file():
        return here
    return cache_folder(MODEL)


def demo_config(model: pathlib.Path) -> ClusterConfig:
    """One prefill and one decode worker; every prompt is handed over, however short."""
    router = RouterConfig()
    return ClusterConfig(
        name="demo",
        model=str(model.resolve()),
        served_model_name=MODEL,
        pools={"prefill": PoolConfig(role="prefill"), "decode": PoolConfig(role="decode")},
        engine=EngineConfig(kv_bytes=128 * 2**20, max_num_seqs=8),
        handoff=HandoffConfig(local_prefill_max_tokens=0),
        router=RouterConfig(
            http_port=router.http_port if port_is_free(router.host, router.http_port) else 0,
            grpc_port=router.grpc_port if port_is_free(router.host, router.grpc_port) else 0,
        ),
    )


def check(answers: Sequence[Answer]) -> None:
    """InternalError when the answers are not what this machine has to show."""
    first, second = answers
    if first.text.strip() != EXPECTED:
        raise InternalError(f"the first answer must be {EXPECTED!r}, it is {first.text!r}")
    for number, answer in enumerate(answers, 1):
        if not answer.path.prefill_worker.startswith("prefill-"):
            raise InternalError(f"prompt {number} was computed by {answer.path.decode_worker} alone, not handed over")
    if not second.cached_tokens:
        raise InternalError("the second turn found nothing of the first one in the cache")


def _written(config: ClusterConfig) -> pathlib.Path:
    """The configuration as a file that `headrace up` in the background reads."""
    path = SessionFolder(config.name).path / "demo.yaml"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    return path


async def _serve_and_ask(config: ClusterConfig, report: Report) -> list[Answer]:
    signals = Signals(report)
    try:
        async with running(config, "", SessionFolder(config.name), signals.report) as cluster:
            return await _ask(cluster.session)
    except asyncio.CancelledError:
        if signals.received is None:
            raise
        raise Interrupted(signals.received) from None


async def _ask(session: Session) -> list[Answer]:
    answers: list[Answer] = []
    messages: list[dict[str, str]] = []
    async with AsyncClient(session.grpc_address, tls=session.client_tls) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            async for piece in measured(client.chat(messages, **GREEDY.given())):
                if isinstance(piece, Answer):
                    answers.append(piece)
                    messages.append({"role": "assistant", "content": piece.text})
    return answers


def _print(console: Console, question: str, answer: Answer) -> None:
    console.print(f"\n[bold]> {question}[/]\n{escape(answer.text.strip())}", highlight=False)
    for what, how in timeline(answer):
        console.print(f"  [cyan]{what:<9}[/]{how}", highlight=False)


def _curl(session: Session) -> str:
    body = {"model": session.model_name, "messages": [{"role": "user", "content": QUESTIONS[0]}]}
    return f"curl {session.http_url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"
