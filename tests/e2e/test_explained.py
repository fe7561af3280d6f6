"""A router process before real workers, asked where a request went: what it says agrees with what the client got, with what
it logged, which the command makes again, and with the spans that a real OTLP receiver decodes. The router sends these by
HTTP, workers by gRPC; what the spans of the stages sum to is what the router measured as the TTFT."""

import asyncio
import json
import pathlib
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace import metrics
from headrace.metrics import SPAN_DECODE, SPAN_REQUEST, Stage, span_of
from headrace.v1 import inference_pb2, inference_pb2_grpc
from headrace.values import Usage
from router.decisions.codec import decode
from router.decisions.record import Decision, from_line
from router.explanations import Explanation
from tests.e2e.routers import RunningRouter, running_router
from tests.otlp_receiver import Receiver, a_receiver
from tests.tiny import make_checkpoint
from tests.worker_process import a_worker_process

pytestmark = [
    pytest.mark.torch,
    pytest.mark.redis,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK = 8
PROMPT = [(7 * at) % 200 for at in range(5 * BLOCK + 3)]
STAGES = {span_of(stage) for stage in Stage}
CLOCK_SECONDS = 2e-6  # sums of durations that were rounded to nanoseconds each
PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # ms between batches of spans


@dataclass
class Explained:
    receiver: Receiver
    router: RunningRouter
    folder: pathlib.Path
    log: pathlib.Path

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.router.http, timeout=60, trust_env=False)

    def logged(self) -> list[Decision]:
        return [from_line(line) for line in self.log.read_text(encoding="utf-8").splitlines()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> AsyncIterator[Explained]:
    """1 prefill + 1 decode worker, both known to the router."""
    folder = tmp_path_factory.mktemp("explained")
    checkpoint, log = make_checkpoint(folder / "model"), folder / "decisions.jsonl"
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(a_receiver())
        options = ("--block-size", str(BLOCK), "--num-blocks", "96", "--log-format", "json")
        options += ("--redis-url", redis_url, "--cluster", "why")
        options += (f"--otlp-endpoint=grpc://{receiver.grpc_address}",)
        for worker, role in (("p0", "prefill"), ("d0", "decode")):
            starting = a_worker_process(
                checkpoint, folder, worker, "--role", role, *options, environment=SOON, forked=True
            )
            await stack.enter_async_context(starting)
        sections = {
            "name": "why",
            "redis": {"url": redis_url},
            "handoff": {"local_prefill_max_tokens": 0},
            "tracing": {"otlp_endpoint": receiver.http_url, "sample_fraction": 1.0},
            "logs": {"format": "json", "requests": True},
        }
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in SOON.items():
            environment.setenv(name, value)
        logged = {"path": str(log), "fraction": 1.0}
        router = await stack.enter_async_context(
            running_router(checkpoint, folder / "headrace.yaml", [], sections, decision_log=logged)
        )
        found = Explained(receiver, router, folder, log)
        async with found.client() as client, asyncio.timeout(60):
            ready = [f'{metrics.WORKERS_READY}{{role="{role}"}} 1.0' for role in ("prefill", "decode")]
            while not _has(ready, (await client.get("/metrics")).text):
                pass
        yield found


def _has(lines: list[str], text: str) -> bool:
    return all(line in text for line in lines)


async def ask(client: httpx.AsyncClient, name: str) -> Any:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    response = await client.post(
        "/v1/completions", json={**body, "headrace": {"timeline": True}}, headers={"X-Request-Id": name}
    )
    assert response.status_code == 200, response.text
    return response.json()


async def why(client: httpx.AsyncClient, name: str) -> Explanation:
    response = await client.get(f"/why/{name}")
    assert response.status_code == 200, response.text
    return decode(Explanation, response.json())


async def command(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cluster.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


def predicted(explanation: Explanation) -> int:
    """What was counted on of the worker that prefilled, and of what it was to pull."""
    last, source = (
        explanation.whys[-1],
        explanation.timeline.worker.prefill_worker or explanation.timeline.decode_worker,
    )
    assert last.chosen is not None
    pulled = last.chosen.pulled_tokens if explanation.timeline.worker.prefill_worker else 0
    return pulled + next(one.cached_tokens for one in last.candidates if one.worker_id == source)


async def test_why_agrees_with_the_answer_and_the_log_is_made_again(on: Explained) -> None:
    names = []
    async with on.client() as client:
        while True:  # until the caches' events have come
            names.append(f"r{len(names)}")
            answer = await ask(client, names[-1])
            explanation = await why(client, names[-1])
            usage, path = answer["usage"], answer["headrace"]["timeline"][0]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert explanation.outcome == "finished"
            assert explanation.usage == Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)
            assert explanation.timeline.decode_worker == path["decode_worker"] == "d0"
            assert explanation.timeline.worker.prefill_worker == path["prefill_worker"]
            assert explanation.ttft_seconds is not None
            assert 0 < explanation.ttft_seconds <= explanation.seconds
            if len(names) == 1:
                chosen = explanation.whys[0].chosen
                assert chosen is not None
                assert (chosen.prefill, chosen.decode, predicted(explanation), cached) == ("p0", "d0", 0, 0)
            elif predicted(explanation):
                assert predicted(explanation) == cached == 5 * BLOCK
                break
        status, said = await command("why", answer["id"], "--router", str(client.base_url))
        assert status == 0, said
        assert f"{names[-1]}  finished: 43 prompt tokens, 6 generated" in said
        assert "what happened" in said
        status, said = await command("why", "nobody", "--router", str(client.base_url))
        assert (status, said) == (1, "headrace: no router knows request 'nobody', or no longer\n")

    async with asyncio.timeout(30):
        while len(logged := [one for one in on.logged() if one.request_id in names]) < len(names):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # a thread writes it
    assert [decision.request_id for decision in logged] == names
    assert logged[-1].why == explanation.whys[0]
    status, said = await command("replay-decision", str(on.log))
    assert status == 0, said
    assert said.splitlines()[-1].endswith(" decisions made again, 0 differ")


def body(length: int, **fields: object) -> dict[str, object]:
    prompt = [(7 * at + length) % 200 for at in range(length)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


def seconds(span: Any) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def attribute(span: Any, name: str) -> Any:
    value = next(at.value for at in span.attributes if at.key == name)
    return getattr(value, value.WhichOneof("value"))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_spans_of_the_stages_sum_to_the_ttft(on: Explained, stream: bool) -> None:
    """Each process' spans are of its own clock; only their durations are looked at."""
    trace_id = f"{'51' if stream else '50'}{PARENT[0][2:]}"
    headers = {"traceparent": f"00-{trace_id}-{PARENT[1]}-01", "x-request-id": f"traced-{stream}"}
    async with on.client() as client:
        answer = await client.post("/v1/completions", json=body(40 + stream, stream=stream), headers=headers)
        why = (await client.get(f"/why/traced-{stream}")).json()
        exposed = (await client.get("/metrics", headers={"accept": "application/openmetrics-text"})).text
    assert answer.status_code == 200
    version, answered_trace, span_id, flags = answer.headers["traceresponse"].split("-")
    assert (version, answered_trace, flags) == ("00", trace_id, "01")

    names = {span_of(stage) for stage in Stage if stage not in (Stage.RETRY, Stage.QUEUE)} | {SPAN_REQUEST, SPAN_DECODE}
    spans = await on.receiver.whole(trace_id, names)
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


async def test_grpc_carries_the_trace_too_and_an_unsampled_one_leaves_nothing(on: Explained) -> None:
    request = inference_pb2.GenerateRequest(model="tiny", text="a prompt of some length for a hand-off")
    request.sampling.max_tokens = 2
    kept, dropped = f"6a{PARENT[0][2:]}", f"6b{PARENT[0][2:]}"
    async with grpc.aio.insecure_channel(on.router.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        for trace_id, flags in ((dropped, "00"), (kept, "01")):
            call = stub.Generate(request, metadata=(("traceparent", f"00-{trace_id}-{PARENT[1]}-{flags}"),))
            sent = dict(await call.initial_metadata())["traceresponse"]
            assert sent.split("-")[1::2] == [trace_id, flags]
            parts = [part async for part in call]
            stages = parts[-1].timeline.ttft_stages
            assert stages["prefill"] > 0
    spans = await on.receiver.whole(kept, {SPAN_REQUEST, span_of(Stage.FIRST_TOKEN), span_of(Stage.PREFILL)})
    request_span = next(span for _, span in spans if span.name == SPAN_REQUEST)
    assert sum(stages.values()) == pytest.approx(attribute(request_span, "headrace.ttft_seconds"), abs=CLOCK_SECONDS)
    assert dropped not in on.receiver.spans


async def test_what_its_client_does_not_trace_is_sampled_here(on: Explained) -> None:
    async with on.client() as client:
        answer = await client.post("/v1/completions", json=body(9), headers={"traceparent": "00-not-one"})
        refused = await client.post("/v1/completions", json=body(9, max_tokens=0))
    trace_id = answer.headers["traceresponse"].split("-")[1]
    spans = await on.receiver.whole(trace_id, {SPAN_REQUEST})
    request = next(span for _, span in spans if span.name == SPAN_REQUEST)
    assert request.parent_span_id == b""
    assert refused.status_code == 400


async def test_logs_are_objects_with_the_requests_id(on: Explained) -> None:
    """What workers say; a router's lines are seen in its unit tests."""
    lines = (on.folder / "d0.log").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert any("is read by" in record["message"] for record in records)
    assert {"time", "level", "logger", "message"} <= records[0].keys()
