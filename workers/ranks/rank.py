"""What one rank does, whichever process it lives in: steps in order on one thread, pulls beside them.

A rank is told things (commands) and answers (replies); `ranks.RankExecutor` speaks to rank 0 and to all others alike.
"""

import gc
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from queue import SimpleQueue
from typing import Any, assert_never

import torch.distributed as dist

from headrace.errors import HeadraceError, InternalError, WorkerLost
from workers.kv.channel import Channel, ChannelClosed, connect
from workers.kv.layout import Shard, shard
from workers.kv.links import schemes
from workers.kv.links.base import KvServer, PullReceipt
from workers.kv.links.peers import PeerLinks
from workers.kv.pool import KvPool
from workers.ranges import ranges_of
from workers.ranks.messages import (
    Build,
    CloseLinks,
    Command,
    Digest,
    Digested,
    End,
    EndProfile,
    Failed,
    Join,
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
from workers.ranks.profiling import StepProfiler
from workers.ranks.rank_runner import Launched, RankRunner, UnderWay
from workers.ranks.starting import Phases
from workers.scheduling.plan import StepPlan, StepResult
from workers.spec import WorkerSpec

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
_TcpStore: Any = dist.TCPStore  # type: ignore[attr-defined]
_HashStore: Any = dist.HashStore  # type: ignore[attr-defined]


class Rank:
    """Owns one rank's runner, its readable pool and its links to peers. `reply` is called from any of its threads: the
    one that launches steps, the one that awaits them, those of the links."""

    def __init__(
        self, spec: WorkerSpec, rank: int, host: str, make: Callable[[], RankRunner], reply: Callable[[Reply], None]
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._host = host
        self._reply = reply
        self._ordered: SimpleQueue[tuple[float, Step | Digest | Profile | EndProfile | End]] = SimpleQueue()
        self._launched: SimpleQueue[tuple[int, float, float, UnderWay] | None] = SimpleQueue()
        self._ended_at = 0.0
        self._open: tuple[KvServer, PeerLinks] | None = None
        self._runner: RankRunner | None = None
        self._abandoned = False
        self._ranges = ranges_of(spec.engine)
        self._profile: tuple[int, StepProfiler] | None = None
        self._thread = self._run(f"rank{rank}", lambda: self._work(make))

    def tell(self, command: Command) -> None:
        """Returns at once; the answer comes through `reply`."""
        match command:
            case Step() | Digest() | Profile() | EndProfile() | End():
                self._ordered.put((time.perf_counter(), command))
            case Pull(task, peer, blocks, after_step):
                ended = self._ranges.begin("pull")

                def over(outcome: PullReceipt | HeadraceError) -> None:
                    ended()
                    self._reply(Pulled(task, outcome))

                self._links.pull(peer, blocks, over, after_step)
            case CloseLinks(peer):
                self._links.close_peer(peer)
            case Ping():
                self._reply(Pong())
            case _:
                assert_never(command)

    def close(self, seconds: float) -> None:
        """Ends the rank's links, its server and, when it is not stuck in a step, its thread. Idempotent."""
        self.tell(End())
        if self._open is not None:
            server, links = self._open
            links.close()
            server.close()
        self._thread.join(seconds)

    def abandon(self) -> None:
        """Another rank is lost, and what this one waits for will not come. Returns at once; close() is still to come."""
        self._abandoned = True
        if self._runner is not None:
            self._run(f"rank{self._rank}-abandon", self._runner.abandon)

    @property
    def _links(self) -> PeerLinks:
        if self._open is None:
            raise InternalError(f"rank {self._rank} was told to pull before it was ready")
        return self._open[1]

    def _run(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._live, args=(work,), name=name, daemon=True)
        thread.start()
        return thread

    def _live(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ChannelClosed:
            log.info("rank %d: rank 0 is gone", self._rank)
        except Exception as error:
            log.exception("rank %d failed", self._rank)
            try:
                self._reply(Failed(_portable(error, self._rank)))
            except ChannelClosed:
                log.info("rank %d: rank 0 is gone, too", self._rank)

    def _work(self, make: Callable[[], RankRunner]) -> None:
        phases = Phases()
        runner = self._runner = make()
        phases.ended("built")
        runner.warm_up()
        phases.ended("warm")
        log.info("rank %d ready: %s", self._rank, phases)
        held = shard(runner.shape, self._spec.layout, self._rank)
        seconds = self._spec.handoff.transfer_seconds
        server = schemes.serve(runner.pool, self._host, seconds, rdma=self._spec.handoff.rdma)
        schemes.try_out(runner.pool, server.endpoint, seconds)
        links = PeerLinks(runner.pool, server.endpoint, self._rank, self._spec.layout, runner.shape, seconds)
        self._open = (server, links)
        awaiting = self._run(f"rank{self._rank}-results", self._await)
        try:
            self._reply(Ready(runner.shape, runner.num_blocks, runner.slab.block_bytes, server.endpoint))
            self._carry_out(runner, held)
        finally:
            self._launched.put(None)
            links.close()
            server.close()
            awaiting.join()
        if not self._abandoned:
            runner.close()

    def _carry_out(self, runner: RankRunner, held: Shard) -> None:
        """What was ordered, until the end is."""
        while True:
            told_at, command = self._ordered.get()
            match command:
                case Step(plan):
                    began = time.perf_counter()
                    match self._launch(runner, plan):
                        case UnderWay() as under_way:
                            self._launched.put((plan.number, began, time.perf_counter(), under_way))
                        case result:
                            self._stepped(plan.number, began, told_at, result)
                case Digest(task, blocks):
                    share = held.kv_heads[0], held.layers[0]
                    self._reply(Digested(task, share, digests(runner.pool, blocks, held)))
                case Profile(task, num_steps):
                    self._end_profile()
                    self._begin_profile(task, num_steps, runner)
                case EndProfile():
                    self._end_profile()
                case End():
                    return

    def _launch(self, runner: RankRunner, plan: StepPlan) -> Launched:
        if self._profile is None:
            with self._ranges("run"):
                return runner.launch(plan)
        _, profiler = self._profile
        with self._ranges("run"), profiler.step(plan):
            launched = runner.launch(plan)
        if profiler.full:
            self._end_profile()
        return launched

    def _begin_profile(self, task: int, num_steps: int, runner: RankRunner) -> None:
        """One that fails, here or later, is an answer like others: the rank goes on."""
        try:
            self._profile = task, StepProfiler(self._rank, num_steps, runner.pool.tensor.device)
        except Exception as error:
            self._reply(Profiled(task, _portable(error, self._rank)))

    def _end_profile(self) -> None:
        """What it found is read beside further steps."""
        if self._profile is None:
            return
        task, profiler = self._profile
        self._profile = None
        try:
            profiler.stop()
        except Exception as error:
            self._reply(Profiled(task, _portable(error, self._rank)))
            return

        def read() -> None:
            try:
                outcome: RankProfile | HeadraceError = profiler.read()
            except Exception as error:
                outcome = _portable(error, self._rank)
            self._reply(Profiled(task, outcome))

        self._run(f"rank{self._rank}-profile", read)

    def _await(self) -> None:
        while (launched := self._launched.get()) is not None:
            number, began, launched_at, under_way = launched
            with self._ranges("await"):
                result = under_way.wait()
            self._stepped(number, began, launched_at, result)

    def _stepped(self, number: int, began: float, ready_at: float, result: StepResult | None) -> None:
        """A step that was launched behind another lasts from that one's end. `ready_at`: when it could have begun, had
        there been no other: launched on its device or, where that is this thread, known to it."""
        now, before = time.perf_counter(), self._ended_at
        self._ended_at = now
        self._reply(Stepped(number, result, now - max(began, before), before - ready_at, max(ready_at - began, 0.0)))


def digests(pool: KvPool, blocks: Sequence[tuple[int, int]], held: Shard) -> tuple[bytes, ...]:
    """One rank's part of Executor.digests: XOR over all parts of a block gives the whole. Replicas have the same part."""
    folded = []
    for block, filled in blocks:
        whole = 0
        for head, layers in enumerate(pool.head_layer_digests(block, filled), start=held.kv_heads[0]):
            for layer, content in enumerate(layers, start=held.layers[0]):
                place = head.to_bytes(4, "little") + layer.to_bytes(4, "little")
                whole ^= int.from_bytes(blake2b(place + content, digest_size=DIGEST_BYTES).digest(), "little")
        folded.append(whole.to_bytes(DIGEST_BYTES, "little"))
    return tuple(folded)


def _portable(error: Exception, rank: int) -> HeadraceError:
    """An error as every process can rebuild it."""
    if isinstance(error, HeadraceError):
        return error
    return InternalError(f"rank {rank}: {type(error).__name__}: {error}")


def shared_store(host: str, world_size: int) -> Any:
    """Rank 0's end of the store through which a worker's ranks form their groups; `port` is where others reach it."""
    if world_size == 1:
        return _HashStore()
    return _TcpStore(host, 0, world_size, True, wait_for_workers=False)


def keep_for_good() -> None:
    """What this process has made so far stays until it ends: the search for garbage passes it over, which would otherwise
    hold up a step for tens of milliseconds now and then."""
    gc.collect()
    gc.freeze()


def rank_main(address: str, token: str, rank: int) -> None:
    """A rank other than 0, from joining to the end of its worker: blocks the calling thread.

    Joins rank 0 at `address` (from `ranks.listen`), learns there what to build, carries out what it is told. Returns
    when the executor closes. Raises WorkerLost when rank 0 is gone. A failure of this rank itself is rank 0's to
    handle: it hears of it, and ends this rank as it ends all others.
    """
    host, _, port = address.rpartition(":")
    channel = connect(host.strip("[]"), int(port), token)
    try:
        _obey(channel, rank)
    except ChannelClosed as error:
        raise WorkerLost(f"rank {rank} lost rank 0 at {address}: {error}") from error
    finally:
        channel.close()


def _obey(channel: Channel, rank: int) -> None:
    channel.send(pickle.dumps(Join(rank)))
    build: Build = pickle.loads(channel.receive())
    spec = build.spec

    def make() -> RankRunner:
        store = _TcpStore(build.store_host, build.store_port, spec.layout.world_size, False)
        runner = build.make_runner(spec, rank, store)
        keep_for_good()
        return runner

    me = Rank(spec, rank, channel.local_host, make, lambda reply: channel.send(pickle.dumps(reply)))
    try:
        while not isinstance(command := pickle.loads(channel.receive()), End):
            me.tell(command)
    except ChannelClosed:
        me.abandon()
        raise
    finally:
        me.close(1.0)
