import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import wire
from headrace.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    WorkerLost,
)
from headrace.v1 import control_pb2, worker_pb2, worker_pb2_grpc
from headrace.values import PROTOCOL_VERSION, FinishReason, Role
from tests.session import open_session
from tests.unit.workers.memory import VOCAB, MemoryExecutor
from tests.unit.workers.rig import ENGINE, IDENTITY, Rig, a_request, a_worker
from workers import streams
from workers.serve import serve
from workers.spec import WorkerSpec

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(rig: Rig) -> int:
    reply = await health_pb2_grpc.HealthStub(rig.channel).Check(health_pb2.HealthCheckRequest())
    return int(reply.status)


async def health_becomes(rig: Rig, status: int) -> None:
    async for reply in health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest()):
        if reply.status == status:
            return


async def test_one_worker_serves() -> None:
    async with a_worker() as rig, rig.router() as router:
        answer = await router.submit(a_request(max_tokens=6)).end()
        assert answer.error is None
        assert len(answer.tokens[0]) == 6
        assert answer.finishes == {0: FinishReason.LENGTH}
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 6)
        assert answer.timeline is not None
        await rig.idle()


async def test_the_worker_introduces_itself() -> None:
    async with a_worker("w7", role=Role.DECODE) as rig, rig.router() as router:
        assert router.info == rig.info
        assert router.info.worker_id == "w7"
        assert router.info.compatibility == IDENTITY.compatibility
        assert router.info.capacity.num_blocks == 64


async def test_one_message_carries_all_tokens_of_a_step() -> None:
    executor = MemoryExecutor()
    executor.go_steps.clear()
    async with a_worker(executor=executor) as rig, rig.router() as router:
        answers = [router.submit(a_request(f"q{i}", length=2, seed=i, max_tokens=10)) for i in range(4)]
        await router.report(lambda report: report.total.num_running + report.total.num_waiting == 4)
        executor.go_steps.set()
        for answer in answers:
            await answer.end()
        assert router.num_messages <= 14, "40 tokens in 4 streams"


async def test_each_router_hears_of_its_own_requests_alone() -> None:
    async with a_worker() as rig, rig.router("a") as a, rig.router("b") as b:
        first, second = a.submit(a_request("qa", seed=1)), b.submit(a_request("qb", seed=2))
        await first.end()
        await second.end()
        assert a.answers.keys() == {"qa"}
        assert b.answers.keys() == {"qb"}


BAD = {
    "prompt": a_request("prompt", length=3),
    "logit_bias": a_request("logit_bias", logit_bias=((VOCAB, 1.0),)),
    "stop_token_ids": a_request("stop_token_ids", stop_token_ids=(VOCAB,)),
    "n": a_request("n", n=99, temperature=1.0),
}
BAD["prompt"] = replace(BAD["prompt"], prompt_token_ids=(1, VOCAB, 2))


@pytest.mark.parametrize("field", BAD)
async def test_a_bad_request_is_rejected_alone(field: str) -> None:
    async with a_worker() as rig, rig.router() as router:
        good = router.submit(a_request("good"))
        bad = await router.submit(BAD[field]).end()
        assert isinstance(bad.error, InvalidRequest)
        assert field in bad.error.message
        await good.end()
        assert good.error is None
        await rig.idle()


async def test_a_malformed_submit_is_rejected_alone() -> None:
    async with a_worker() as rig, rig.router() as router:
        submit = wire.request_to_pb(a_request("bad"))
        submit.prompt_token_ids = b"123"
        answer = router.submit(a_request("good"))
        router.answers["bad"] = type(answer)()
        router.send(submit=submit)
        assert isinstance((await router.answers["bad"].end()).error, InvalidRequest)
        assert (await answer.end()).error is None


async def test_case_28_a_prompt_beyond_the_context_names_limit_and_count() -> None:
    async with a_worker() as rig, rig.router() as router:
        answer = await router.submit(a_request(length=256)).end()
        assert isinstance(answer.error, ContextLengthExceeded)
        assert answer.error.numbers["actual"] == "256"
        fits = await router.submit(a_request("fits", length=255, max_tokens=1)).end()
        assert fits.error is None


