"""The contract of workers.ranks.executor.Executor, kept by RankExecutor on plain rank processes."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import wait

import pytest

from headrace.config import EngineConfig, HandoffConfig
from headrace.errors import CheckpointError, HeadraceError, IncompatiblePeer, LinkClosed, StaleBlocks, WorkerLost
from headrace.values import ParallelLayout, Role, SamplingParams
from tests.contract.toy_runner import NUM_BLOCKS, SHAPE, Toy
from workers.kv.links.base import BlockPull, PeerRanks
from workers.ranks.build import build_executor
from workers.ranks.group import RankExecutor, RankLimits
from workers.ranks.profiling import StepProfiler
from workers.ranks.rank import rank_main
from workers.ranks.rendezvous import listen
from workers.scheduling.plan import RowStart, RowWork, StepPlan
from workers.spec import WorkerSpec

pytestmark = pytest.mark.torch

BLOCK_SIZE = 8
LAYOUTS = [ParallelLayout(1, 1), ParallelLayout(2, 1), ParallelLayout(1, 2), ParallelLayout(2, 2)]
PAIRS = [(source, target) for source in LAYOUTS for target in LAYOUTS]
LIMITS = RankLimits(start_seconds=60, step_seconds=60, silent_seconds=60, close_seconds=5)


def spec_of(layout: ParallelLayout, token: str = "") -> WorkerSpec:
    return WorkerSpec(
        worker_id=f"worker-{layout}",
        generation=1,
        role=Role.UNIFIED,
        model_path="toy",
        layout=layout,
        engine=EngineConfig(block_size=BLOCK_SIZE),
        handoff=HandoffConfig(transfer_seconds=10.0),
        rendezvous_token=token,
    )


@dataclass
class Worker:
    """An executor, and the numbers that a scheduler would give out."""

    executor: RankExecutor
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def of(cls, layout: ParallelLayout, toy: Toy | None = None, limits: RankLimits = LIMITS) -> "Worker":
        return cls(build_executor(spec_of(layout), make_runner=toy or Toy(), limits=limits))

    @property
    def peer(self) -> PeerRanks:
        layout = self.executor.layout
        return PeerRanks(f"peer-{layout}", id(self), layout, self.executor.endpoints)

    def plan(self, tokens: range, blocks: tuple[int, ...], epoch: int = 0) -> StepPlan:
        """A row that computes a prompt into `blocks`, which it was given at `epoch`."""
        number = next(self.numbers)
        prompt = tuple(tokens)
        return StepPlan(
            number,
            work=(RowWork(number, 0, len(prompt), prompt, blocks),),
            num_decodes=0,
            starts=(RowStart(number, prompt, (), SamplingParams(max_tokens=1)),),
            fresh=tuple((block, epoch) for block in blocks),
        )

    def fill(self, tokens: range, blocks: tuple[int, ...]) -> int:
        """Computes a prompt into `blocks` and returns their epoch."""
        epoch = next(self.epochs)
        self.executor.step(self.plan(tokens, blocks, epoch)).result(20)
        return epoch

    def digests(self, blocks: tuple[int, ...], filled: int = BLOCK_SIZE) -> tuple[bytes, ...]:
        return self.executor.digests([(block, filled) for block in blocks]).result(20)


Workers = dict[ParallelLayout, tuple[Worker, Worker]]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Two of each layout, for all tests that break none."""
    wanted = [layout for layout in LAYOUTS for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(Worker.of, wanted))
    try:
        yield {layout: (made[2 * i], made[2 * i + 1]) for i, layout in enumerate(LAYOUTS)}
    finally:
        for worker in made:
            worker.executor.close()


