"""`headrace model fetch`: a model as an ordinary local folder."""

import json
import pathlib

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@click.group(name="model")
def command() -> None:
    """Models on this machine."""


@command.command()
@click.argument("source")
@click.option("--to", "target", type=click.Path(path_type=pathlib.Path), help="The folder; models/NAME unless given.")
@click.option("--json", "as_json", is_flag=True, help="The folder and its revision, as one object.")
def fetch(source: str, target: pathlib.Path | None, as_json: bool) -> None:
    """Fetch SOURCE into a folder: config, tokenizer, weights and their revision.

    SOURCE is a known name (smollm2-135m-instruct), a .gguf file, a local folder or a hub id. What is there already is
    kept.
    """
    from workers.models import fetch as source_of_models
    from workers.models.checkpoint import Checkpoint

    target = target or pathlib.Path("models") / pathlib.PurePath(source.rstrip("/")).name.removesuffix(".gguf")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        stages: dict[str, TaskID] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(stage, total=total)
            bar.update(stages[stage], completed=done, total=total)

        folder = source_of_models.fetch(source, target, progress)
    revision = Checkpoint.open(folder).revision
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "revision": revision}))
    else:
        click.echo(f"{folder}: revision {revision}")
