"""`headrace plan`: how many GPUs a model and its traffic need, checked by simulation, with its cost."""

import json
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING

import click
from rich.console import Console

from cluster.commands.screen import screen
from headrace.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from cluster.planning.shapes import ModelSpec


@click.command(name="plan")
@click.argument("file", type=click.Path(path_type=pathlib.Path))
@click.option("--json", "as_json", is_flag=True, help="The whole plan as JSON on stdout, instead of tables.")
@click.option("--html", "html_path", type=click.Path(path_type=pathlib.Path), help="Write it as one page of HTML, too.")
@click.option("--no-simulation", is_flag=True, help="Predict alone: a second instead of half a minute, and less sure.")
def command(file: pathlib.Path, as_json: bool, html_path: pathlib.Path | None, no_simulation: bool) -> None:
    """Say how many GPUs traffic needs.

    FILE says which model, which GPUs at which price, what traffic and which SLO; examples/plan.yaml is one. The plan is
    simulated with production's router and schedulers, and its pools grow until the SLO holds there.
    """
    from cluster.planning import asked, page, plan, plan_json, show

    wanted = asked.load(file)
    if no_simulation:
        wanted = wanted.model_copy(update={"simulate": asked.SimulateAsked(requests=0, seed=wanted.simulate.seed)})
    notes = Console(stderr=True)
    with notes.status("planning") as status:
        made = plan.make(wanted, _model(wanted.model, file.parent), say=status.update)
    found = plan_json.as_json(made)
    if html_path is not None:
        _write(html_path, page.page(found))
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        show.show(made, screen())
    if not made.chosen.holds:
        raise ConfigError(made.warnings[0])


def _model(name: str, beside: pathlib.Path) -> "ModelSpec":
    """A folder or file where the plan is, a shape that is known, or a hub id, of which config.json is fetched."""
    from cluster.planning import shapes

    path = beside / name
    if name and path.exists():
        if path.is_dir() and not (path / "config.json").is_file():
            raise ConfigError(f"model: {path} holds no config.json")
        return shapes.read(path)
    found = shapes.known(name)
    if found is not None:
        return found
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ConfigError(f"model: {name} is no file here, nor a hub id; known shapes are {', '.join(shapes.KNOWN)}")
    from huggingface_hub import hf_hub_download

    try:
        fetched = pathlib.Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # whatever the hub's client raises: no network, no such model, no permission
        raise CheckpointError(
            f"cannot fetch the config.json of {name} ({type(error).__name__}): give its path, or one of "
            f"{', '.join(shapes.KNOWN)}"
        ) from error
    return shapes.read(fetched, name)


def _write(path: pathlib.Path, text: str) -> None:
    """Whole or not at all."""
    try:
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