def children(executor: RankExecutor) -> list[subprocess.Popen[bytes]]:
    return list(executor._children)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_says_what_it_is(workers: Workers, layout: ParallelLayout) -> None:
    executor = workers[layout][0].executor
    assert executor.layout == layout
    assert executor.shape == SHAPE
    assert executor.num_blocks == NUM_BLOCKS
    assert executor.block_bytes == SHAPE.num_layers * SHAPE.num_kv_heads * 2 * BLOCK_SIZE * SHAPE.head_dim * 4
    assert len(set(executor.endpoints)) == layout.world_size
    assert not executor.failed.done()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plans_are_carried_out_in_order_one_more_in_flight_than_stages(
    workers: Workers, layout: ParallelLayout
) -> None:
    worker = workers[layout][0]
    flying = [worker.executor.step(worker.plan(range(3), (0,))) for _ in range(1 + layout.pp)]
    results = []
    for _ in range(20):
        results.append(flying.pop(0).result(20))
        flying.append(worker.executor.step(worker.plan(range(3), (0,))))
    results += [future.result(20) for future in flying]
    assert [result.number for result in results] == sorted(result.number for result in results)
    assert all(result.token_ids == (result.number * 1001,) for result in results)
    assert all(result.seconds > 0 for result in results)


def test_digests_are_equal_for_equal_content_whatever_the_layout(workers: Workers) -> None:
    blocks = (3, 5)
    seen = set()
    for pair in workers.values():
        pair[0].fill(range(100, 100 + 2 * BLOCK_SIZE), blocks)
        seen.add(pair[0].digests(blocks) + pair[0].digests(blocks, filled=3))
    assert len(seen) == 1
    (first,) = seen
    assert len(set(first)) == 4, "different content has different digests"


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda layout: str(layout))
def test_case_27_any_layout_pulls_from_any_other_bit_equal(
    workers: Workers, source: ParallelLayout, target: ParallelLayout
) -> None:
    giver, taker = workers[source][0], workers[target][1]
    epoch = giver.fill(range(7, 7 + 3 * BLOCK_SIZE), (2, 9, 4))
    taker.fill(range(500, 500 + 4 * BLOCK_SIZE), (0, 1, 2, 3))
    neighbour = taker.digests((0,))
    pulls = [BlockPull(2, epoch, 1), BlockPull(9, epoch, 2), BlockPull(4, epoch, 3)]
    receipt = taker.executor.pull(giver.peer, pulls).result(20)
    assert taker.digests((1, 2, 3)) == giver.digests((2, 9, 4))
    assert taker.digests((0,)) == neighbour
    assert receipt.num_blocks == 3
    assert receipt.num_bytes == 3 * taker.executor.block_bytes


def test_pulls_run_beside_steps(workers: Workers) -> None:
    giver, taker = workers[ParallelLayout(2, 2)][0], workers[ParallelLayout(1, 2)][1]
    epoch = giver.fill(range(BLOCK_SIZE), (8,))
    steps, pulls = [], []
    for number in range(20):
        steps.append(taker.executor.step(taker.plan(range(4 * BLOCK_SIZE), (10, 11, 12, 13))))
        pulls.append(taker.executor.pull(giver.peer, [BlockPull(8, epoch, number % 8)]))
        steps[-1].result(20)
    assert sum(pull.result(20).num_blocks for pull in pulls) == 20
    assert len(set(taker.digests(tuple(range(8))))) == 1


