"""Both ends of a KvLink, in this process or one of their own, which can be killed and stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from tests.contract.links import (
    WHOLE,
    Hook,
    Implementation,
    filled_pool,
)
from workers.kv.layout import Piece
from workers.kv.links.base import BlockPull, KvLink, PullReceipt
from workers.kv.pool import KvPool

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Process:
    """One end in a process of its own."""

    def __init__(self, role: str, scheme: str, argument: str) -> None:
        command = [sys.executable, "-m", "tests.contract.link_process", role, scheme, argument]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().decode().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Source(Process):
    """Meets `fault` when block `at` has been read: by its own hand, or, where it takes no part, by the reader's, who then
    waits for what comes of it."""

    def __init__(self, scheme: str, kind: Implementation, fault: str = "", at: int = 0) -> None:
        own = {"fault": fault, "at": at} if fault and kind.source_takes_part else {}
        super().__init__("source", scheme, json.dumps(own))
        self.endpoint = self.first_line
        self.hook: Hook | None = None
        if fault and not own:
            self.hook = lambda index: self._meet(fault) if index == at else None

    def _meet(self, fault: str) -> None:
        self.signal(FAULTS[fault])
        threading.Event().wait(5)


def pools_of(kind: Implementation) -> tuple[KvPool, KvPool]:
    """A source's and a target's, of different content."""
    return filled_pool(1, kind.source_device), filled_pool(2, kind.target_device)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Wherever they lie."""
    return torch.equal(one.cpu(), other.cpu())


def await_closed(link: KvLink) -> None:
    """Until it has heard of the other end's end."""
    while not link.closed:
        os.sched_yield()


@contextlib.contextmanager
def served(kind: Implementation, pool: KvPool, target: KvPool, hook: Hook | None = None) -> Iterator[KvLink]:
    server = kind.serve(pool, hook)
    link = kind.link(server.endpoint, target, 10.0, hook)
    try:
        yield link
    finally:
        link.close()
        server.close()


def in_background(link: KvLink, blocks: list[BlockPull], piece: Piece = WHOLE) -> "Future[PullReceipt]":
    outcome: Future[PullReceipt] = Future()

    def pull() -> None:
        try:
            outcome.set_result(link.pull(blocks, piece))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=pull, daemon=True).start()
    return outcome


def await_stopped(peer: Process) -> None:
    """Until the process has stopped."""
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED | os.WNOWAIT)
