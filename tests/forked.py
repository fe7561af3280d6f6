"""Processes that are forked from one server, which has torch and our modules loaded: they begin in milliseconds, where a
new interpreter takes seconds of a core. Nothing runs in that server, so nothing is forked in the middle of anything."""

import asyncio
import contextlib
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from subprocess import TimeoutExpired

import pytest

LOADED = (
    *("pytest", "workers.__main__", "workers.ranks.process", "workers.ranks.runner"),
    *("tests.contract.toy_runner", "tests.model_steps", "tests.rank_processes"),
)
_starting = threading.Lock()


def server() -> ForkServerContext:
    """For processes that compute on one thread each: how many there are is read as torch is loaded."""
    context = multiprocessing.get_context("forkserver")
    with _starting, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        context.set_forkserver_preload(list(LOADED))
        forkserver.ensure_running()
    return context


def _begun(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """Its exit status can be read once, and the library reads those of all that it remembers whenever one begins: it is to
    remember none whose end is awaited here."""
    its = server().Process(target=target, args=arguments, daemon=True)
    with _starting:
        its.start()
        process._children.discard(its)  # type: ignore[attr-defined]
    return its


class Command:
    """`python -m workers`, as asyncio.subprocess.Process would have it; its output is read from `stdout`."""

    def __init__(self, its: ForkServerProcess, stdout: asyncio.StreamReader) -> None:
        self.stdout = stdout
        self._process = its
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(its.sentinel, self._is_over)

    @classmethod
    async def worker(cls, arguments: Sequence[str], environment: Mapping[str, str], log: pathlib.Path) -> "Command":
        reader, writer = multiprocessing.Pipe(duplex=False)
        its = _begun(_worker, tuple(arguments), dict(environment), str(log), writer)
        writer.close()
        stdout = asyncio.StreamReader()
        pipe = os.fdopen(os.dup(reader.fileno()), "rb")
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), pipe)
        reader.close()
        return cls(its, stdout)

    def _is_over(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        status = self._process.exitcode
        assert status is not None
        self._ended.set_result(status)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        _signal(self.pid, number, is_over=self._ended.done())

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _worker(arguments: Sequence[str], environment: Mapping[str, str], log: str, said: Connection) -> None:
    from workers.__main__ import _run_and_end

    os.environ.clear()
    os.environ.update(environment)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(said.fileno(), 1)
    said.close()
    sys.argv = ["workers", *arguments]
    _run_and_end()


class Child:
    """A child as subprocess.Popen has it. A thread waits for its end: whoever asks is told, from any thread."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._process = _begun(target, *arguments)
        self._status = 0
        self._over = threading.Event()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        self._process.join()
        status = self._process.exitcode
        assert status is not None
        self._status = status
        self._over.set()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._status if self._over.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._over.wait(timeout):
            raise TimeoutExpired(["a forked process"], timeout or 0.0)
        return self._status

    def send_signal(self, number: int) -> None:
        _signal(self.pid, number, is_over=self._over.is_set())

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _signal(pid: int, number: int, *, is_over: bool) -> None:
    """The server reaps it, and says so a moment later."""
    with contextlib.suppress(ProcessLookupError):
        if not is_over:
            os.kill(pid, number)


def spawn_local(address: str, token: str, ranks: range) -> list[Child]:
    """In the place of workers.ranks.rendezvous.spawn_local."""
    return [Child(_rank, address, token, rank) for rank in ranks]


def _rank(address: str, token: str, rank: int) -> None:
    from workers.ranks.process import TOKEN_VARIABLE, main

    os.environ[TOKEN_VARIABLE] = token
    sys.argv = ["workers.ranks.process", address, str(rank)]
    main()