def test_case_18_ranks_agree_while_pulls_of_many_lengths_and_an_abort_go_on(workers: Workers) -> None:
    giver, taker = workers[ParallelLayout(2, 1)]
    epoch = giver.fill(range(NUM_BLOCKS // 2 * BLOCK_SIZE), tuple(range(NUM_BLOCKS // 2)))
    outcomes = []
    for number in range(50):
        length = 1 + number % 11
        pulling = taker.executor.pull(giver.peer, [BlockPull(b, epoch, 12 + b) for b in range(length)])
        stepping = taker.executor.step(taker.plan(range(number % 7 + 1), (11,)))
        if number == 20:
            taker.executor.close_links(giver.peer.key)
        outcomes.append(pulling.exception(20))
        assert stepping.result(20).token_ids
    assert all(outcome is None or isinstance(outcome, LinkClosed) for outcome in outcomes)
    assert outcomes[-1] is None
    assert taker.digests(tuple(range(12, 23))) == giver.digests(tuple(range(11)))


def test_a_stale_epoch_is_refused_and_the_link_stays_usable(workers: Workers) -> None:
    giver, taker = workers[ParallelLayout(1, 1)][0], workers[ParallelLayout(2, 2)][1]
    epoch = giver.fill(range(BLOCK_SIZE), (6,))
    with pytest.raises(StaleBlocks, match="block 6"):
        taker.executor.pull(giver.peer, [BlockPull(6, epoch - 1, 0)]).result(20)
    taker.executor.pull(giver.peer, [BlockPull(6, epoch, 0)]).result(20)
    assert taker.digests((0,)) == giver.digests((6,))


def test_who_still_reads_a_block_that_is_pulled_into_finds_out(workers: Workers) -> None:
    giver, taker = workers[ParallelLayout(1, 1)]
    third = workers[ParallelLayout(2, 1)][0]
    epoch, old = giver.fill(range(BLOCK_SIZE), (6,)), taker.fill(range(50, 50 + BLOCK_SIZE), (7,))
    taker.executor.pull(giver.peer, [BlockPull(6, epoch, 7, target_epoch=old + 1000)]).result(20)
    with pytest.raises(StaleBlocks):
        third.executor.pull(taker.peer, [BlockPull(7, old, 0)]).result(20)
    third.executor.pull(taker.peer, [BlockPull(7, old + 1000, 0)]).result(20)


def test_an_impossible_peer_is_refused_with_the_reason(workers: Workers) -> None:
    taker = workers[ParallelLayout(1, 1)][0]
    three = PeerRanks("odd", 1, ParallelLayout(3, 1), ("gloo://x@127.0.0.1:1",) * 3)
    with pytest.raises(IncompatiblePeer, match="tp"):
        taker.executor.pull(three, [BlockPull(0, 0, 0)]).result(20)
    few = PeerRanks("few", 1, ParallelLayout(2, 1), ("gloo://x@127.0.0.1:1",))
    with pytest.raises(IncompatiblePeer, match="2 endpoints"):
        taker.executor.pull(few, [BlockPull(0, 0, 0)]).result(20)
    unknown = PeerRanks("unknown", 1, ParallelLayout(1, 1), ("carrier-pigeon://home",))
    with pytest.raises(IncompatiblePeer, match="gloo"):
        taker.executor.pull(unknown, [BlockPull(0, 0, 0)]).result(20)


def test_a_peer_that_is_gone_closes_the_link_and_its_replacement_is_read_again(workers: Workers) -> None:
    taker = workers[ParallelLayout(1, 2)][0]
    giver = Worker.of(ParallelLayout(1, 1))
    epoch = giver.fill(range(BLOCK_SIZE), (0,))
    gone = giver.peer
    taker.executor.pull(gone, [BlockPull(0, epoch, 0)]).result(20)
    giver.executor.close()
    with pytest.raises(LinkClosed):
        taker.executor.pull(gone, [BlockPull(0, epoch, 0)]).result(20)
    taker.executor.close_links(gone.key)
    giver = Worker.of(ParallelLayout(1, 1))
    try:
        epoch = giver.fill(range(30, 30 + BLOCK_SIZE), (0,))
        taker.executor.pull(giver.peer, [BlockPull(0, epoch, 1)]).result(20)
        assert taker.digests((1,)) == giver.digests((0,))
    finally:
        giver.executor.close()


@pytest.mark.parametrize("layout", [ParallelLayout(2, 1), ParallelLayout(1, 2)], ids=str)
def test_a_killed_rank_fails_everything_at_once(layout: ParallelLayout) -> None:
    worker = Worker.of(layout, Toy(at_rank=1, hang_at=2))
    try:
        worker.fill(range(4), (0,))
        steps = [worker.executor.step(worker.plan(range(4), (0,))) for _ in range(2)]
        digesting = worker.executor.digests([(0, 4)])
        children(worker.executor)[0].kill()
        reason = worker.executor.failed.result(5)
        assert "rank 1" in str(reason)
        for future in (*steps, digesting):
            assert isinstance(future.exception(5), WorkerLost)
        assert isinstance(worker.executor.step(worker.plan(range(4), (0,))).exception(1), WorkerLost)
        assert isinstance(worker.executor.pull(worker.peer, [BlockPull(0, 0, 1)]).exception(1), WorkerLost)
    finally:
        worker.executor.close()
    assert all(child.returncode is not None for child in children(worker.executor))


def test_what_rank_0_waits_for_is_given_up_when_another_rank_is_lost() -> None:
    worker = Worker.of(ParallelLayout(2, 1), Toy(at_rank=0, hang_at=1))
    step = worker.executor.step(worker.plan(range(4), (0,)))
    children(worker.executor)[0].kill()
    assert isinstance(step.exception(5), WorkerLost)
    worker.executor.close()
    assert worker.executor._rank0 is not None
    assert not worker.executor._rank0._thread.is_alive()


def test_what_another_rank_waits_for_is_given_up_when_rank_0_is_lost() -> None:
    """As a Ray actor's rank, whose process goes on: no thread of it is left waiting."""
    spec = spec_of(ParallelLayout(2, 1), token="secret")
    rendezvous = listen("127.0.0.1", "secret")
    limits = RankLimits(start_seconds=60, step_seconds=0.5, silent_seconds=60, close_seconds=1)
    with ThreadPoolExecutor(1) as elsewhere:
        joined = elsewhere.submit(rank_main, rendezvous.address, "secret", 1)
        executor = build_executor(spec, rendezvous, make_runner=Toy(at_rank=1, hang_at=1), limits=limits)
        rank1 = [thread for thread in threading.enumerate() if thread.name == "rank1"]
        assert len(rank1) == 1
        executor.step(Worker(executor).plan(range(4), (0,)))
        assert "did not end step 1" in str(executor.failed.result(10))
        assert isinstance(joined.exception(10), WorkerLost)
        rank1[0].join(10)
        assert not rank1[0].is_alive()
        executor.close()


@pytest.mark.parametrize("layout", [ParallelLayout(1, 1), ParallelLayout(2, 1)], ids=str)
def test_a_step_is_launched_behind_one_that_the_device_has_not_done(layout: ParallelLayout) -> None:
    worker = Worker.of(layout, Toy(awaited=True))
    try:
        for _ in range(5):
            steps = [worker.executor.step(worker.plan(range(3), (0,))) for _ in range(2)]
            results = [step.result(20) for step in steps]
            assert [result.token_ids for result in results] == [(result.number * 1001,) for result in results]
            assert all(result.seconds > 0 for result in results)
    finally:
        worker.executor.close()


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_fails_everything(rank: int, awaited: bool) -> None:
    worker = Worker.of(ParallelLayout(2, 1), Toy(at_rank=rank, raise_at=2, awaited=awaited))
    try:
        steps = [worker.executor.step(worker.plan(range(4), (0,))) for _ in range(2)]
        assert steps[0].result(20)
        step = steps[1]
        assert isinstance(step.exception(10), WorkerLost)
        assert "told to fail" in str(worker.executor.failed.result(1))
    finally:
        worker.executor.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_in_a_step_fails_everything_within_the_bound(rank: int) -> None:
    limits = RankLimits(start_seconds=60, step_seconds=0.5, silent_seconds=60, close_seconds=1)
    worker = Worker.of(ParallelLayout(2, 1), Toy(at_rank=rank, hang_at=1), limits)
    try:
        step = worker.executor.step(worker.plan(range(4), (0,)))
        assert isinstance(step.exception(10), WorkerLost)
        assert "did not end step 1" in str(worker.executor.failed.result(1))
    finally:
        worker.executor.close()
    assert children(worker.executor)[0].returncode is not None


def test_a_stopped_rank_is_noticed_without_a_step_and_does_not_outlive_close() -> None:
    limits = RankLimits(start_seconds=60, step_seconds=60, silent_seconds=2, close_seconds=1)
    worker = Worker.of(ParallelLayout(2, 1), limits=limits)
    (child,) = children(worker.executor)
    child.send_signal(signal.SIGSTOP)
    assert "silent" in str(worker.executor.failed.result(20))
    worker.executor.close()
    assert child.returncode == -signal.SIGKILL


def test_a_profile_that_fails_is_answered_so_and_costs_no_rank(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(profiler: StepProfiler) -> None:
        raise OSError("no room for a trace")

    worker = workers[ParallelLayout(1, 1)][0]
    monkeypatch.setattr(StepProfiler, "read", full)
    profiling = worker.executor.profile(1)
    worker.executor.step(worker.plan(range(3), (0,))).result(20)
    with pytest.raises(HeadraceError, match="no room for a trace"):
        profiling.result(20)
    assert not worker.executor.failed.done()
    worker.executor.step(worker.plan(range(3), (0,))).result(20)


def test_close_ends_all_ranks_and_may_be_called_again() -> None:
    worker = Worker.of(ParallelLayout(2, 2))
    step = worker.executor.step(worker.plan(range(4), (0,)))
    step.result(20)
    worker.executor.close()
    assert [child.returncode for child in children(worker.executor)] == [0, 0, 0]
    worker.executor.close()
    assert not worker.executor.failed.done(), "closing is no failure"
    assert isinstance(worker.executor.step(worker.plan(range(4), (0,))).exception(1), WorkerLost)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_fails_with_while_loading_is_raised(rank: int) -> None:
    toy = Toy(at_rank=rank, raise_on_load=True)
    with pytest.raises(CheckpointError, match="truncated") as caught:
        build_executor(spec_of(ParallelLayout(2, 1)), make_runner=toy, limits=LIMITS)
    assert caught.value.numbers == {"file": "model.safetensors"}


def test_ranks_from_elsewhere_join_with_the_token() -> None:
    spec = spec_of(ParallelLayout(2, 1), token="secret")
    rendezvous = listen("127.0.0.1", "secret")
    with pytest.raises(HeadraceError):
        rank_main(rendezvous.address, "another", 1)
    with ThreadPoolExecutor(1) as elsewhere:
        joined = elsewhere.submit(rank_main, rendezvous.address, "secret", 1)
        executor = build_executor(spec, rendezvous, make_runner=Toy(), limits=LIMITS)
        executor.close()
        joined.result(10)


def test_ranks_that_do_not_come_are_named() -> None:
    limits = RankLimits(start_seconds=0.2)
    with pytest.raises(WorkerLost, match=r"ranks \[1, 2, 3\]"):
        build_executor(spec_of(ParallelLayout(2, 2)), listen("127.0.0.1", "secret"), make_runner=Toy(), limits=limits)


def test_ranks_do_not_outlive_a_killed_rank_0() -> None:
    program = (
        "import sys\n"
        "from tests.contract.test_executor import Worker, children\n"
        "from headrace.values import ParallelLayout\n"
        "worker = Worker.of(ParallelLayout(2, 1))\n"
        "print(children(worker.executor)[0].pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank0:
        assert rank0.stdout is not None
        orphan = int(rank0.stdout.readline())
        watched = os.pidfd_open(orphan)
        rank0.kill()
        ended = wait([watched], timeout=10)
        os.close(watched)
        assert ended, "the child ends when rank 0 does"
