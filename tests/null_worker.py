"""A worker without an engine: a real grpc.aio server that speaks Worker.Session, for tests and bench-stream.

By hand, a test reads what the router sent (`submits`, `cancels`, `places`) and says what the worker says (`emit`,
`reject`, `lose_peer`, `report`). With `auto=True` it answers by itself: every step sends one message that carries one
token of each running sequence, as an engine would.

    python -m tests.null_worker --step-seconds 0       # prints its address, serves until its input ends
    python -m tests.null_worker --gated                # as many steps as each line of its input says, and no more
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import grpc
import uvloop

from headrace import wire
from headrace.blocks import BlockHasher, probe
from headrace.costmodel import CostModel
from headrace.errors import HeadraceError, TransferFailed
from headrace.v1 import worker_pb2, worker_pb2_grpc
from headrace.values import (
    Capacity,
    Compatibility,
    FinishReason,
    Load,
    LoadReport,
    ParallelLayout,
    Request,
    RequestKey,
    Role,
    SequenceOutput,
    Timeline,
    TokenLogprobs,
    Usage,
    WorkerInfo,
)


def worker_info(
    worker_id: str = "null",
    role: Role = Role.UNIFIED,
    *,
    address: str = "",
    generation: int = 1,
    block_size: int = 32,
    max_num_seqs: int = 64,
    num_blocks: int = 4096,
    revision: str = "r1",
    tokenizer: str = "t1",
    cost: CostModel | None = None,
) -> WorkerInfo:
    info = WorkerInfo(
        worker_id=worker_id,
        generation=generation,
        role=role,
        address=address,
        compatibility=Compatibility(
            model="null",
            revision=revision,
            tokenizer=tokenizer,
            chat_template="c1",
            dtype="float32",
            kv_dtype="float32",
            block_size=block_size,
        ),
        layout=ParallelLayout(),
        capacity=Capacity(
            num_blocks=num_blocks,
            block_bytes=4096,
            max_num_seqs=max_num_seqs,
            max_context_tokens=65536,
            max_step_tokens=2048,
            vocab_size=32000,
        ),
        model_path="",
        cost=cost or CostModel(),
    )
    same = info.compatibility
    hasher = BlockHasher(revision=same.revision, kv_format=same.kv_format, block_size=same.block_size)
    return replace(info, probe=probe(hasher))


Outbox = asyncio.Queue[worker_pb2.WorkerMessage]


@dataclass
class _Running:
    key: RequestKey
    first_sample: int
    num_samples: int
    num_prompt_tokens: int
    max_tokens: int
    outbox: Outbox
    num_generated: int = 0


class NullWorker:
    """Serves while its `async with` block lasts, on a port given by the OS. Owns all that a router told it."""

    def __init__(
        self,
        info: WorkerInfo | None = None,
        *,
        auto: bool = False,
        step_seconds: float = 0.0,
        first_token: int = 100,
        first_at_once: bool = False,
        gate: asyncio.Semaphore | None = None,
    ) -> None:
        """`gate`: with auto, a step is made for each permit of it, and none before."""
        self.info = info or worker_info()
        self.submits: asyncio.Queue[Request] = asyncio.Queue()
        self.cancels: asyncio.Queue[RequestKey] = asyncio.Queue()
        self.stops: asyncio.Queue[tuple[RequestKey, int]] = asyncio.Queue()
        self.places: asyncio.Queue[tuple[RequestKey, str | None]] = asyncio.Queue()
        self.pings: asyncio.Queue[None] = asyncio.Queue()
        self.routers: list[str] = []
        self.muted = False
        self._auto = auto
        self._step_seconds = step_seconds
        self._first_token = first_token
        self._first_at_once = first_at_once
        self._gate = gate
        self._outboxes: list[Outbox] = []
        self._running: dict[str, _Running] = {}
        self._has_work = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None
        self._server: Any = None

    @property
    def address(self) -> str:
        return self.info.address

    async def __aenter__(self) -> "NullWorker":
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port(self.info.address or "127.0.0.1:0")
        self.info = replace(self.info, address=f"127.0.0.1:{port}")
        await self._server.start()
        if self._auto:
            self._stepper = asyncio.create_task(self._steps())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    async def die(self) -> None:
        """As a killed process: every stream breaks at once."""
        if self._stepper is not None:
            self._stepper.cancel()
        await self._server.stop(None)

    def leave(self) -> None:
        """As a worker that ends in order."""
        self.say(worker_pb2.WorkerMessage(leaving=worker_pb2.Leaving()))

    # What the router says

    async def Session(
        self, messages: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        outbox: Outbox = asyncio.Queue(maxsize=4 if self._auto else 0)
        reader = asyncio.create_task(self._listen(messages, outbox))
        self._outboxes.append(outbox)
        try:
            while True:
                message = await outbox.get()
                if not self.muted:
                    yield message
        finally:
            self._outboxes.remove(outbox)
            self._running = {name: running for name, running in self._running.items() if running.outbox is not outbox}
            reader.cancel()
            while not outbox.empty():  # nobody waits to put more into it
                outbox.get_nowait()

    async def _listen(self, messages: AsyncIterator[worker_pb2.RouterMessage], outbox: Outbox) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "hello":
                    self.routers.append(message.hello.router_id)
                    await outbox.put(worker_pb2.WorkerMessage(hello=wire.worker_to_pb(self.info)))
                case "submit" if self._auto:
                    await self._run(wire.request_from_pb(message.submit), message.submit.first_sample, outbox)
                case "submit":
                    self.submits.put_nowait(wire.request_from_pb(message.submit))
                case "cancel":
                    self._running.pop(message.cancel.key.request_id, None)
                    self.cancels.put_nowait(wire.key_from_pb(message.cancel.key))
                case "stop_sample":
                    stop = message.stop_sample
                    self.stops.put_nowait((wire.key_from_pb(stop.key), stop.index))
                case "place":
                    prefill = message.place.prefill.worker_id if message.place.HasField("prefill") else None
                    self.places.put_nowait((wire.key_from_pb(message.place.key), prefill))
                case "ping":
                    if not self._auto:
                        self.pings.put_nowait(None)
                        await outbox.put(worker_pb2.WorkerMessage(pong=worker_pb2.Pong()))

    async def _run(self, request: Request, first_sample: int, outbox: Outbox) -> None:
        max_tokens = request.sampling.max_tokens
        running = _Running(request.key, first_sample, request.n, request.num_prompt_tokens, max_tokens, outbox)
        if self._first_at_once:
            step = worker_pb2.StepOutputs()
            self._next(running, step)
            await outbox.put(worker_pb2.WorkerMessage(outputs=step))
        if running.num_generated < max_tokens:
            self._running[request.key.request_id] = running
            self._has_work.set()

    # What the worker says

    def say(self, message: worker_pb2.WorkerMessage) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(message)

    def emit(
        self,
        key: RequestKey,
        token_ids: Sequence[int],
        *,
        num_generated: int,
        index: int = 0,
        finish: FinishReason | None = None,
        usage: Usage | None = None,
        timeline: Timeline | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        output = SequenceOutput(key, index, tuple(token_ids), num_generated, logprobs, finish, usage, timeline)
        self.say_outputs([output])

    def say_outputs(self, outputs: Iterable[SequenceOutput]) -> None:
        outputs_pb = worker_pb2.StepOutputs(outputs=map(wire.output_to_pb, outputs))
        self.say(worker_pb2.WorkerMessage(outputs=outputs_pb))

    def reject(self, key: RequestKey, error: HeadraceError) -> None:
        rejected = worker_pb2.Rejected(key=wire.key_to_pb(key), error=wire.error_to_pb(error))
        self.say(worker_pb2.WorkerMessage(rejected=rejected))

    def lose_peer(self, key: RequestKey, worker_id: str, error: HeadraceError | None = None) -> None:
        pb = wire.error_to_pb(error or TransferFailed("the link closed"))
        lost = worker_pb2.PeerLost(key=wire.key_to_pb(key), worker_id=worker_id, generation=1, error=pb)
        self.say(worker_pb2.WorkerMessage(peer_lost=lost))

    def report(
        self, total: Load, yours: Load | None = None, *, free_blocks: int = 4096, draining: bool = False
    ) -> None:
        report = LoadReport(total, yours or Load(), self.info.cost, self.info.role, free_blocks, draining)
        self.say(worker_pb2.WorkerMessage(load=wire.report_to_pb(report)))

    async def _steps(self) -> None:
        """One message a step; flow control of the stream is the only brake when step_seconds is 0."""
        while True:
            await self._has_work.wait()
            if not self._running:
                self._has_work.clear()
                continue
            if self._gate is not None:
                await self._gate.acquire()
            for outbox in tuple(self._outboxes):
                step = self._step(outbox)
                if step.outputs or step.samples:
                    await outbox.put(worker_pb2.WorkerMessage(outputs=step))
            await asyncio.sleep(self._step_seconds)

    def _step(self, outbox: Outbox) -> worker_pb2.StepOutputs:
        """Of the requests of one router."""
        step = worker_pb2.StepOutputs()
        for request_id, running in list(self._running.items()):
            if running.outbox is outbox:
                self._next(running, step)
                if running.num_generated == running.max_tokens:
                    del self._running[request_id]
        return step

    def _next(self, running: _Running, step: worker_pb2.StepOutputs) -> None:
        """The next token of each sample."""
        running.num_generated += 1
        count = running.num_generated
        token_id, last = self._first_token + count % 1000, count == running.max_tokens
        for index in range(running.num_samples):
            if count > 1 and not last and running.first_sample:
                step.samples.append(running.first_sample + index)
                step.token_ids.append(token_id)
                step.num_generated.append(count)
                continue
            output = step.outputs.add(
                key=wire.key_to_pb(running.key),
                index=index,
                token_ids=[token_id],
                num_generated=count,
                finish="length" if last else "",
            )
            if count == 1 and index == 0:
                output.usage.prompt_tokens = running.num_prompt_tokens
            if last and index == running.num_samples - 1:
                output.timeline.SetInParent()


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--first-token", type=int, default=100, help="its id; those of later ones count on from it")
    parser.add_argument("--tokenizer", default="t1", help="the tokenizer's digest, as a router expects it")
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--ids", default="null", help="a worker for each of these ids, with commas between them")
    parser.add_argument("--first-at-once", action="store_true", help="the first token does not wait for a step")
    parser.add_argument("--gated", action="store_true", help="steps as its input says, a number a line")
    options = parser.parse_args()
    gate = asyncio.Semaphore(0) if options.gated else None
    async with AsyncExitStack() as ends:
        workers = [
            await ends.enter_async_context(
                NullWorker(
                    worker_info(
                        worker_id,
                        max_num_seqs=options.max_num_seqs,
                        num_blocks=options.num_blocks,
                        tokenizer=options.tokenizer,
                    ),
                    auto=True,
                    step_seconds=options.step_seconds,
                    first_token=options.first_token,
                    first_at_once=options.first_at_once,
                    gate=gate,
                )
            )
            for worker_id in options.ids.split(",")
        ]
        print(*(worker.address for worker in workers), flush=True)
        while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
            for _ in range(int(line) if gate is not None else 0):
                gate.release()


if __name__ == "__main__":
    uvloop.run(_main())
