"""Where tables are shown."""

from rich.console import Console

TABLE_WIDTH = 150


def screen() -> Console:
    """Wide enough for what tables say. In a pipe, as of `kubectl exec`, nobody knows a width, and cells would be cut to fit
    80 columns; on a terminal that is narrower a line goes on in the next."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    return console
