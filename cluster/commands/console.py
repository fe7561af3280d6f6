"""`headrace console`: the operator's page: where it is, or served from here for a cluster that others run."""

import asyncio
import contextlib
import pathlib
import webbrowser

import click

from cluster.commands.status import described, read
from cluster.config_place import load
from cluster.console.recording import read_recording
from cluster.console.start import replayed, served
from router.keyring import read_keys


@click.command(name="console")
@click.option("--cluster", help="The cluster's name; not needed when there is one.")
@click.option(
    "--config",
    type=click.Path(path_type=pathlib.Path),
    help="Instead: serve it for a cluster that others run, by its headrace.yaml; Redis also by $HEADRACE_REDIS_URL.",
)
@click.option("--recorded", type=click.Path(path_type=pathlib.Path), help="Instead: show again what a console saved.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where it is served, with --config.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="With --config; any free one unless given.")
@click.option(
    "--api-keys-file",
    type=click.Path(path_type=pathlib.Path),
    help="With --config: keys of the operator, one a line; the first is shown to routers.",
)
@click.option(
    "--plan", type=click.Path(path_type=pathlib.Path), help="With --config: a plan as JSON, to be laid beside reality."
)
@click.option("--open", "in_browser", is_flag=True, help="Open it in the browser of this machine.")
def command(
    cluster: str | None,
    config: pathlib.Path | None,
    recorded: pathlib.Path | None,
    host: str,
    port: int,
    api_keys_file: pathlib.Path | None,
    plan: pathlib.Path | None,
    in_browser: bool,
) -> None:
    """Say where the console is: pools, load, hand-offs, requests and decisions, live in a browser.

    `headrace up` and `headrace controller` serve it. With --config or --recorded it is served from here, until Ctrl-C;
    without API keys it answers to this machine alone.
    """
    if recorded is not None:
        _until_interrupted(replayed(read_recording(recorded), host, port), in_browser)
        return
    if config is None:
        session = read(cluster)
        if session.console_url:
            _say(session.console_url, in_browser)
            return
        config = pathlib.Path(session.config_path)
        settings, redis_url = load(config), session.redis_url
    else:
        settings = load(config)
        redis_url = described(settings, config).redis_url
    if plan is not None:
        settings = settings.model_copy(update={"console": settings.console.model_copy(update={"plan": str(plan)})})
    keys = read_keys(api_keys_file, "--api-keys-file") if api_keys_file is not None else ()
    _until_interrupted(served(settings, redis_url, host, port, keys), in_browser)


def _until_interrupted(page: contextlib.AbstractAsyncContextManager[str], in_browser: bool) -> None:
    async def serve() -> None:
        async with page as url:
            _say(url, in_browser)
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


def _say(url: str, in_browser: bool) -> None:
    click.echo(url)
    if in_browser:
        webbrowser.open(url)
