"""A collector of traces that decodes what it gets, over gRPC and HTTP."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.served_app import serving

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass
class Receiver:
    """Spans by trace, each with the service that sent it. Listens at `grpc_address` and `http_url`."""

    grpc_address: str = ""
    http_url: str = ""

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


@asynccontextmanager
async def a_receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = grpc.aio.server()
    export = grpc.unary_unary_rpc_method_handler(receiver.grpc)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": export}),))
    receiver.grpc_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    app = Starlette(routes=[Route("/v1/traces", receiver.http, methods=["POST"])])
    async with serving(app) as receiver.http_url:
        yield receiver
        await server.stop(None)
