"""The contract of workers.ranks.executor.Executor, kept by RankExecutor on plain rank processes."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from headrace.errors import HeadraceError, IncompatiblePeer, LinkClosed, StaleBlocks, TransferFailed
from headrace.values import ParallelLayout
from tests.contract.toy_runner import NUM_BLOCKS, SHAPE, Toy
from tests.contract.toy_workers import BLOCK_SIZE, Worker
from workers.kv.links.base import BlockPull, PeerRanks
from workers.ranks.profiling import StepProfiler

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("forked_ranks")]
LAYOUTS = [ParallelLayout(1, 1), ParallelLayout(2, 1), ParallelLayout(1, 2), ParallelLayout(2, 2)]
PAIRS = [(source, target) for source in LAYOUTS for target in LAYOUTS]
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


ONE_HEAD = replace(SHAPE, num_kv_heads=1)


@pytest.fixture(scope="module")
def replicas() -> Iterator[dict[int, Worker]]:
    """A worker of one rank, and one of two that both hold the one KV head; its second rank errs in plan 2."""
    made = {tp: Worker.of(ParallelLayout(tp, 1), Toy(ONE_HEAD, at_rank=1, err_at=2)) for tp in (1, 2)}
    yield made
    for worker in made.values():
        worker.executor.close()


def test_what_ranks_hold_alike_counts_once_in_a_digest_and_is_looked_at_on_all_of_them(
    replicas: dict[int, Worker],
) -> None:
    """One of two that had read something else handed it on as right."""
    alone, pair = replicas[1], replicas[2]
    epoch = alone.fill(range(3 * BLOCK_SIZE), (2, 9, 4))
    pair.fill(range(3 * BLOCK_SIZE), (1, 2, 3))
    assert pair.digests((1, 2, 3)) == alone.digests((2, 9, 4))
    pair.executor.pull(alone.peer, [BlockPull(9, epoch, 6)]).result(20)
    assert pair.digests((6,)) == alone.digests((9,))
    pair.fill(range(BLOCK_SIZE), (7,))
    with pytest.raises(TransferFailed, match="block 7 is not the same on all ranks that hold the KV heads from 0"):
        pair.digests((6, 7))
    assert pair.digests((6,)) == alone.digests((9,))


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


def test_closing_links_ends_a_pull_on_every_rank(workers: Workers) -> None:
    """Each waits for a peer that says nothing. One that is not told reads on, into blocks that are others' by then."""
    taker = workers[ParallelLayout(2, 1)][0]
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"gloo://token@127.0.0.1:{mute.getsockname()[1]}"
        peer = PeerRanks("mute", 1, ParallelLayout(1, 1), (endpoint,))
        pulling = taker.executor.pull(peer, [BlockPull(0, 0, 0)])
        knocking = [mute.accept()[0] for _ in range(taker.executor.layout.world_size)]
        taker.executor.close_links(peer.key)
        assert isinstance(pulling.exception(5), LinkClosed)
        for each in knocking:
            each.close()


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
