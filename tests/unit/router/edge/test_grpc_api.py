"""The gRPC edge, over a real channel and through the public client, with a scripted core behind it."""

import asyncio
import json
import pkgutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import AsyncGeneratorType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.client import AsyncClient, Client
from headrace.clock import ManualClock, SystemClock
from headrace.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestCancelled,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)
from headrace.v1 import inference_pb2, inference_pb2_grpc
from router.decisions.tenants import Targets, Tenancy, Tenant
from router.edge import common, grpc_api
from router.edge.grpc_api import DETAILS_KEY, RETRY_INFO_URL, SERVICE, add_services, open_server
from router.flight import Job, Piece
from router.text.vocabulary import Text
from tests.unit.router.scripted import Scripted, make_edge

ANSWER = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def serving(core: Scripted, **edge: Any) -> AsyncIterator[str]:
    server, port = open_server("127.0.0.1", 0, 2**20)
    add_services(server, make_edge(core.text, core, clock=ManualClock(), **edge))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
def core(tiny: Text) -> Scripted:
    return Scripted(tiny, ANSWER)


@pytest.fixture
async def client(core: Scripted) -> AsyncIterator[AsyncClient]:
    async with serving(core) as address, AsyncClient(address) as client:
        yield client


async def test_generate_streams_text_ids_and_at_last_usage_and_path(client: AsyncClient, core: Scripted) -> None:
    parts = [part async for part in client.generate("hi", request_id="mine", logprobs=1)]
    assert "".join(part.text for part in parts) == ANSWER
    assert [token for part in parts for token in part.token_ids] == core.text.encode(ANSWER)
    assert {part.request_id for part in parts} == {"mine"}
    assert all(len(part.logprobs) == 1 and len(part.logprobs[0].top) == 1 for part in parts)
    *others, last = parts
    assert not any(part.finish_reason or part.usage or part.path for part in others)
    assert last.finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == len(parts)
    assert last.path is not None
    assert (last.path.decode_worker, last.path.prefill_worker, last.path.attempts) == ("d1", "p1", 1)


async def test_token_ids_are_a_prompt_too(client: AsyncClient, core: Scripted) -> None:
    assert [part async for part in client.generate([10, 11, 12])]
    assert core.jobs[0].prompt_token_ids == (10, 11, 12)


async def test_case_32_both_edges_render_a_chat_to_the_same_prompt(client: AsyncClient, core: Scripted) -> None:
    assert [part async for part in client.chat(MESSAGES)]
    rendered = core.text.render(MESSAGES)
    assert list(core.jobs[0].prompt_token_ids) == core.text.encode(rendered, add_special_tokens=False)


async def test_every_sampling_parameter_arrives_and_zero_is_not_absent(client: AsyncClient, core: Scripted) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 0,
        "min_p": 0.25,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
        "logit_bias": {7: -1.5},
        "seed": 0,
        "max_tokens": 5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
        "stop": ["zz"],
        "logprobs": 0,
        "n": 2,
        "priority": 3,
        "cache_salt": "salt",
    }
    assert [part async for part in client.generate("hi", **sampling)]
    job, got = core.jobs[0], core.jobs[0].sampling
    same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for name in (*same, "seed", "max_tokens", "min_tokens", "ignore_eos"):
        assert getattr(got, name) == sampling[name], name
    assert (got.logit_bias, got.stop_token_ids, got.num_logprobs) == (((7, -1.5),), (3, 4), 0)
    assert (job.n, job.stop, job.priority, job.cache_salt) == (2, ("zz",), 3, "salt")


