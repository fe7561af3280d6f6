"""A real router process beside null workers, what these say, and what is waited for."""

import asyncio
import json
import pathlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

import grpc
import httpx
import openai
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.values import FinishReason, RequestKey, Timeline, Usage
from tests.null_worker import NullWorker, worker_info
from tests.unit.router.checkpoints import byte_level, write

START_SECONDS = 60.0
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class RunningRouter:
    process: asyncio.subprocess.Process
    http: str
    grpc: str

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def tiny_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """What a router reads of a checkpoint: words and limits."""
    write(folder, byte_level())
    shape = {"max_position_embeddings": CONTEXT, "vocab_size": 500}
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def tokenizer_digest(folder: pathlib.Path) -> str:
    return blake2b((folder / "tokenizer.json").read_bytes(), digest_size=16).hexdigest()


def null_info(folder: pathlib.Path, **changes: object):  # type: ignore[no-untyped-def]
    """A null worker's card that a router of this checkpoint accepts."""
    info = worker_info(tokenizer=tokenizer_digest(folder), **changes)  # type: ignore[arg-type]
    return replace(info, capacity=replace(info.capacity, max_context_tokens=CONTEXT))


def sdk_of(router: RunningRouter, **options: Any) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none", http_client=http, **options)


def write_config(
    model: pathlib.Path, config_path: pathlib.Path, sections: Mapping[str, object] | None = None, **router: object
) -> None:
    """`sections` are the file's other ones."""
    config = {
        "model": str(model),
        "served_model_name": "tiny",
        "pools": {"all": {"role": "unified"}},
        "router": {"http_port": 0, "grpc_port": 0, "heartbeat_seconds": 0.1, **router},
        **(sections or {}),
    }
    config_path.write_text(yaml.safe_dump(config), encoding="utf-8")


@asynccontextmanager
async def running_router(
    model: pathlib.Path,
    config_path: pathlib.Path,
    workers: Sequence[str],
    sections: Mapping[str, object] | None = None,
    **router: object,
) -> AsyncIterator[RunningRouter]:
    """`python -m router`, ended by SIGTERM; it must end clean, unless the test killed it."""
    write_config(model, config_path, sections, **router)
    flags = [part for address in workers for part in ("--worker", address)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", str(config_path), *flags, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("serving tiny "), line
        places = dict(word.split("=") for word in line.split()[2:])
        yield RunningRouter(process, f"http://{places['http']}", places["grpc"])
        if process.returncode is None:
            process.terminate()
        assert await process.wait() in (0, -signal.SIGKILL)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


T = TypeVar("T")


async def soon(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(20):
        return await awaitable


async def until_health(router: RunningRouter, status: int) -> None:
    async with asyncio.timeout(20), grpc.aio.insecure_channel(router.grpc) as channel:
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            if answer.status == status:
                return


def say(worker: NullWorker, key: RequestKey, token_ids: list[int], *, start: int = 0, end: bool = True) -> None:
    """The worker says tokens one by one, of one sample, from number `start` on."""
    for position, token_id in enumerate(token_ids, start + 1):
        last = end and position == start + len(token_ids)
        worker.emit(
            key,
            [token_id],
            num_generated=position,
            finish=FinishReason.LENGTH if last else None,
            usage=Usage(3, cached_tokens=2) if position == 1 else None,
            timeline=Timeline(prefill_worker="p9") if last else None,
        )
