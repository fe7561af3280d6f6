"""Ranks as Ray actors. Rank 0 carries the engine and its service on an event loop of its own; no token passes through
Ray, which only starts, watches and ends them.

The engine's modules are imported where an actor needs them: the controller names these classes too, and stays without
torch.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import ray

from workers.spec import WorkerSpec


class EngineActor:
    """Rank 0 of one worker. Owns the thread that serves; methods run on other threads of the actor and may block."""

    def __init__(self) -> None:
        self._spec: WorkerSpec | None = None
        self._address: Future[str] = Future()
        self._ended: Future[None] = Future()
        self._stop: Callable[[], None] | None = None

    def open(self, spec: WorkerSpec) -> str:
        """Starts to serve; where the other ranks join. Loading goes on behind it: see ready()."""
        from workers.ranks import listen

        self._spec = spec = _here(spec)
        rendezvous = listen(spec.host, spec.rendezvous_token)
        ...
        return rendezvous.address
