"""One Executor over tp × pp ranks: rank 0 here, on threads of its own; the others in processes that joined."""

import contextlib
import functools
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar, assert_never

from headrace.errors import HeadraceError, InternalError, TransferFailed, WorkerLost
from headrace.values import ParallelLayout
from workers.kv.channel import Channel, ChannelClosed
from workers.kv.layout import ModelShape
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt
from workers.ranks.answers import Answers
from workers.ranks.messages import (
    Build,
    CloseLinks,
    Command,
    Digest,
    Digested,
    End,
    EndProfile,
    Failed,
    Ping,
    Pong,
    Profile,
    Profiled,
    Pull,
    Pulled,
    Ready,
    Reply,
    Step,
    Stepped,
)
from workers.ranks.profiles import RankProfile
from workers.ranks.rank import Rank, shared_store
from workers.ranks.rank_runner import MakeRunner
from workers.ranks.rendezvous import Child, end_all
from workers.scheduling.plan import StepPlan, StepResult
from workers.spec import WorkerSpec

DEATH_FIRST_SECONDS = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankLimits:
    """How long a rank may take, in seconds, before its worker is lost. `silent`: not answering a ping, hence stopped."""

    start_seconds: float = 600.0
    step_seconds: float = 60.0
    silent_seconds: float = 10.0
    close_seconds: float = 5.0


class RankExecutor:
    """An Executor. Owns rank 0, the channels to the others, their processes where they are its children, and, in its
    Answers, what is in flight.

    Threads: rank 0's own; one that sends; one for each other rank that receives; one that keeps time.
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
        self._answers = Answers(self._ranks, spec.num_micro_batches + 1)
        self._failed: Future[Exception] = Future()
        self._closing = threading.Lock()
        self._closed = False
        self._stop = threading.Event()
        self._outbox: SimpleQueue[Command | None] = SimpleQueue()
        self._heard = dict.fromkeys(self._ranks, time.monotonic())
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
            self._answers.started.result(self._limits.start_seconds)
        except TimeoutError:
            late = sorted(self._ranks - set(self._answers.ready))
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
        return self._answers.ready[0].shape

    @property
    def num_blocks(self) -> int:
        return min(ready.num_blocks for ready in self._answers.ready.values())

    @property
    def block_bytes(self) -> int:
        return sum(ready.block_bytes for ready in self._answers.ready.values())

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._answers.ready[rank].endpoint for rank in sorted(self._ranks))

    @property
    def failed(self) -> "Future[Exception]":
        return self._failed

    def step(self, plan: StepPlan) -> "Future[StepResult]":
        future = self._answers.begin_step(plan.number, time.monotonic())
        if not future.done():
            self._tell(Step(plan))
        return future

    def pull(self, peer: PeerRanks, blocks: Sequence[BlockPull], after_step: int = 0) -> "Future[PullReceipt]":
        def conclude(outcomes: list[PullReceipt | HeadraceError]) -> PullReceipt:
            receipts = _all_well(outcomes)
            moved, seconds = sum(r.num_bytes for r in receipts), max(r.seconds for r in receipts)
            return PullReceipt(len(blocks), moved, seconds)

        return self._ask(lambda task: Pull(task, peer, tuple(blocks), after_step), conclude)

    def close_links(self, peer: tuple[str, int]) -> None:
        self._tell(CloseLinks(peer))

    def digests(self, blocks: Sequence[tuple[int, int]]) -> "Future[tuple[bytes, ...]]":
        numbers = [block for block, _ in blocks]
        return self._ask(lambda task: Digest(task, tuple(blocks)), lambda parts: _whole(numbers, parts))

    def profile(self, num_steps: int) -> "Future[tuple[RankProfile, ...]]":
        def conclude(outcomes: list[RankProfile | HeadraceError]) -> tuple[RankProfile, ...]:
            return tuple(sorted(_all_well(outcomes), key=lambda part: part.rank))

        return self._ask(lambda task: Profile(task, num_steps), conclude)

    def end_profile(self) -> None:
        self._tell(EndProfile())

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            lost = self._answers.lost is not None
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
            end_all(self._children, deadline - time.monotonic())

    # -- to and from the ranks

    def _tell(self, command: Command) -> None:
        assert self._rank0 is not None
        if self._channels:
            self._outbox.put(command)
        self._rank0.tell(command)

    def _ask(
        self, command: Callable[[int], Digest | Pull | Profile], conclude: Callable[[list[Any]], T]
    ) -> "Future[T]":
        """Tells all ranks; the future completes with what `conclude` makes of their parts once all have answered."""
        task, future = self._answers.begin_task(conclude)
        if not future.done():
            self._tell(command(task))
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
                self._answers.is_ready(rank, reply)
            case Stepped():
                try:
                    self._answers.stepped(rank, reply, time.monotonic())
                except InternalError as error:
                    self._lose(error)
            case Digested(task):
                self._answers.answered(rank, task, reply)
            case Profiled(task, part):
                self._answers.answered(rank, task, part)
            case Pulled(task, part):
                self._answers.answered(rank, task, part)
            case Failed(error):
                # A rank whose peer died fails, too, and may be heard first: the death is the better reason.
                waiting = threading.Timer(DEATH_FIRST_SECONDS, self._lose, (error,))
                waiting.daemon = True
                waiting.start()
            case _:
                assert_never(reply)

    # -- the end of a rank is the end of all

    def _lose(self, error: HeadraceError) -> None:
        """All that waits fails, and the ranks that are left end. The first reason counts."""
        if not self._answers.lose(error):
            return
        if not self._closed:
            for channel in self._channels.values():
                channel.close()
            if self._rank0 is not None:
                self._rank0.abandon()
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
                self._answers.progress = now
            asleep_since = now
            self._outbox.put(Ping())
            for rank in self._channels:
                if now - self._heard[rank] > silent:
                    self._lose(WorkerLost(f"rank {rank} was silent for {silent} s", rank=rank))
            if (late := self._answers.late_step(now, step)) is not None:
                number, missing = late
                self._lose(WorkerLost(f"ranks {sorted(missing)} did not end step {number} within {step} s"))


def _all_well(outcomes: Iterable[T | HeadraceError]) -> list[T]:
    """Raises the first error."""
    found = []
    for outcome in outcomes:
        if isinstance(outcome, HeadraceError):
            raise outcome
        found.append(outcome)
    return found


def _whole(blocks: Sequence[int], parts: Sequence[Digested]) -> tuple[bytes, ...]:
    """The digest of each block, of all that is in it, once. TransferFailed where replicas differ."""
    shares: dict[tuple[int, int], tuple[bytes, ...]] = {}
    for part in parts:
        known = shares.setdefault(part.share, part.digests)
        for block, one, other in zip(blocks, known, part.digests, strict=True):
            if one != other:
                held = "KV heads from {} and layers from {} on".format(*part.share)
                raise TransferFailed(f"block {block} is not the same on all ranks that hold the {held}", block=block)
    return tuple(functools.reduce(_xor, of_block) for of_block in zip(*shares.values(), strict=True))


def _xor(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).to_bytes(len(one), "little")
