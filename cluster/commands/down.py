"""`headrace down`: ends what `headrace up` started, by its session folder, and nothing else."""

import json
import os
import signal

import click

from cluster.child import end_leftovers
from cluster.session import UP, Session, SessionFolder, find, wait_unlocked
from headrace.errors import InternalError

CONTROLLER_SECONDS = 60.0


@click.command(name="down")
@click.option("--cluster", help="The cluster's name; not needed when there is one.")
@click.option("--timeout", "seconds", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds.")
@click.option("--json", "as_json", is_flag=True, help="How it ended, as one object.")
def command(cluster: str | None, seconds: float, as_json: bool) -> None:
    """End a cluster: the router first, then workers (drained), controller, Ray and the embedded Redis."""
    folder = find(cluster)
    session = folder.read()
    if folder.running and session is not None:
        _end(folder, session, seconds)
        how = "ended"
    else:
        how = _clean_up(folder, session)
    click.echo(json.dumps({"cluster": folder.cluster, "how": how}) if as_json else f"{folder.cluster}: {how}")


def _end(folder: SessionFolder, session: Session, seconds: float) -> None:
    os.kill(session.pid, signal.SIGTERM)
    if not wait_unlocked(folder.lock(UP), seconds):
        raise InternalError(
            f"{folder.cluster}: process {session.pid} has not ended within {seconds:g} s; see {folder.log(UP)}"
        )


def _clean_up(folder: SessionFolder, session: Session | None) -> str:
    """After an `up` that was killed: ends what it left behind. A Ray of its own ended with it."""
    workers = ["workers"] if session is not None and session.ray_address and _stop_workers(session) else []
    left = [*workers, *end_leftovers(folder)]
    return f"its `up` was gone already; ended what it left: {', '.join(left) or 'nothing'}"


def _stop_workers(session: Session) -> bool:
    from cluster import ray_session

    ray_session.connect(session.ray_address, session.cluster)
    try:
        return ray_session.stop_controller(session.cluster, CONTROLLER_SECONDS)
    finally:
        ray_session.stop()
