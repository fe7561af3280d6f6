"""`headrace kernels`: the GPU kernels of a model, compiled on a machine without a GPU, or listed."""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.table import Table

from cluster.commands.screen import screen
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.values import ParallelLayout

if TYPE_CHECKING:
    from kernels.ahead import Launched

F = TypeVar("F", bound=Callable[..., None])
DTYPES = ("bfloat16", "float16", "float32")


@click.group(name="kernels")
def command() -> None:
    """The GPU kernels that workers of a model launch."""


def _of_what(function: F) -> F:
    """Whose kernels: what a constant, a tile or an alignment of one follows from."""
    options = (
        click.argument("models", nargs=-1, required=True),
        click.option("--card", default="h200", show_default=True, help="By whose tiles (kernels/tuned)."),
        click.option("--tp", "tps", type=click.IntRange(1), multiple=True, default=(1,), show_default=True),
        click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True),
        click.option("--block-size", type=click.IntRange(1, 1024), default=32, show_default=True),
        click.option(
            "--max-num-seqs",
            type=click.IntRange(1, 4096),
            default=256,
            show_default=True,
            help="Of workers that have the most.",
        ),
        click.option("--max-step-tokens", type=click.IntRange(1, 2**20), default=8192, show_default=True),
        click.option("--deterministic", is_flag=True, help="Those of `engine.deterministic` too."),
        click.option("--json", "as_json", is_flag=True, help="A line for each."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@command.command(name="list")
@_of_what
def list_them(**options: Any) -> None:
    """What workers of MODELS launch: checkpoint folders, of which config.json is enough, or shapes that are known."""
    _show(list(launched(compile_them=False, **_without_json(options))), as_json=options["as_json"])


@command.command(name="compile")
@click.option(
    "--out",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    required=True,
    help="The folder: for HEADRACE_KERNELS, with TRITON_CACHE_MANAGER=kernels.shipped:ShippedCache.",
)
@_of_what
def compile_them(out: pathlib.Path, **options: Any) -> None:
    """Compile what workers of MODELS launch. It takes a C compiler, and no GPU; what is in the folder already is kept."""
    from triton import knobs

    out.mkdir(parents=True, exist_ok=True)
    with knobs.cache.scope(), knobs.compilation.scope():  # put back at the end
        knobs.cache.dir = str(out.resolve())
        knobs.cache.manager_class = None
        knobs.compilation.store_binary_only = True
        _show(list(launched(compile_them=True, **_without_json(options))), as_json=options["as_json"])


def _without_json(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "as_json"}


def launched(
    *,
    models: tuple[str, ...],
    card: str,
    tps: tuple[int, ...],
    deterministic: bool,
    compile_them: bool,
    **engine: Any,
) -> "Iterator[Launched]":
    """Each kernel of each model and layout, as kernels.ahead says it."""
    from kernels.ahead import CARDS, without_device
    from kernels.tuning import TUNED, Tuning
    from workers.models.checkpoint import Checkpoint
    from workers.ranks.ahead import launch_all

    if card not in CARDS:
        raise ConfigError.out_of_range("--card", card, f"one of {', '.join(CARDS)}")
    capability, multiprocessors = CARDS[card]
    configs = [Checkpoint.open(_folder(model)).config for model in models]
    for config in configs:
        for tp in tps:
            for fixed in (False, True)[: 1 + deterministic]:
                settings = EngineConfig(device="cuda", deterministic=fixed, **engine)
                found: list[Launched] = []
                with without_device(capability, found.append, compile_them=compile_them):
                    tuning = Tuning.read(TUNED / f"{card}.json")
                    launch_all(config, ParallelLayout(tp=tp), settings, tuning, multiprocessors)
                yield from found


def _folder(model: str) -> str:
    """Of a shape that is known by name, else what was said."""
    import kernels

    known = pathlib.Path(kernels.__file__).parent / "shapes" / model
    return str(known) if known.is_dir() else model


def _show(found: "list[Launched]", *, as_json: bool) -> None:
    if as_json:
        for one in found:
            click.echo(json.dumps({"kernel": one.kernel, "arguments": one.arguments, "cached": one.cached}))
        return
    table = Table("kernel", "variants", "compiled", "there", box=None)
    for name in sorted({one.kernel for one in found}):
        its = [one for one in found if one.kernel == name]
        distinct = len({one.arguments for one in its})
        fresh, there = (sum(one.cached is cached for one in its) for cached in (False, True))
        table.add_row(name, str(distinct), str(fresh), str(there))
    screen().print(table)
