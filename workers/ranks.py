"""One Executor over tp × pp ranks: rank 0 here, on threads of its own; the others in processes that joined.

On one host, with the other ranks as child processes:

    executor = build_executor(spec)

With ranks that come from elsewhere (Ray actors):

    rendezvous = listen(spec.host, spec.rendezvous_token)          # in rank 0's process
    rank_main(rendezvous.address, spec.rendezvous_token, rank)     # in each other one; blocks until the worker ends
    executor = build_executor(spec, rendezvous)                    # in rank 0's process; blocks until all are warm

build_executor blocks (weights are loaded, graphs warmed): call it off the event loop.
"""

import subprocess
from dataclasses import dataclass

from workers.executor import Executor
from workers.rank import MakeRunner, rank_main
from workers.spec import WorkerSpec

__all__ = ["RankLimits", "Rendezvous", "build_executor", "listen", "rank_main", "spawn_local"]


@dataclass(frozen=True, slots=True)
class RankLimits:
    """How long a rank may take, in seconds, before its worker is lost. `silent`: not answering a ping, hence stopped."""

    start_seconds: float = 600.0
    step_seconds: float = 60.0
    silent_seconds: float = 10.0
    close_seconds: float = 5.0


class Rendezvous:
    """Where the other ranks join. Open from listen() until build_executor took it or close()."""

    @property
    def address(self) -> str:
        """What rank_main needs: "host:port"."""
        raise NotImplementedError

    def close(self) -> None:
        """Idempotent; build_executor closes it too."""


def listen(host: str, token: str) -> Rendezvous:
    """Opens the place where ranks join. `token` is the secret that they must know; not empty."""
    raise NotImplementedError


def spawn_local(address: str, token: str, ranks: range) -> list[subprocess.Popen[bytes]]:
    """Starts rank_main for each of `ranks` as a child process of this host. They end when rank 0 does, however it
    does."""
    raise NotImplementedError


def build_executor(
    spec: WorkerSpec,
    rendezvous: Rendezvous | None = None,
    *,
    make_runner: MakeRunner | None = None,
    limits: RankLimits | None = None,
) -> Executor:
    """The executor of `spec`, all ranks joined, loaded and warm. Without a rendezvous the other ranks are child
    processes. `make_runner` None: workers.runner's.

    Raises what a rank failed with (CheckpointError, ConfigError, IncompatiblePeer, …) or WorkerLost when one is gone
    or late; nothing is left running then.
    """
    raise NotImplementedError