async def test_silence_leaves_the_defaults(client: AsyncClient, core: Scripted) -> None:
    assert [part async for part in client.generate("hi")]
    got = core.jobs[0].sampling
    assert (got.temperature, got.max_tokens, got.num_logprobs, got.logit_bias) == (1.0, 16, None, ())


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ({"temperature": float("nan")}, InvalidRequest, "temperature must be from 0.0 to 100.0, got nan"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": 100}, ContextLengthExceeded, "context of 64 tokens"),
        ({"logit_bias": {500: 1.0}}, InvalidRequest, "logit_bias token id must be"),
        ({"stop": [""]}, InvalidRequest, r"stop\[0\] must be"),
        ({"stop": ["x"] * 100_000}, InvalidRequest, "at most 16 strings"),
        ({"model": "other"}, ModelNotFound, "model must be one of tiny, got 'other'"),
        ({"request_id": "a b"}, InvalidRequest, "request_id must be"),
        ({"colour": 1}, InvalidRequest, "colour"),
    ],
)
async def test_case_48_a_bad_value_comes_back_as_its_own_error(
    client: AsyncClient, core: Scripted, asked: dict[str, Any], kind: type[HeadraceError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        assert [part async for part in client.generate("hi", **asked)]
    assert core.jobs == []


@pytest.mark.parametrize(
    ("prompt", "said"), [("", "at least 1 character"), ([], "at least 1 token"), ([10**6], r"prompt\[0\] must be")]
)
async def test_case_48_a_bad_prompt_is_refused(client: AsyncClient, prompt: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        assert [part async for part in client.generate(prompt)]


async def test_numbers_and_retry_after_travel_with_the_error(client: AsyncClient, core: Scripted) -> None:
    core.error = Overloaded("the queue is full", retry_after_seconds=1.5, limit=7)
    with pytest.raises(Overloaded) as caught:
        assert [part async for part in client.generate("hi")]
    assert (caught.value.retry_after_seconds, caught.value.numbers) == (1.5, {"limit": "7"})
    with pytest.raises(ContextLengthExceeded) as beyond:
        assert [part async for part in client.generate("hi", max_tokens=100)]
    assert (beyond.value.field, beyond.value.numbers["limit"]) == ("max_tokens", "64")


async def test_an_error_mid_stream_ends_the_stream_as_that_error(client: AsyncClient, core: Scripted) -> None:
    core.error, core.fail_after = WorkerLost("the worker is gone"), 2
    parts = client.generate("hi")
    assert [(await anext(parts)).finish_reason for _ in range(2)] == [None, None]
    with pytest.raises(WorkerLost, match="the worker is gone"):
        await anext(parts)


async def test_an_unforeseen_failure_says_nothing_of_the_inside(
    client: AsyncClient, core: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    core.error, core.fail_after = KeyError("secret"), 1  # type: ignore[assignment]
    with pytest.raises(InternalError, match=r"^internal error: KeyError$"):
        assert [part async for part in client.generate("hi")]
    assert "secret" in caplog.text


async def test_case_44_closing_the_stream_cancels_the_request(tiny: Text) -> None:
    core = Scripted(tiny, ANSWER, gate=asyncio.Semaphore(0))
    async with serving(core) as address, AsyncClient(address) as client:
        parts = client.generate("hi", request_id="r1")
        await anext(parts)
        await parts.aclose()
        await core.ended.wait()
    assert core.cancelled == ["r1"]


class Talking(Scripted):
    """Says more than any window between router and client holds, without an end."""

    async def stream(self, job: Job) -> AsyncGenerator[Piece]:
        self.jobs.append(job)
        try:
            while True:
                yield Piece(0, "x" * 2**16)
                await asyncio.sleep(0)
        finally:
            self.ended.set()


async def test_case_60_a_client_that_does_not_read_holds_up_no_drain(
    tiny: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "UNREAD_SECONDS", 0.1)
    core = Talking(tiny)
    server, port = open_server("127.0.0.1", 0, 2**20)
    edge = make_edge(tiny, core, clock=SystemClock())
    add_services(server, edge)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(model="tiny", text="hi")
            )
            await asyncio.wait_for(call.read(), 10)
            await asyncio.wait_for(edge.drain(), 10)
            call.cancel()
    finally:
        await server.stop(None)


async def test_a_client_that_reads_nothing_loses_its_call_and_hears_why_when_it_reads_again(
    tiny: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held its tenant's slot for as long as it kept its connection."""
    monkeypatch.setattr(grpc_api, "READS_NOTHING_SECONDS", 0.05)
    core = Talking(tiny)
    async with serving(core) as address, AsyncClient(address) as client:
        parts = client.generate("hi")
        await asyncio.wait_for(anext(parts), 10)
        await asyncio.wait_for(core.ended.wait(), 10)
        with pytest.raises(RequestCancelled, match="the client read nothing"):
            await asyncio.wait_for(collected(parts), 10)


async def test_a_client_that_waits_for_its_next_token_keeps_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[[], None]] = []

    def call_later(seconds: float, look: Callable[..., None], *args: object) -> asyncio.Handle:
        looks.append(lambda: look(*args))
        return asyncio.Handle(look, args, asyncio.get_running_loop())

    async def pieces() -> AsyncGenerator[Piece]:
        yield Piece(0, "x")
        await asyncio.Event().wait()

    relay = common.Relay(pieces())
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    async with relay.bounded(60.0):
        await anext(relay.pieces)
        relay.num_taken += 1
        waiting = asyncio.ensure_future(anext(relay.pieces))
        for _ in range(3):
            await asyncio.sleep(0)
            looks.pop()()
        waiting.cancel()
        await asyncio.wait([waiting])
    assert len(looks) == 1


async def test_case_60_a_drain_waits_for_a_stream_whose_next_token_is_long_in_coming(
    tiny: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has taken all there is: that is no client who does not read."""
    monkeypatch.setattr(common, "UNREAD_SECONDS", 0.01)
    looks = asyncio.Semaphore(0)

    def looked(relay: common.Relay) -> bool:
        looks.release()
        return isinstance(relay.pieces, AsyncGeneratorType) and not relay.pieces.ag_running

    monkeypatch.setattr(common.Relay, "waits_for_client", property(looked))
    core = Scripted(tiny, ANSWER, gate=asyncio.Semaphore(0))
    server, port = open_server("127.0.0.1", 0, 2**20)
    edge = make_edge(tiny, core, clock=SystemClock())
    add_services(server, edge)
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client, asyncio.timeout(10):
            parts = client.generate("hi", max_tokens=3)
            await anext(parts)
            drained = asyncio.create_task(edge.drain())
            for _ in range(5):
                await looks.acquire()
            assert not drained.done()
            assert core.gate is not None
            for _ in range(3):
                core.gate.release()
            assert [part.finish_reason async for part in parts][-1] == "length"
            await drained
    finally:
        await server.stop(None)


async def test_a_deadline_travels_as_time_left(tiny: Text) -> None:
    core = Scripted(tiny, ANSWER, gate=asyncio.Semaphore(0))
    async with serving(core) as address, AsyncClient(address) as client:
        with pytest.raises(DeadlineExceeded):
            assert [part async for part in client.generate("hi", timeout=0.2)]
        await core.ended.wait()
    seconds_left = core.jobs[0].seconds_left
    assert seconds_left is not None
    assert 0 < seconds_left < 0.25  # gRPC counts a deadline up to its next tick


@pytest.mark.parametrize("text", ["not json", "[1", ""])
async def test_messages_that_are_no_json_are_named(core: Scripted, text: str) -> None:
    async with serving(core) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Chat(inference_pb2.ChatRequest(model="tiny", messages_json=text)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "messages" in (caught.value.details() or "")


LONG = "word " * 20_000


@pytest.mark.parametrize(
    ("watched", "ask"),
    [
        (
            "router.edge.grpc_api.parse_json",
            lambda client: collected(client.chat([{"role": "user", "content": LONG}])),
        ),
        ("router.text.vocabulary.Text.encode", lambda client: client.tokenize(LONG)),
        ("router.text.vocabulary.Text.decode", lambda client: client.detokenize([5] * 40_000)),
    ],
    ids=["messages", "text", "token ids"],
)
async def test_what_takes_long_runs_on_other_threads(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, watched: str, ask: Callable[[AsyncClient], Awaitable[object]]
) -> None:
    threads: set[int] = set()
    path, _, name = watched.rpartition(".")
    owner = pkgutil.resolve_name(path)
    function = getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        threads.add(threading.get_ident())
        return function(*given, **named)

    monkeypatch.setattr(owner, name, noted)
    with suppress(ContextLengthExceeded, InvalidRequest):
        await ask(client)
    assert threads
    assert threading.get_ident() not in threads


async def collected(parts: AsyncIterator[object]) -> list[object]:
    return [part async for part in parts]


async def test_words_and_models(client: AsyncClient, core: Scripted) -> None:
    token_ids = await client.tokenize("The fox 🙂")
    assert token_ids == core.text.encode("The fox 🙂")
    assert await client.detokenize(token_ids) == "The fox 🙂"
    (model,) = await client.models()
    assert (model.id, model.revision, model.max_context_tokens) == ("tiny", "r1", 64)
    with pytest.raises(InvalidRequest, match=r"token_ids\[0\] must be"):
        await client.detokenize([10**6])


async def test_keys_guard_the_service_but_not_its_health(core: Scripted) -> None:
    async with serving(core, api_keys=["k1"]) as address:
        async with AsyncClient(address, model="tiny") as client:
            with pytest.raises(Unauthenticated):
                assert [part async for part in client.generate("hi")]
            with pytest.raises(Unauthenticated):
                await client.models()
        async with AsyncClient(address, api_key="k1") as client:
            assert [part async for part in client.generate("hi")]
        assert await health_of(address) == health_pb2.HealthCheckResponse.SERVING


async def health_of(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        return int(answer.status)


async def test_case_59_health_is_not_serving_while_nobody_could_serve(core: Scripted) -> None:
    async with serving(core, unready="no worker") as address:
        assert await health_of(address) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_lists_the_services(core: Scripted) -> None:
    async with serving(core) as address, grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = await stub.ServerReflectionInfo(requests).read()
        names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_the_sync_client_speaks_the_same(core: Scripted) -> None:
    def talk(address: str) -> tuple[str, str, list[int]]:
        with Client(address) as client:
            generated = "".join(part.text for part in client.generate("hi"))
            chatted = "".join(part.text for part in client.chat(MESSAGES, tools=None))
            with pytest.raises(InvalidRequest):
                list(client.generate(""))
            next(early := client.generate("hi"))
            early.close()
            return generated, chatted, client.tokenize("fox")

    async with serving(core) as address:
        generated, chatted, token_ids = await asyncio.to_thread(talk, address)
    assert generated == chatted == ANSWER
    assert core.text.decode(token_ids) == "fox"


async def test_a_router_that_is_not_there_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1", model="m") as client:
        with pytest.raises(Unavailable):
            assert [part async for part in client.generate("hi")]


async def test_tools_and_template_kwargs_reach_the_template(client: AsyncClient, core: Scripted) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    kwargs = {"add_generation_prompt": False}
    assert [part async for part in client.chat(MESSAGES, tools=[tool], chat_template_kwargs=kwargs)]
    rendered = core.text.render(MESSAGES, [tool], kwargs)
    assert core.text.decode(core.jobs[0].prompt_token_ids) == "user\nhi\n"
    assert list(core.jobs[0].prompt_token_ids) == core.text.encode(rendered, add_special_tokens=False)
    assert json.dumps(tool) not in rendered


async def test_what_may_be_retried_says_when_as_clients_of_any_language_look_for_it(core: Scripted) -> None:
    core.error = Overloaded("the queue is full", retry_after_seconds=1.5)
    async with serving(core) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(inference_pb2.GenerateRequest(model="tiny", text="hi")).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(caught.value.trailing_metadata() or ())
    status = inference_pb2.RpcStatus.FromString(trailing[DETAILS_KEY])
    assert (status.code, status.message) == (8, "the queue is full")
    (detail,) = status.details
    assert detail.type_url == RETRY_INFO_URL
    # google.rpc.RetryInfo: field 1 is a Duration of seconds (1) and nanoseconds (2)
    assert detail.value == b"\x0a\x08\x08\x01\x10\x80\xca\xb5\xee\x01"


async def test_a_request_is_its_keys_tenants_and_names_its_class_in_the_message_or_in_metadata(core: Scripted) -> None:
    tenancy = Tenancy(
        {"default": Tenant(), "acme": Tenant("acme")}, {"chat": Targets(1.0), "batch": Targets(60.0)}, "batch"
    )
    async with serving(core, api_keys={"acme": ["k"]}, tenancy=tenancy) as address:
        async with AsyncClient(address, api_key="k") as client:
            assert [part async for part in client.generate("hi")]
            assert [part async for part in client.generate("hi", service_class="chat")]
            assert [part async for part in client.chat(MESSAGES, service_class="chat")]
            with pytest.raises(InvalidRequest, match="service_class must be one of chat, batch, got 'fast'"):
                assert [part async for part in client.generate("hi", service_class="fast")]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            metadata = (("authorization", "Bearer k"), ("x-headrace-class", "chat"))
            await stub.Generate(inference_pb2.GenerateRequest(model="tiny", text="hi"), metadata=metadata).read()
    assert {job.tenant for job in core.jobs} == {"acme"}
    assert [job.service_class for job in core.jobs] == ["batch", "chat", "chat", "chat"]


async def test_a_tenant_below_the_usual_priority_need_not_name_its_own(core: Scripted) -> None:
    """On the wire a priority of 0 and none are the same."""
    tenancy = Tenancy({"default": Tenant(max_priority=-5)})
    async with serving(core, tenancy=tenancy) as address, AsyncClient(address) as client:
        assert [part async for part in client.generate("hi")]
        assert [part async for part in client.chat(MESSAGES, priority=-7)]
        with pytest.raises(InvalidRequest, match="from -100 to -5, got 1"):
            assert [part async for part in client.generate("hi", priority=1)]
    assert [job.priority for job in core.jobs] == [-5, -7]
