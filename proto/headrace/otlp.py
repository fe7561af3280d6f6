"""Spans to an OTLP endpoint. The one place that knows OpenTelemetry's library; with tracing off it is not imported."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from headrace.clock import Clock
from headrace.errors import ConfigError
from headrace.tracing import Span

CLOSE_SECONDS = 2.0
EXPORT_SECONDS = 5.0


class Spans:
    """Sends spans to one OTLP endpoint, in batches, from a thread of the library's; a collector that is slow or gone costs
    spans and nothing else. Made by `open_spans`."""

    def __init__(self, processor: Any, resource: Any, clock: Clock) -> None:
        self._processor = processor
        self._resource = resource
        self._clock = clock

    def export(self, spans: Sequence[Span]) -> None:
        """Spans of one request: all get their time of day by the same look at the clock, so that their durations stay."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        offset_ns = time.time_ns() - round(self._clock.now() * 1e9)
        for span in spans:
            its = span.context
            flags = TraceFlags(TraceFlags.SAMPLED)
            parent = SpanContext(its.trace_id, its.parent_id, is_remote=False, trace_flags=flags)
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    SpanContext(its.trace_id, its.span_id, is_remote=False, trace_flags=flags),
                    parent=parent if its.parent_id else None,
                    resource=self._resource,
                    attributes=dict(span.attributes),
                    kind=SpanKind.SERVER if span.serves else SpanKind.INTERNAL,
                    status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
                    start_time=offset_ns + round(span.began * 1e9),
                    end_time=offset_ns + round(span.ended * 1e9),
                )
            )

    async def close(self) -> None:
        """Sends what waits, within a bound. By a thread that the process does not wait for as it ends: a collector may take
        what is sent and never answer."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut() -> None:
            self._processor.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is over already
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=shut, name="spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await closed.wait()


def open_spans(endpoint: str | None, clock: Clock, service: str, instance: str) -> Spans | None:
    """None where no endpoint is configured. ConfigError when it is none, or the library is not installed."""
    if endpoint is None:
        return None
    check_endpoint(endpoint)
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        why = "tracing.otlp_endpoint: OpenTelemetry is not installed: install headrace[tracing]"
        raise ConfigError(why, key="tracing.otlp_endpoint", value=endpoint) from error
    resource = Resource({"service.namespace": "headrace", "service.name": service, "service.instance.id": instance})
    return Spans(BatchSpanProcessor(_exporter(endpoint)), resource, clock)


def check_endpoint(endpoint: str | None) -> None:
    """ConfigError when spans could not be sent there for the look of it."""
    if endpoint is not None and endpoint.partition("://")[0] not in ("grpc", "http", "https"):
        raise ConfigError.out_of_range("tracing.otlp_endpoint", endpoint, "grpc://HOST:PORT or http(s)://HOST:PORT")


def _exporter(endpoint: str) -> Any:
    """`grpc://host:port`, or http(s): protobuf over HTTP, at /v1/traces unless the URL has a path of its own."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=rest, insecure=True, timeout=EXPORT_SECONDS)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    path = "" if "/" in rest.rstrip("/") else "/v1/traces"
    return Http(endpoint=endpoint.rstrip("/") + path, timeout=EXPORT_SECONDS)
