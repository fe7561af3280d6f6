"""Who refuses whom before a block moves, and what is told of hand-offs."""

import asyncio
from dataclasses import replace

import pytest

from headrace.errors import (
    Draining,
    IncompatiblePeer,
    InvalidRequest,
    Overloaded,
)
from headrace.v1 import control_pb2
from headrace.values import ParallelLayout, Role
from tests.unit.workers.handoff.ends import a_puller, aborted, answer_to_peer_lost, both_idle
from tests.unit.workers.memory import MemoryExecutor
from tests.unit.workers.rig import (
    COMPATIBILITY,
    ENGINE,
    IDENTITY,
    a_pair,
    a_request,
    a_worker,
)
from workers.handoff.messages import PeerHello
from workers.kv.layout import ModelShape
from workers.streams import TransferServicer

Fault = control_pb2.Fault


DIFFERENT: dict[str, object] = {
    "revision": "r2",
    "kv_dtype": "float8",
    "slab_version": 9,
    "tokenizer": "t2",
    "protocol_version": 1,
}


@pytest.mark.parametrize("field", DIFFERENT)
async def test_case_61_unequal_workers_refuse_each_other_by_name(field: str) -> None:
    other = replace(IDENTITY, compatibility=replace(COMPATIBILITY, **{field: DIFFERENT[field]}))
    async with a_pair(prefill_identity=other) as (prefill, decode), decode.router() as router:
        answer = router.submit(a_request(length=20, prefill=prefill.target))
        await answer.until(lambda answer: answer.lost)
        assert answer.lost[0].error.type == IncompatiblePeer.__name__
        assert answer.lost[0].error.numbers["field"] == field
        await answer_to_peer_lost(router, answer, None)
        assert (await answer.end()).error is None
        assert prefill.executor.num_steps == 0


async def test_case_61_a_prefill_worker_refuses_another_revision_though_its_puller_would_read_it() -> None:
    """Each end looks for itself: the other may be of a version that did not look, or looked otherwise."""
    theirs = replace(COMPATIBILITY, revision="r2")
    async with a_worker("p0", role=Role.PREFILL) as rig, asyncio.timeout(20):
        call = await a_puller(rig, a_request(length=20), compatibility=theirs)
        error = await aborted(call)
        assert (error.type, error.numbers["field"]) == (IncompatiblePeer.__name__, "revision")
        await rig.idle()
        assert rig.executor.num_steps == 0
        call.cancel()


async def test_case_61_a_decode_worker_refuses_another_revision_though_its_source_would_hand_it_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TransferServicer, "_refusal", lambda self, peer: None)
    other = replace(IDENTITY, compatibility=replace(COMPATIBILITY, revision="r2"))
    async with a_pair(prefill_identity=other) as (prefill, decode), decode.router() as router, asyncio.timeout(20):
        answer = router.submit(a_request(length=20, prefill=prefill.target))
        await answer.until(lambda answer: answer.lost)
        assert answer.lost[0].error.numbers["field"] == "revision"
        await answer_to_peer_lost(router, answer, None)
        assert (await answer.end()).error is None
        assert prefill.executor.num_steps == 0


def test_case_27_a_layout_that_cannot_be_read_is_refused_as_two_workers_meet() -> None:
    shape = ModelShape(num_layers=2, num_kv_heads=4, head_dim=4, num_heads=28)
    ours = PeerHello("d0", 1, COMPATIBILITY, ParallelLayout(2), 4, 2, ("memory://0", "memory://1"))
    theirs = replace(ours, worker_id="p0", layout=ParallelLayout(7), endpoints=tuple(map(str, range(7))))
    with pytest.raises(IncompatiblePeer) as caught:
        ours.check_pair(theirs, shape)
    assert (caught.value.numbers["field"], caught.value.numbers["value"]) == ("tp", "7")
    ours.check_pair(replace(theirs, layout=ParallelLayout(1, 2), endpoints=ours.endpoints), shape)


