"""Traces of real requests through real processes, as a real OTLP receiver decodes them: the router sends by HTTP, workers
by gRPC. What the spans of the stages sum to is what the router measured as the TTFT."""

import asyncio
import json
import pathlib
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace import metrics
from headrace.metrics import SPAN_DECODE, SPAN_REQUEST, Stage, span_of
from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.routers import RunningRouter, running_router
from tests.served_app import serving
from tests.tiny import make_checkpoint
from tests.worker_process import a_worker_process

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

STAGES = {span_of(stage) for stage in Stage}
CLOCK_SECONDS = 2e-6  # sums of durations that were rounded to nanoseconds each
OPTIONS = ("--block-size", "8", "--max-step-tokens", "16", "--num-blocks", "96", "--log-format", "json")
PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Receiver:
    """Spans by trace, each with the service that sent it."""

    spans: dict[str, list[tuple[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, raw: bytes) -> bytes:
        for resource in otlp.ExportTraceServiceRequest.FromString(raw).resource_spans:
            service = next(at.value.string_value for at in resource.resource.attributes if at.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.trace_id.hex()].append((service, span))
        self.came.set()
        return bytes(otlp.ExportTraceServiceResponse().SerializeToString())

    async def http(self, request: Request) -> Response:
        return Response(self.take(await request.body()), media_type="application/x-protobuf")

    async def grpc(self, raw: bytes, context: Any) -> bytes:
        return self.take(raw)

    async def whole(self, trace_id: str, names: set[str]) -> list[tuple[str, Any]]:
        """All spans of the trace, once these are there: processes send theirs when they have some."""
        async with asyncio.timeout(30):
            while not names <= {span.name for _, span in self.spans[trace_id]}:
                self.came.clear()
                await self.came.wait()
        return self.spans[trace_id]


@dataclass
class Traced:
    receiver: Receiver
    router: RunningRouter
    folder: pathlib.Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    folder, receiver = tmp_path_factory.mktemp("traced"), Receiver()
    checkpoint = make_checkpoint(folder / "model")
    server = grpc.aio.server()
    export = grpc.unary_unary_rpc_method_handler(receiver.grpc)
    name = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": export}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    app = Starlette(routes=[Route("/v1/traces", receiver.http, methods=["POST"])])
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        http = await stack.enter_async_context(serving(app))
        soon = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
        workers = [
            await stack.enter_async_context(
                a_worker_process(
                    checkpoint,
                    folder,
                    worker,
                    *OPTIONS,
                    f"--role={role}",
                    f"--otlp-endpoint=grpc://127.0.0.1:{port}",
                    environment=soon,
                )
            )
            for worker, role in (("p0", "prefill"), ("d0", "decode"))
        ]
        sections = {
            "handoff": {"local_prefill_max_tokens": 0},
            "tracing": {"otlp_endpoint": http, "sample_fraction": 1.0},
            "logs": {"format": "json", "requests": True},
        }
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        router = await stack.enter_async_context(
            running_router(checkpoint, folder / "headrace.yaml", [w.address for w in workers], sections)
        )
        async with httpx.AsyncClient(base_url=router.http, trust_env=False) as client, asyncio.timeout(30):
            while 'headrace_workers_ready{role="prefill"} 1.0' not in (await client.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield Traced(receiver, router, folder)


def body(length: int, **fields: object) -> dict[str, object]:
    prompt = [(7 * at + length) % 200 for at in range(length)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


def seconds(span: Any) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def attribute(span: Any, name: str) -> Any:
    value = next(at.value for at in span.attributes if at.key == name)
    return getattr(value, value.WhichOneof("value"))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_spans_of_the_stages_sum_to_the_ttft(traced: Traced, stream: bool) -> None:
    """Each process' spans are of its own clock; only their durations are looked at."""
    trace_id = f"{'51' if stream else '50'}{PARENT[0][2:]}"
    headers = {"traceparent": f"00-{trace_id}-{PARENT[1]}-01", "x-request-id": f"traced-{stream}"}
    async with httpx.AsyncClient(base_url=traced.router.http, trust_env=False) as client:
        answer = await client.post("/v1/completions", json=body(40 + stream, stream=stream), headers=headers)
        why = (await client.get(f"/why/traced-{stream}")).json()
        exposed = (await client.get("/metrics", headers={"accept": "application/openmetrics-text"})).text
    assert answer.status_code == 200
    version, answered_trace, span_id, flags = answer.headers["traceresponse"].split("-")
    assert (version, answered_trace, flags) == ("00", trace_id, "01")

    names = {span_of(stage) for stage in Stage if stage not in (Stage.RETRY, Stage.QUEUE)} | {SPAN_REQUEST, SPAN_DECODE}
    spans = await traced.receiver.whole(trace_id, names)
    request = next(span for _, span in spans if span.name == SPAN_REQUEST)
    assert (request.parent_span_id.hex(), request.span_id.hex()) == (PARENT[1], span_id)
    children = [span for _, span in spans if span is not request]
    assert {span.parent_span_id.hex() for span in children} == {span_id}
    assert len({span.span_id for _, span in spans}) == len(spans)

    stages = {span.name: span for span in children if span.name in STAGES}
    ttft = attribute(request, "headrace.ttft_seconds")
    assert sum(map(seconds, stages.values())) == pytest.approx(ttft, abs=CLOCK_SECONDS)
    assert all(seconds(span) >= 0 for span in stages.values()), "no process takes another's time for its own"
    assert seconds(request) >= ttft
    by_service = {span.name: service for service, span in spans}
    assert by_service[span_of(Stage.EDGE)] == by_service[span_of(Stage.FIRST_TOKEN)] == "headrace-router"
    assert by_service[span_of(Stage.PREFILL)] == by_service[span_of(Stage.TICKET_WAIT)] == "headrace-worker"
    assert (attribute(request, "headrace.prefill_worker"), attribute(request, "headrace.decode_worker")) == ("p0", "d0")

    said = why["timeline"]["ttft_stages"]
    assert {span_of(Stage(stage)) for stage in said} == stages.keys()
    for stage, took in said.items():
        assert took == pytest.approx(seconds(stages[span_of(Stage(stage))]), abs=CLOCK_SECONDS), stage
    assert why["ttft_seconds"] == pytest.approx(ttft, abs=CLOCK_SECONDS)

    families = {family.name: family for family in text_string_to_metric_families(exposed)}
    for name in (metrics.TTFT, metrics.TTFT_STAGE):
        exemplars = [sample.exemplar for sample in families[name].samples if sample.exemplar is not None]
        assert trace_id in {exemplar.labels["trace_id"] for exemplar in exemplars}, name


async def test_grpc_carries_the_trace_too_and_an_unsampled_one_leaves_nothing(traced: Traced) -> None:
    request = inference_pb2.GenerateRequest(model="tiny", text="a prompt of some length for a hand-off")
    request.sampling.max_tokens = 2
    kept, dropped = f"6a{PARENT[0][2:]}", f"6b{PARENT[0][2:]}"
    async with grpc.aio.insecure_channel(traced.router.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        for trace_id, flags in ((dropped, "00"), (kept, "01")):
            call = stub.Generate(request, metadata=(("traceparent", f"00-{trace_id}-{PARENT[1]}-{flags}"),))
            sent = dict(await call.initial_metadata())["traceresponse"]
            assert sent.split("-")[1::2] == [trace_id, flags]
            parts = [part async for part in call]
            stages = parts[-1].timeline.ttft_stages
            assert stages["prefill"] > 0
    spans = await traced.receiver.whole(kept, {SPAN_REQUEST, span_of(Stage.FIRST_TOKEN), span_of(Stage.PREFILL)})
    request_span = next(span for _, span in spans if span.name == SPAN_REQUEST)
    assert sum(stages.values()) == pytest.approx(attribute(request_span, "headrace.ttft_seconds"), abs=CLOCK_SECONDS)
    assert dropped not in traced.receiver.spans


async def test_what_its_client_does_not_trace_is_sampled_here(traced: Traced) -> None:
    async with httpx.AsyncClient(base_url=traced.router.http, trust_env=False) as client:
        answer = await client.post("/v1/completions", json=body(9), headers={"traceparent": "00-not-one"})
        refused = await client.post("/v1/completions", json=body(9, max_tokens=0))
    trace_id = answer.headers["traceresponse"].split("-")[1]
    spans = await traced.receiver.whole(trace_id, {SPAN_REQUEST})
    request = next(span for _, span in spans if span.name == SPAN_REQUEST)
    assert request.parent_span_id == b""
    assert refused.status_code == 400


async def test_logs_are_objects_with_the_requests_id(traced: Traced) -> None:
    """What workers say; a router's lines are seen in its unit tests."""
    lines = (traced.folder / "d0.log").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert any("is read by" in record["message"] for record in records)
    assert {"time", "level", "logger", "message"} <= records[0].keys()
