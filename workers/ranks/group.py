"""One Executor over tp × pp ranks: rank 0 here, on threads of its own; the others in processes that joined.

On one host, with the other ranks as child processes:

    executor = build_executor(spec)

With ranks that come from elsewhere (Ray actors):

    rendezvous = listen(spec.host, spec.rendezvous_token)          # in rank 0's process
    rank_main(rendezvous.address, spec.rendezvous_token, rank)     # in each other one; blocks until the worker ends
    executor = build_executor(spec, rendezvous)                    # in rank 0's process; blocks until all are warm

build_executor blocks (weights are loaded, graphs warmed): call it off the event loop.
"""

import contextlib
import functools
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from subprocess import TimeoutExpired
from typing import Any, TypeVar, assert_never

from headrace.errors import HeadraceError, InternalError, WorkerLost
from headrace.values import ParallelLayout
from workers.kv.channel import Channel, ChannelClosed
from workers.kv.layout import ModelShape
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt
from workers.ranks.rank import (
    Build,
    CloseLinks,
    Command,
    Digest,
    Digested,
    End,
    Failed,
    MakeRunner,
    Ping,
    Pong,
    Pull,
    Pulled,
    Rank,
    Ready,
    Reply,
    Step,
    Stepped,
    rank_main,
    shared_store,
)
from workers.ranks.rendezvous import Child, Rendezvous, listen, spawn_local
from workers.scheduling.plan import StepPlan, StepResult
from workers.spec import WorkerSpec

__all__ = ["RankExecutor", "RankLimits", "Rendezvous", "build_executor", "listen", "rank_main", "spawn_local"]

MAX_STEPS_IN_FLIGHT = 2
DEATH_FIRST_SECONDS = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankLimits:
    """How long a rank may take, in seconds, before its worker is lost. `silent`: not answering a ping, hence stopped."""

    start_seconds: float = 600.0
    step_seconds: float = 60.0
    silent_seconds: float = 10.0
    close_seconds: float = 5.0


def build_executor(
    spec: WorkerSpec,
    rendezvous: Rendezvous | None = None,
    *,
    make_runner: MakeRunner | None = None,
    limits: RankLimits | None = None,
) -> "RankExecutor":
    """The executor of `spec`, all ranks joined, loaded and warm. Without a rendezvous the other ranks are child
    processes. `make_runner` None: workers.ranks.runner's.

    Raises what a rank failed with (CheckpointError, ConfigError, IncompatiblePeer, …) or WorkerLost when one is gone
    or late; nothing is left running then.
    """
    limits = limits or RankLimits()
    children: list[Child] = []
    channels: dict[int, Channel] = {}
    try:
        if rendezvous is None and spec.layout.world_size > 1:
            token = secrets.token_urlsafe(16)
            rendezvous = listen(spec.host, token)
            children = spawn_local(rendezvous.address, token, range(1, spec.layout.world_size))
            for rank, child in enumerate(children, start=1):
                rendezvous.watch(rank, child)
        if rendezvous is not None:
            channels = rendezvous.collect(spec.layout.world_size, limits.start_seconds)
        executor = RankExecutor(spec, channels, children, limits)
    except BaseException:
        _end(children, 0.0)
        raise
    try:
        executor.start(make_runner or _runner_of_models())
    except BaseException:
        executor.close()
        raise
    return executor


def _runner_of_models() -> MakeRunner:
    from workers.ranks.runner import make_runner  # brings all models with it, which a test's own runner does not need

    return make_runner


def _end(children: Sequence[Child], seconds: float) -> None:
    """Waits until all have ended; those that have not after `seconds` are killed."""
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutExpired:
            child.kill()
            child.wait()


@dataclass(slots=True)
class _Flight:
    """A step under way. `missing`: ranks that have not done it."""

    future: "Future[StepResult]"
    missing: set[int]
    result: StepResult | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class _Task:
    """A pull or a digest under way: what the ranks said so far, and what to make of it once all have."""

    future: "Future[Any]"
    conclude: Callable[[list[Any]], Any]
    missing: set[int]
    parts: list[Any] = field(default_factory=list)