async def test_another_generation_at_the_address_is_not_the_worker_that_was_meant() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        answer = router.submit(a_request(length=20, prefill=replace(prefill.target, generation=2)))
        await answer.until(lambda answer: answer.lost)
        assert "generation" in answer.lost[0].error.message
        router.cancel("q")
        await both_idle(prefill, decode)


async def test_a_full_prefill_worker_refuses_tickets_as_overloaded() -> None:
    full = ENGINE.model_copy(update={"max_num_seqs": 1, "max_waiting": 1})
    async with a_pair(prefill_engine=full) as (prefill, decode), decode.router() as router:
        prefill.executor.go_steps.clear()
        early = [router.submit(a_request(f"q{i}", seed=i, prefill=prefill.target)) for i in range(2)]
        for number, _ in enumerate(early, start=1):
            while prefill.worker.num_requests < number:
                await prefill.worker.changed()
        late = router.submit(a_request("late", prefill=prefill.target))
        await answer_to_peer_lost(router, late, None)
        assert late.lost[0].error.type == Overloaded.__name__
        assert late.lost[0].error.numbers["limit"] == "1"
        assert (await late.end()).error is None
        prefill.executor.go_steps.set()
        assert [(await answer.end()).error for answer in early] == [None, None]


async def test_a_prompt_that_no_pool_of_the_prefill_worker_holds_is_refused_by_it_as_invalid() -> None:
    async with a_pair(prefill_num_blocks=4) as (prefill, decode), decode.router() as router:
        answer = router.submit(a_request(length=30, prefill=prefill.target))
        await answer_to_peer_lost(router, answer, None)
        assert answer.lost[0].error.type == InvalidRequest.__name__
        assert answer.lost[0].error.numbers["limit"] == "4"
        assert (await answer.end()).error is None


async def test_a_draining_prefill_worker_refuses_tickets_and_stays_until_its_pins_are_pulled() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        decode.executor.go_pulls.clear()
        early = router.submit(a_request("early", length=10, prefill=prefill.target))
        while not prefill.counts.pinned:
            await prefill.worker.changed()
        draining = asyncio.ensure_future(prefill.control.Drain(control_pb2.DrainRequest(grace_seconds=20)))
        while not prefill.worker.draining:
            await prefill.worker.changed()
        late = router.submit(a_request("late", length=10, seed=3, prefill=prefill.target))
        await late.until(lambda answer: answer.lost)
        assert late.lost[0].error.type == Draining.__name__
        assert not draining.done()
        decode.executor.go_pulls.set()
        assert (await early.end()).error is None
        assert (await draining).drained
        await answer_to_peer_lost(router, late, None)
        assert (await late.end()).error is None


async def test_prefill_load_is_told_to_the_router_whose_request_it_is() -> None:
    async with (
        a_pair() as (prefill, decode),
        decode.router("mine") as router,
        prefill.router("mine") as mine,
        prefill.router("other") as other,
    ):
        prefill.executor.go_steps.clear()
        router.submit(a_request(length=20, prefill=prefill.target))
        report = await mine.report(lambda report: report.total.num_running + report.total.num_waiting == 1)
        assert report.yours == report.total
        report = await other.report(lambda report: report.total.num_running + report.total.num_waiting == 1)
        assert report.yours.num_running + report.yours.num_waiting == 0
        prefill.executor.go_steps.set()


async def test_links_are_described() -> None:
    async with a_pair() as (prefill, decode), decode.router() as router:
        await router.submit(a_request(length=20, prefill=prefill.target)).end()
        described = await decode.control.Describe(control_pb2.DescribeRequest())
        (link,) = described.links
        assert (link.worker_id, link.kind, link.state) == ("p0", "memory", "open")
        assert link.bytes == 5 * MemoryExecutor.block_bytes
        assert described.num_handoffs_in == 1
        assert (await prefill.control.Describe(control_pb2.DescribeRequest())).num_handoffs_out == 1
