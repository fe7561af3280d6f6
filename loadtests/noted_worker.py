"""A whole worker with random weights that notes what happened when: `python -m workers` but for these two.

    python -m loadtests.noted_worker '{"worker_id": "p", "role": "prefill", "model": FOLDER, "engine": {…}, "notes": FILE}'

Prints `ready <worker id> <address>`. Ends when its input does, and then writes its notes. Every process of a shape draws
the same weights. Times are those of CLOCK_MONOTONIC, which the processes of a machine share; those of steps are the
device's own, between two moments at which both clocks were read.
"""

import asyncio
import json
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import partial, wraps
from typing import Any

import torch
import uvloop

from headrace.config import EngineConfig
from headrace.values import Role, WorkerInfo
from loadtests.one_rank import random_weights
from workers.handoff.peers import Conversation
from workers.handoff.tickets import Source
from workers.kv.layout import ModelShape, SlabLayout
from workers.kv.links.link import Link
from workers.kv.pool import KvPool
from workers.models.checkpoint import Checkpoint
from workers.models.weights import LoadProgress, Wanted
from workers.ranks.answers import Answers
from workers.ranks.build import build_executor
from workers.ranks.rank_runner import Launched, RankRunner
from workers.ranks.runner import make_runner
from workers.scheduling.incoming import Incoming
from workers.scheduling.pacing import Pacing
from workers.scheduling.plan import StepPlan
from workers.scheduling.scheduler import ChunkDone
from workers.serve import serve
from workers.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class Step:
    """`begin` and `end`: on the device. `arrives`: a sequence that came with output takes its row in it. The host launched
    it from `launch` to `launched`."""

    begin: float
    end: float
    num_decodes: int
    num_tokens: int
    arrives: bool
    launch: float
    launched: float


@dataclass
class Notes:
    """Of one process: (what, request id where there is one, when), from any thread; its steps; and of each that was paced,
    when it landed and how. Owns all three."""

    rows: list[tuple[str, str, float]] = field(default_factory=list)
    steps: list[tuple[StepPlan, Any, Any, float, float]] = field(default_factory=list)
    paced: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, what: str, key: str = "") -> None:
        self.rows.append((what, key, time.monotonic()))

    def around(self, owner: type, name: str, key: Callable[..., str | None], before: str = "", after: str = "") -> None:
        """From now on calls of the owner's method are noted, where `key` gives their request."""
        plain = getattr(owner, name)

        @wraps(plain)
        def noted(*arguments: Any, **named: Any) -> Any:
            request = key(*arguments)
            if request is not None and before:
                self.add(before, request)
            result = plain(*arguments, **named)
            if request is not None and after:
                self.add(after, request)
            return result

        setattr(owner, name, noted)

    def watch(self) -> None:
        """What a hand-off goes through, on either side."""

        def last(chunk: object) -> str | None:
            return chunk.key.request_id if isinstance(chunk, ChunkDone) and chunk.last else None

        self.around(Answers, "stepped", lambda *_: "", before="step landed")
        self.around(Source, "chunk", lambda _, chunk: last(chunk), before="announced")
        self.around(Conversation, "put", lambda _, item: last(item), before="heard")
        self.around(Link, "pull", lambda *_: "", after="pull ends")
        self.around(Incoming, "arrive", lambda _, key, *__: key.request_id, after="runnable")
        landed = Pacing.landed

        @wraps(landed)
        def noted(pacing: Pacing, *arguments: Any) -> None:
            landed(pacing, *arguments)
            if pacing.last is not None:
                self.paced.append((time.monotonic(), *astuple(pacing.last)))

        setattr(Pacing, "landed", noted)  # noqa: B010  # as above: mypy allows no assignment to a method

    def write(self, path: pathlib.Path, clock: "DeviceClock") -> None:
        last = clock.read()
        steps = [
            Step(
                *(clock.host(begin, last), clock.host(end, last), plan.num_decodes, plan.num_tokens),
                *(bool(arrivals(plan)), launch, launched),
            )
            for plan, begin, end, launch, launched in self.steps
        ]
        noted = {"notes": self.rows, "steps": [astuple(step) for step in steps], "paced": self.paced}
        path.write_text(json.dumps(noted), encoding="utf-8")


def arrivals(plan: StepPlan) -> list[int]:
    return [start.row for start in plan.starts if start.output_ids]


class DeviceClock:
    """The device's moments in the host's time. On a CPU they are the host's."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._first = self.read()

    def moment(self) -> Any:
        """Now, as far as the calling thread's stream has come."""
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> tuple[float, Any]:
        """Both clocks; the device idle. The host's is read first: what the device did seems earlier, never later."""
        if self._cuda:
            torch.cuda.synchronize()
        now, moment = time.monotonic(), self.moment()
        if self._cuda:
            moment.synchronize()
        return now, moment

    def host(self, moment: Any, last: tuple[float, Any]) -> float:
        if not self._cuda:
            return float(moment)
        (begin, first), (end, final) = self._first, last
        return float(begin + (end - begin) * first.elapsed_time(moment) / first.elapsed_time(final))


class NotedRunner:
    """A RankRunner that notes when the device began and ended each step."""

    def __init__(self, runner: RankRunner, notes: Notes, clock: DeviceClock) -> None:
        self._runner, self._notes, self._clock = runner, notes, clock

    @property
    def pool(self) -> KvPool:
        return self._runner.pool

    @property
    def shape(self) -> ModelShape:
        return self._runner.shape

    @property
    def slab(self) -> SlabLayout:
        return self._runner.slab

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    def warm_up(self) -> None:
        self._runner.warm_up()

    def close(self) -> None:
        self._runner.close()

    def abandon(self) -> None:
        self._runner.abandon()

    def launch(self, plan: StepPlan) -> Launched:
        launch, begin = time.monotonic(), self._clock.moment()
        launched = self._runner.launch(plan)
        self._notes.steps.append((plan, begin, self._clock.moment(), launch, time.monotonic()))
        return launched


def same_weights(checkpoint: Checkpoint, wanted: tuple[Wanted, ...], progress: LoadProgress) -> None:
    torch.manual_seed(0)
    random_weights(checkpoint, wanted, progress)


async def run(given: dict[str, Any]) -> None:
    spec = WorkerSpec(
        given["worker_id"], 1, Role(given["role"]), given["model"], engine=EngineConfig.model_validate(given["engine"])
    )
    notes = Notes()
    notes.watch()
    clock = DeviceClock(spec.engine.device)

    def make(spec: WorkerSpec, rank: int, store: Any) -> NotedRunner:
        return NotedRunner(make_runner(spec, rank, store, fill=same_weights), notes, clock)

    executor = await asyncio.to_thread(partial(build_executor, spec, make_runner=make))
    stop = asyncio.Event()

    async def await_input_end() -> None:
        await asyncio.to_thread(sys.stdin.read)
        stop.set()

    def say_ready(info: WorkerInfo) -> None:
        print(f"ready {info.worker_id} {info.address}", flush=True)

    waiting = asyncio.create_task(await_input_end())
    try:
        await serve(spec, executor, ready=say_ready, stop=stop, grace_seconds=1.0)
    finally:
        waiting.cancel()
    notes.write(pathlib.Path(given["notes"]), clock)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    uvloop.run(run(json.loads(sys.argv[1])))
    os._exit(0)  # over threads that sit in calls of a communication library, as in `python -m workers`