class RankExecutor:
    """An Executor. Owns rank 0, the channels to the others, their processes where they are its
    children, and what is in flight.

    Threads: rank 0's own; one that sends; one for each other rank that receives; one that keeps time. `_lock` guards
    all that changes; futures complete outside it.
    """

    def __init__(
        self, spec: WorkerSpec, channels: dict[int, Channel], children: Sequence[Child], limits: RankLimits
    ) -> None:
        self._spec = spec
        self._limits = limits
        self._channels = channels
        self._children = children
        self._ranks = frozenset(range(spec.layout.world_size))
        self._rank0: Rank | None = None
        self._lock = threading.Lock()
        self._ready: dict[int, Ready] = {}
        self._started: Future[None] = Future()
        self._flights: dict[int, _Flight] = {}
        self._tasks: dict[int, _Task] = {}
        self._num_tasks = 0
        self._lost: HeadraceError | None = None
        self._failed: Future[Exception] = Future()
        self._closing = threading.Lock()
        self._closed = False
        self._stop = threading.Event()
        self._outbox: SimpleQueue[Command | None] = SimpleQueue()
        self._heard = dict.fromkeys(self._ranks, time.monotonic())
        self._progress = time.monotonic()
        self._threads: list[threading.Thread] = []

    def start(self, make_runner: MakeRunner) -> None:
        """Builds all ranks and blocks until they are warm; raises what one of them failed with."""
        spec = self._spec
        store = shared_store(spec.host, len(self._ranks))
        self._rank0 = Rank(spec, 0, spec.host, lambda: make_runner(spec, 0, store), lambda reply: self._hear(0, reply))
        for rank, channel in self._channels.items():
            self._run(f"from-rank:{rank}", self._receive, rank, channel)
            with contextlib.suppress(ChannelClosed):  # the receiving thread finds out
                channel.send(pickle.dumps(Build(spec, make_runner, spec.host, store.port)))
        try:
            self._started.result(self._limits.start_seconds)
        except TimeoutError:
            late = sorted(self._ranks - set(self._ready))
            raise WorkerLost(f"ranks {late} were not ready within {self._limits.start_seconds} s") from None
        self._heard = dict.fromkeys(self._ranks, time.monotonic())
        self._run("to-ranks", self._send)
        self._run("rank-watch", self._watch)

    def _run(self, name: str, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- what the engine asks

    @property
    def layout(self) -> ParallelLayout:
        return self._spec.layout

    @property
    def shape(self) -> ModelShape:
        return self._ready[0].shape

    @property
    def num_blocks(self) -> int:
        return min(ready.num_blocks for ready in self._ready.values())

    @property
    def block_bytes(self) -> int:
        return sum(ready.block_bytes for ready in self._ready.values())

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._ready[rank].endpoint for rank in sorted(self._ranks))

    @property
    def failed(self) -> "Future[Exception]":
        return self._failed

    def step(self, plan: StepPlan) -> "Future[StepResult]":
        future: Future[StepResult] = _under_way()
        with self._lock:
            lost = self._lost
            if lost is None:
                if len(self._flights) == MAX_STEPS_IN_FLIGHT:
                    raise ValueError(
                        f"at most {MAX_STEPS_IN_FLIGHT} steps may be in flight, plan {plan.number} is more"
                    )
                if not self._flights:
                    self._progress = time.monotonic()
                self._flights[plan.number] = _Flight(future, set(self._ranks))
                self._tell(Step(plan))
                return future
        future.set_exception(_worker_lost(lost))
        return future

    def pull(self, peer: PeerRanks, blocks: Sequence[BlockPull]) -> "Future[PullReceipt]":
        def conclude(outcomes: list[PullReceipt | HeadraceError]) -> PullReceipt:
            receipts = []
            for outcome in outcomes:
                if isinstance(outcome, HeadraceError):
                    raise outcome
                receipts.append(outcome)
            moved, seconds = sum(r.num_bytes for r in receipts), max(r.seconds for r in receipts)
            return PullReceipt(len(blocks), moved, seconds)

        return self._ask(_under_way(), lambda task: Pull(task, peer, tuple(blocks)), conclude)

    def close_links(self, peer: tuple[str, int]) -> None:
        self._tell(CloseLinks(peer))

    def digests(self, blocks: Sequence[tuple[int, int]]) -> "Future[tuple[bytes, ...]]":
        def conclude(parts: list[tuple[bytes, ...]]) -> tuple[bytes, ...]:
            return tuple(functools.reduce(_xor, of_block) for of_block in zip(*parts, strict=True))

        return self._ask(_under_way(), lambda task: Digest(task, tuple(blocks)), conclude)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            lost = self._lost is not None
            self._lose(WorkerLost("the executor was closed"))
            deadline = time.monotonic() + self._limits.close_seconds
            self._stop.set()
            if not lost:
                self._outbox.put(End())
            self._outbox.put(None)
            if self._rank0 is not None:
                self._rank0.close(self._limits.close_seconds / 2)
            for thread in self._threads:  # a rank that ended closed its channel
                thread.join(max(0.0, deadline - time.monotonic()))
            for channel in self._channels.values():
                channel.close()
            _end(self._children, deadline - time.monotonic())

    # -- to and from the ranks

    def _tell(self, command: Command) -> None:
        assert self._rank0 is not None
        self._outbox.put(command)
        self._rank0.tell(command)

    def _ask(
        self,
        future: "Future[T]",
        command: Callable[[int], Digest | Pull],
        conclude: Callable[[list[Any]], T],
    ) -> "Future[T]":
        """Tells all ranks, and completes `future` with what `conclude` makes of their parts once all have answered."""
        with self._lock:
            lost = self._lost
            self._num_tasks += 1
            task = self._num_tasks
            if lost is None:
                self._tasks[task] = _Task(future, conclude, set(self._ranks))
        if lost is None:
            self._tell(command(task))
        else:
            future.set_exception(_worker_lost(lost))
        return future

    def _send(self) -> None:
        while (command := self._outbox.get()) is not None:
            frame = pickle.dumps(command)
            for channel in self._channels.values():
                with contextlib.suppress(ChannelClosed):  # its receiving thread knows
                    channel.send(frame)

    def _receive(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                self._hear(rank, pickle.loads(channel.receive()))
        except ChannelClosed as error:
            self._lose(WorkerLost(f"rank {rank} is gone: {error}", rank=rank))

    def _hear(self, rank: int, reply: Reply) -> None:
        self._heard[rank] = time.monotonic()
        match reply:
            case Pong():
                pass
            case Ready():
                self._rank_ready(rank, reply)
            case Stepped():
                self._rank_stepped(rank, reply)
            case Digested(task, part):
                self._rank_answered(rank, task, part)
            case Pulled(task, part):
                self._rank_answered(rank, task, part)
            case Failed(error):
                # A rank whose peer died fails, too, and may be heard first: the death is the better reason.
                waiting = threading.Timer(DEATH_FIRST_SECONDS, self._lose, (error,))
                waiting.daemon = True
                waiting.start()
            case _:
                assert_never(reply)

    def _rank_ready(self, rank: int, ready: Ready) -> None:
        with self._lock:
            self._ready[rank] = ready
            complete = self._lost is None and len(self._ready) == len(self._ranks)
        if complete:
            self._started.set_result(None)

    def _rank_stepped(self, rank: int, stepped: Stepped) -> None:
        with self._lock:
            flight = self._flights.get(stepped.number)
            if flight is None:
                return  # the worker is lost; the future said so
            flight.missing.discard(rank)
            flight.seconds = max(flight.seconds, stepped.seconds)
            flight.result = flight.result or stepped.result
            if flight.missing:
                return
            del self._flights[stepped.number]
            self._progress = time.monotonic()
        if flight.result is None:
            self._lose(InternalError(f"no rank had a result of plan {stepped.number}"))
            flight.future.set_exception(_worker_lost(InternalError("a step ended without a result")))
        else:
            flight.future.set_result(replace(flight.result, seconds=flight.seconds))

    def _rank_answered(self, rank: int, task: int, part: object) -> None:
        with self._lock:
            asked = self._tasks.get(task)
            if asked is None:
                return  # the worker is lost; the future said so
            asked.missing.discard(rank)
            asked.parts.append(part)
            if asked.missing:
                return
            del self._tasks[task]
        try:
            asked.future.set_result(asked.conclude(asked.parts))
        except HeadraceError as error:
            asked.future.set_exception(error)

    # -- the end of a rank is the end of all

    def _lose(self, error: HeadraceError) -> None:
        """All that waits fails, and the ranks that are left end. The first reason counts."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            waiting: list[Future[Any]] = [flight.future for flight in self._flights.values()]
            waiting += [task.future for task in self._tasks.values()]
            self._flights.clear()
            self._tasks.clear()
            starting = len(self._ready) < len(self._ranks)
        if starting:
            self._started.set_exception(error)
        for future in waiting:
            future.set_exception(_worker_lost(error))
        if not self._closed:
            for channel in self._channels.values():
                channel.close()
            self._failed.set_result(error)

    def _watch(self) -> None:
        """Notices ranks that are there and do nothing: stopped, or stuck in a step."""
        silent, step = self._limits.silent_seconds, self._limits.step_seconds
        interval = min(silent, step) / 4
        asleep_since = time.monotonic()
        while not self._stop.wait(interval):
            now = time.monotonic()
            if now - asleep_since > 3 * interval:  # this process itself stood still: the others may speak first
                self._heard = dict.fromkeys(self._heard, now)
                self._progress = now
            asleep_since = now
            self._outbox.put(Ping())
            for rank in self._channels:
                if now - self._heard[rank] > silent:
                    self._lose(WorkerLost(f"rank {rank} was silent for {silent} s", rank=rank))
            with self._lock:
                oldest = next(iter(self._flights.items()), None)
                late = oldest is not None and now - self._progress > step
            if oldest is not None and late:
                number, flight = oldest
                self._lose(WorkerLost(f"ranks {sorted(flight.missing)} did not end step {number} within {step} s"))


def _worker_lost(error: HeadraceError) -> WorkerLost:
    return error if isinstance(error, WorkerLost) else WorkerLost(f"a rank failed: {error.type}: {error.message}")


def _under_way() -> "Future[Any]":
    """A future that who waits for it cannot cancel: what it stands for goes on."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _xor(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).to_bytes(len(one), "little")
