"""Copies of the router before workers that have everything but a model: what tests of several routers stand on.

The workers are real ones, in this process, with executors in memory whose steps take time; they publish to a real Redis.
The routers are real processes. `Balancer` goes from one to the next, as a plain one before them would.
"""

import pathlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

import httpx
from prometheus_client.parser import text_string_to_metric_families

from headrace import metrics
from headrace.config import EngineConfig
from headrace.values import Role
from tests.chaos.stage import until
from tests.e2e.routers import CONTEXT, START_SECONDS, RunningRouter, running_router, tokenizer_digest
from tests.unit.workers.memory import MemoryExecutor
from tests.unit.workers.rig import COMPATIBILITY, HANDOFF, IDENTITY, Rig, a_worker
from workers.scheduling.plan import StepPlan, StepResult

BLOCK = 16
ENGINE = EngineConfig(block_size=BLOCK, max_num_seqs=32, max_step_tokens=512, max_waiting=256)


class Paced(MemoryExecutor):
    """Steps take time, by what they compute; tokens are ones that the routers' tokenizer knows."""

    def __init__(self, num_blocks: int, base_seconds: float, token_seconds: float) -> None:
        super().__init__(num_blocks, BLOCK)
        self.base_seconds = base_seconds
        self.token_seconds = token_seconds

    def _step(self, plan: StepPlan) -> StepResult:
        seconds = self.base_seconds + self.token_seconds * sum(work.num_tokens for work in plan.work)
        time.sleep(seconds)
        return replace(super()._step(plan), seconds=seconds)

    def _draw(self, *arguments: object) -> int:
        return super()._draw(*arguments) % 200 + 3  # type: ignore[arg-type]


@asynccontextmanager
async def a_pool(
    checkpoint: pathlib.Path,
    redis_url: str,
    cluster: str,
    *,
    num_prefill: int = 3,
    num_decode: int = 2,
    num_blocks: int = 400,
    base_seconds: float = 1e-3,
    token_seconds: float = 2e-5,
) -> AsyncIterator[dict[str, Rig]]:
    same = replace(COMPATIBILITY, tokenizer=tokenizer_digest(checkpoint), block_size=BLOCK)
    identity = replace(IDENTITY, compatibility=same, vocab_size=500, max_context_tokens=CONTEXT)
    names = [f"p{number}" for number in range(num_prefill)] + [f"d{number}" for number in range(num_decode)]
    async with AsyncExitStack() as ends:
        workers = {}
        for name in names:
            workers[name] = await ends.enter_async_context(
                a_worker(
                    name,
                    role=Role.PREFILL if name.startswith("p") else Role.DECODE,
                    engine=ENGINE,
                    handoff=HANDOFF.model_copy(update={"transfer_seconds": 10.0, "pin_seconds": 10.0}),
                    identity=identity,
                    executor=Paced(num_blocks, base_seconds, token_seconds),
                    redis_url=redis_url,
                    redis_budget_seconds=2.0,
                    cluster=cluster,
                )
            )
        yield workers


@asynccontextmanager
async def a_router(
    checkpoint: pathlib.Path, folder: pathlib.Path, redis_url: str, cluster: str, name: str, **options: object
) -> AsyncIterator[RunningRouter]:
    sections = {
        "name": cluster,
        "redis": {"url": redis_url, "budget_seconds": 2.0},
        "handoff": {"local_prefill_max_tokens": 0},
    }
    async with running_router(checkpoint, folder / f"{name}.yaml", [], sections, **options) as router:
        yield router


@dataclass
class Balancer:
    """From one router to the next; a router that cannot be reached is passed over."""

    http: httpx.AsyncClient
    routers: list[str] = field(default_factory=list)
    _turn: Iterator[int] = field(default_factory=count)

    async def ask(self, prompt: Sequence[int], max_tokens: int = 2) -> dict[str, int]:
        """The answer's prompt tokens, and how many of them were cached."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True}
        turn = next(self._turn)
        for at in range(turn, turn + len(self.routers)):
            try:
                reply = await self.http.post(f"{self.routers[at % len(self.routers)]}/v1/completions", json=body)
            except httpx.TransportError:
                continue
            assert reply.status_code == 200, reply.text
            usage = reply.json()["usage"]
            return {"asked": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}
        raise AssertionError("no router answers")


async def samples(http: httpx.AsyncClient, router: str) -> dict[tuple[str, str], float]:
    """What the router exposes, by (name, value of its one label)."""
    text = (await http.get(f"{router}/metrics")).text
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def until_ready(http: httpx.AsyncClient, router: str) -> None:
    """As a balancer waits for it: before, it refuses what it could serve a moment later."""

    async def ready() -> bool:
        return (await http.get(f"{router}/ready")).status_code == 200

    await until(ready, START_SECONDS)


async def until_in_step(http: httpx.AsyncClient, router: str, workers: dict[str, Rig]) -> None:
    """The router has a session to every worker, and its mirror holds what they hold."""

    async def in_step() -> bool:
        found = await samples(http, router)
        num_ready = sum(value for (name, _), value in found.items() if name == metrics.WORKERS_READY)
        held = {name: float(rig.counts.cached) for name, rig in workers.items()}
        return num_ready == len(workers) and all(
            found.get((metrics.INDEX_BLOCKS, w), 0.0) == n for w, n in held.items()
        )

    await until(in_step, START_SECONDS)


def shared_prefix_prompts(
    seed: int, num_prompts: int, num_groups: int = 24, shared_blocks: int = 12
) -> list[list[int]]:
    """Prompts that begin like others of their group and end like no other; some groups are asked for more often."""
    random = Random(seed)
    prefixes = [[random.randrange(3, 200) for _ in range(shared_blocks * BLOCK)] for _ in range(num_groups)]
    weights = [1 / (1 + number) ** 0.7 for number in range(num_groups)]
    return [
        prefix + [random.randrange(3, 200) for _ in range(2 * BLOCK + 5)]
        for prefix in random.choices(prefixes, weights, k=num_prompts)
    ]
