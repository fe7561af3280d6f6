"""How the ranks of a worker find rank 0: it listens, they come with the token."""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from subprocess import TimeoutExpired

from headrace.errors import WorkerLost
from workers.kv.channel import Channel, ChannelClosed, Listener
from workers.ranks.messages import Join
from workers.ranks.process import TOKEN_VARIABLE

Child = subprocess.Popen[bytes]


class Rendezvous:
    """Where the other ranks join. Open from listen() until build_executor took it or close().

    Owns the channels of ranks that joined until collect() hands them on.
    """

    def __init__(self, host: str, token: str) -> None:
        self._arrivals: SimpleQueue[tuple[int, Channel] | WorkerLost] = SimpleQueue()
        self._listener = Listener(host, token, self._welcome)
        self.host = host

    @property
    def address(self) -> str:
        """What rank_main needs: "host:port"."""
        return f"[{self.host}]:{self._listener.port}" if ":" in self.host else f"{self.host}:{self._listener.port}"

    def close(self) -> None:
        """Idempotent; build_executor closes it too."""
        self._listener.close()

    def _welcome(self, channel: Channel) -> None:
        try:
            join = pickle.loads(channel.receive())
        except ChannelClosed:
            channel.close()
            return
        self._arrivals.put((join.rank, channel) if isinstance(join, Join) else WorkerLost("a rank sent no Join"))

    def watch(self, rank: int, child: Child) -> None:
        """A child that ends before it joined is not waited for. Its exit status is collected in any case."""

        def wait() -> None:
            code = child.wait()
            self._arrivals.put(WorkerLost(f"the process of rank {rank} ended with {code}", rank=rank, code=code))

        threading.Thread(target=wait, name=f"child:{rank}", daemon=True).start()

    def collect(self, world_size: int, seconds: float) -> dict[int, Channel]:
        """The channels of ranks 1 to world_size - 1; WorkerLost when one ended or does not come within `seconds`."""
        deadline = time.monotonic() + seconds
        joined: dict[int, Channel] = {}
        try:
            while missing := sorted(set(range(1, world_size)) - set(joined)):
                try:
                    arrival = self._arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
                except Empty:
                    raise WorkerLost(f"ranks {missing} did not join within {seconds} s") from None
                if isinstance(arrival, WorkerLost):
                    raise arrival
                rank, channel = arrival
                if rank not in missing:
                    channel.close()
                    raise WorkerLost(f"rank {rank} joined where {missing} were awaited", rank=rank)
                joined[rank] = channel
        except BaseException:
            for channel in joined.values():
                channel.close()
            raise
        finally:
            self.close()
        return joined


def listen(host: str, token: str) -> Rendezvous:
    """Opens the place where ranks join. `token` is the secret that they must know; not empty."""
    return Rendezvous(host, token)


def spawn_local(address: str, token: str, ranks: range) -> list[Child]:
    """Starts rank_main for each of `ranks` as a child process of this host. They end when rank 0 does, however it
    does."""
    environment = os.environ | {TOKEN_VARIABLE: token, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "workers.ranks.process", address]
    return [subprocess.Popen([*command, str(rank)], env=environment, stdin=subprocess.DEVNULL) for rank in ranks]


def end_all(children: Sequence[Child], seconds: float) -> None:
    """Waits until all have ended; those that have not after `seconds` are killed."""
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutExpired:
            child.kill()
            child.wait()
