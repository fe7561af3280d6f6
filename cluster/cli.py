"""The `headrace` command. Each subcommand is a file in cluster/commands, imported only when it runs.

Errors are one line on stderr and a status that is not 0: 1 when something failed, 2 when the command line is wrong,
130 (Ctrl-C) or 143 (SIGTERM) when it was interrupted.
"""

import importlib
import sys

import click
from click.exceptions import NoArgsIsHelpError

from headrace.errors import HeadraceError

COMMANDS = {
    "up": "Start a cluster and keep it running.",
    "down": "End a cluster that `up` started, and only that.",
    "controller": "Keep a controller on a Ray cluster that others run.",
    "autoscale": "What the autoscaler sees and wants, and why it did what it did.",
    "canary": "Begin a second revision, compare it with what serves, keep it or end it.",
    "drain": "Let the workers of one host finish, before it goes.",
    "status": "Show the pools, their workers and what they do.",
    "console": "Say where the operator's page is, or serve it from here.",
    "why": "Explain where a request ran: what was compared, predicted, and what happened.",
    "replay-decision": "Make logged placements again, and say which differ.",
    "profile": "Trace a worker at work, and say what each of its steps cost.",
    "chat": "Talk to the model.",
    "generate": "Complete one prompt.",
    "model": "Fetch a model into a local folder.",
    "kernels": "Compile the GPU kernels of a model, on a machine without a GPU, or list them.",
    "simulate": "Replay a trace on virtual workers, with the production router and schedulers.",
    "plan": "Say how many GPUs traffic needs, checked by simulation, and what they cost.",
    "bench": "Send load, open-loop, and say what came of it: latencies, goodput, the knee.",
    "demo": "Serve a small model here, ask it two questions, and show where each request went.",
}


class _LazyGroup(click.Group):
    """Knows the names and first lines of its commands without importing them: --help answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"cluster.commands.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headrace")
def cli() -> None:
    """Serves large language models with prefill and decode on separate pools."""


def main() -> None:
    """The entry point: errors become one line and a status."""
    try:
        status = cli.main(prog_name="headrace", standalone_mode=False)
    except NoArgsIsHelpError as error:
        click.echo(error.format_message())
        status = error.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "headrace"
        _say(f"{error.format_message().removesuffix('.')} (see `{where} --help`)")
        status = error.exit_code
    except click.ClickException as error:
        _say(error.format_message())
        status = error.exit_code
    except click.Abort:
        _say("interrupted")
        status = 130
    except HeadraceError as error:
        _say(error.message)
        status = 1
    except OSError as error:
        if error.filename is None:
            raise  # no file that somebody named
        _say(f"cannot use {error.filename}: {error.strerror}")
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


def _say(message: str) -> None:
    click.echo(f"headrace: {' '.join(message.split())}", err=True)


if __name__ == "__main__":
    main()
