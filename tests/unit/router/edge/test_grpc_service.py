"""The gRPC edge beside its answers: keys, tenants, health, reflection."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.client import AsyncClient
from headrace.errors import InvalidRequest, Overloaded, Unauthenticated
from headrace.v1 import inference_pb2, inference_pb2_grpc
from router.decisions.tenants import Targets, Tenancy, Tenant
from router.edge.grpc_api import DETAILS_KEY, RETRY_INFO_URL, SERVICE
from tests.unit.router.edge.edges import MESSAGES, serving
from tests.unit.router.scripted import Scripted


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
