"""`python -m workers` as a process of its own, for tests."""

import asyncio
import os
import pathlib
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from headrace.v1 import control_pb2_grpc
from headrace.values import PrefillTarget
from tests.forked import Command


@dataclass
class WorkerProcess:
    """A worker that said it is ready. `log` is where its stderr goes."""

    process: asyncio.subprocess.Process | Command
    worker_id: str
    address: str
    log: pathlib.Path
    generation: int = 1

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget(self.worker_id, self.generation, self.address)

    @asynccontextmanager
    async def control(self) -> AsyncIterator[control_pb2_grpc.ControlStub]:
        async with grpc.aio.insecure_channel(self.address) as channel:
            yield control_pb2_grpc.ControlStub(channel)


@asynccontextmanager
async def a_worker_process(
    model: pathlib.Path,
    folder: pathlib.Path,
    worker_id: str,
    *options: str,
    generation: int = 1,
    environment: Mapping[str, str] | None = None,
    forked: bool = False,
) -> AsyncIterator[WorkerProcess]:
    """`forked`: by `main` of the module in a process that has all loaded, not by a new interpreter."""
    log = folder / f"{worker_id}.log"
    arguments = ("--model", str(model), "--worker-id", worker_id, "--generation", str(generation), *options)
    own = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    process: asyncio.subprocess.Process | Command
    if forked:
        process = await Command.worker(arguments, own, log)
    else:
        command = (sys.executable, "-m", "workers", *arguments)
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=stderr, env=own
            )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode().split()
        assert line[:2] == ["ready", worker_id], log.read_text()
        yield WorkerProcess(process, worker_id, line[2], log, generation)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