async def test_the_backlog_is_bounded() -> None:
    executor = MemoryExecutor()
    executor.go_steps.clear()
    engine = ENGINE.model_copy(update={"max_waiting": 2, "max_num_seqs": 1})
    async with a_worker(executor=executor, engine=engine) as rig, rig.router() as router:
        answers = [router.submit(a_request(f"q{i}", seed=i)) for i in range(8)]
        refused = await answers[-1].end()
        assert isinstance(refused.error, Overloaded)
        executor.go_steps.set()
        done = [await answer.end() for answer in answers]
        assert sum(isinstance(answer.error, Overloaded) for answer in done) == len(done) - sum(
            answer.error is None for answer in done
        )


async def test_a_deadline_ends_a_request_with_its_error() -> None:
    executor = MemoryExecutor()
    executor.go_steps.clear()
    async with a_worker(executor=executor) as rig, rig.router() as router:
        answer = await router.submit(a_request(seconds_left=0.1)).end()
        assert isinstance(answer.error, DeadlineExceeded)
        executor.go_steps.set()
        await rig.idle()


async def test_cancel_frees_what_the_request_held() -> None:
    async with a_worker() as rig, rig.router() as router:
        answer = router.submit(a_request(max_tokens=200))
        await answer.until(lambda answer: len(answer.tokens[0]) > 3)
        router.cancel("q")
        await rig.idle()
        assert not answer.finishes
        assert (await router.submit(a_request("next")).end()).error is None


async def test_case_41_a_sample_that_its_router_stops_ends_and_the_others_go_on() -> None:
    async with a_worker() as rig, rig.router() as router:
        answer = router.submit(a_request(n=2, max_tokens=200))
        await answer.until(lambda answer: len(answer.tokens[0]) > 3)
        for index in (0, 0, 7):
            router.stop_sample("q", index)
        await answer.end()
        assert len(answer.tokens[0]) < len(answer.tokens[1]) == 200
        assert answer.timeline is not None
        await rig.idle()


async def test_case_44_a_closed_session_ends_its_requests() -> None:
    async with a_worker() as rig, rig.router("stays") as stays:
        kept = stays.submit(a_request("kept", seed=5, max_tokens=40))
        async with rig.router("goes") as goes:
            for i in range(4):
                goes.submit(a_request(f"q{i}", seed=i, max_tokens=200))
            await goes.answers["q0"].until(lambda answer: answer.tokens[0])
        await kept.end()
        assert len(kept.tokens[0]) == 40
        await rig.idle()


async def test_a_frozen_router_holds_nothing_though_it_takes_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not read, so the message that is being sent to it never ends, and neither does its stream."""
    monkeypatch.setattr(streams, "SILENT_SECONDS", 0.05)
    executor = MemoryExecutor()
    executor.go_steps.clear()

    async def frozen() -> AsyncIterator[worker_pb2.RouterMessage]:
        yield worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id="r0", protocol_version=PROTOCOL_VERSION))
        yield worker_pb2.RouterMessage(submit=wire.request_to_pb(a_request()))
        yield worker_pb2.RouterMessage(ping=worker_pb2.Ping(nonce=1))
        await asyncio.get_running_loop().create_future()

    async with a_worker(executor=executor) as rig:
        stream = rig.worker._sessions.Session(frozen(), None)
        assert (await anext(stream)).HasField("hello")
        while not rig.worker.num_requests:
            await rig.worker.changed()
        async with asyncio.timeout(10):
            while rig.worker.num_requests:
                await rig.worker.changed()
        executor.go_steps.set()
        await rig.idle()
        await stream.aclose()


async def test_a_load_report_tells_total_and_own() -> None:
    executor = MemoryExecutor()
    executor.go_steps.clear()
    async with a_worker(executor=executor) as rig, rig.router("a") as a, rig.router("b") as b:
        a.submit(a_request("qa", length=5, seed=1))
        b.submit(a_request("qb", length=9, seed=2))
        described = await rig.control.Describe(control_pb2.DescribeRequest())
        assert {key.request_id for key in described.requests} == {"qa", "qb"}
        seen_by_a = await a.report(lambda report: report.total.num_running + report.total.num_waiting == 2)
        assert seen_by_a.yours.num_running + seen_by_a.yours.num_waiting == 1
        assert seen_by_a.role is Role.UNIFIED
        executor.go_steps.set()
        await a.report(lambda report: report.total == report.yours and report.total.num_running == 0)


async def test_reports_come_without_change_too() -> None:
    async with a_worker() as rig, rig.router() as router:
        for _ in range(2):
            await router.report(lambda report: True)


async def test_a_router_that_cannot_be_reported_to_loses_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(session: object) -> None:
        raise RuntimeError("no report today")

    async with a_worker() as rig, rig.router() as router:
        await router.report(lambda report: True)
        monkeypatch.setattr(rig.worker, "report", broken)
        async with asyncio.timeout(10):
            await router.ended.wait()


async def test_a_ping_is_answered() -> None:
    async with a_worker() as rig, rig.router() as router:
        await router.ping()
        await router.ping()
        assert router.pongs == [1, 2]


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_a_router_of_another_protocol_is_refused(version: int) -> None:
    async with a_worker() as rig:
        call = worker_pb2_grpc.WorkerStub(rig.channel).Session()
        hello = worker_pb2.RouterHello(router_id="r", protocol_version=version)
        await call.write(worker_pb2.RouterMessage(hello=hello))
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"protocol_version must be {PROTOCOL_VERSION}, got {version}" in await call.details()


async def test_case_60_draining_refuses_new_work_and_finishes_the_old() -> None:
    async with a_worker() as rig, rig.router() as router:
        live = router.submit(a_request("live", max_tokens=100))
        await live.until(lambda answer: answer.tokens[0])
        draining = asyncio.ensure_future(rig.control.Drain(control_pb2.DrainRequest(grace_seconds=30)))
        await router.report(lambda report: report.draining)
        assert await health(rig) == NOT_SERVING
        refused = await router.submit(a_request("refused")).end()
        assert isinstance(refused.error, Draining)
        await live.end()
        assert len(live.tokens[0]) == 100
        assert (await draining).drained


async def test_case_60_what_outlives_the_grace_is_cut_with_an_error() -> None:
    executor = MemoryExecutor()
    executor.go_steps.clear()
    async with a_worker(executor=executor) as rig, rig.router() as router:
        live = router.submit(a_request("live"))
        await router.report(lambda report: report.total.num_running + report.total.num_waiting == 1)
        reply = await rig.control.Drain(control_pb2.DrainRequest(grace_seconds=0.05))
        assert (reply.drained, reply.num_cut) == (False, 1)
        assert isinstance((await live.end()).error, Draining)


async def test_case_59_a_stuck_step_makes_the_worker_unhealthy_with_a_reason() -> None:
    executor = MemoryExecutor()
    engine = ENGINE.model_copy(update={"stall_seconds": 0.2})
    async with a_worker(executor=executor, engine=engine) as rig, rig.router() as router:
        assert await health(rig) == SERVING
        executor.go_steps.clear()
        answer = router.submit(a_request())
        await health_becomes(rig, NOT_SERVING)
        described = await rig.control.Describe(control_pb2.DescribeRequest())
        assert "no step finished" in described.unhealthy_reason
        told = await router.report(lambda report: report.draining)
        assert "no step finished" in told.unhealthy_reason, "routers place nothing here meanwhile, and say why"
        executor.go_steps.set()
        await health_becomes(rig, SERVING)
        assert (await answer.end()).error is None


async def test_a_worker_that_ends_takes_leave_and_hears_its_routers_until_they_end_their_sessions() -> None:
    """Were the stream ended from this side, a router that just writes to it would lose what it had not read yet."""
    async with a_worker() as rig, rig.router() as router:
        router.stays = True
        await router.submit(a_request()).end()
        closing = asyncio.create_task(rig.worker.close())
        await router.told_of_leaving.wait()
        await router.ping()
        router.close()
        await asyncio.wait_for(router.ended.wait(), 10)
        await closing


@pytest.mark.parametrize("how", ["step", "rank"])
async def test_case_59_a_dead_engine_ends_the_worker_and_its_streams(how: str) -> None:
    executor = MemoryExecutor()
    ready: asyncio.Queue[str] = asyncio.Queue()
    spec = WorkerSpec("w0", 1, Role.UNIFIED, "tiny", engine=ENGINE)
    serving = asyncio.create_task(
        serve(spec, executor, identity=IDENTITY, ready=lambda info: ready.put_nowait(info.address))
    )
    async with open_session(await ready.get()) as router:
        answer = router.submit(a_request(max_tokens=200))
        await answer.until(lambda answer: answer.tokens[0])
        if how == "step":
            executor.step_error = RuntimeError("CUDA error")
        else:
            executor.die("rank 1 is gone")
        await answer.end()
        assert isinstance(answer.error, WorkerLost)
        assert not answer.finishes
    with pytest.raises(WorkerLost):
        await serving
