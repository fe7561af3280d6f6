"""The gRPC edge: headrace.v1.Inference, with health and reflection beside it.

Errors take their code from the one table; their type, numbers and when to come back travel in the trailing metadata, so
that headrace.client rebuilds them.
"""

import json
import logging
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.client import ERROR_KEY, NUMBERS_KEY, RETRY_KEY
from headrace.errors import ConfigError, HeadraceError, InternalError, Meaning, meaning
from headrace.logs import serving
from headrace.v1 import inference_pb2, inference_pb2_grpc
from router.decisions.tenants import Tenant
from router.edge.common import Edge, encode
from router.edge.json_input import parse_json
from router.edge.validate import (
    CLASS_HEADER,
    CONVERSATION_HEADER,
    REVISION_HEADER,
    TRACE_HEADER,
    Asked,
    Envelope,
    check_conversation,
    check_text,
    check_token_ids,
)
from router.jobs import Job, Piece, Served

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
DETAILS_KEY = "grpc-status-details-bin"
READS_NOTHING_SECONDS = 60.0  # as over HTTP: a call whose client does not read would hold its tenant's slot for ever
RETRY_INFO_URL = "type.googleapis.com/google.rpc.RetryInfo"
_LIST_FIELDS = ("stop_token_ids", "stop")
_log = logging.getLogger(__name__)


class Inference(inference_pb2_grpc.InferenceServicer):
    """Owns nothing: a request lives in the call that answers it, and ends when that is cancelled."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        try:
            with self._edge.counted(request.model):
                envelope = await self._envelope(request, context)
                prompt: Any = list(request.tokens.ids) if request.WhichOneof("prompt") == "tokens" else request.text
                job = await self._edge.prompt_job(request.model, prompt, asked(request), envelope)
                await self._answer(job, context)
        except Exception as error:
            await abort(context, error)

    async def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> None:
        try:
            with self._edge.counted(request.model):
                envelope = await self._envelope(request, context)
                job = await self._edge.chat_job(
                    request.model,
                    await self._json("messages_json", request.messages_json),
                    await self._json("tools_json", request.tools_json),
                    await self._json("chat_template_kwargs_json", request.chat_template_kwargs_json),
                    asked(request),
                    envelope,
                )
                await self._answer(job, context)
        except Exception as error:
            await abort(context, error)

    async def _answer(self, job: Job, context: Any) -> None:
        async with self._edge.relay(job) as relay, relay.bounded(READS_NOTHING_SECONDS):
            async for piece in relay.pieces:
                await context.write(response(job, piece))
                relay.num_taken += 1
        if job.served is not None and job.served.revision:
            context.set_trailing_metadata(((REVISION_HEADER, job.served.revision),))

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        try:
            self._authorise(context)
            model = self._edge.models.get(request.model)
            text = check_text("text", request.text)
            token_ids = await encode(model, text, add_special_tokens=request.add_special_tokens)
            return inference_pb2.TokenizeResponse(token_ids=token_ids)
        except Exception as error:
            await abort(context, error)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        try:
            self._authorise(context)
            model = self._edge.models.get(request.model)

            def decoded() -> str:
                return model.text.decode(check_token_ids("token_ids", list(request.token_ids), model.vocab_size))

            text = await self._edge.parse(decoded, size=len(request.token_ids))
            return inference_pb2.DetokenizeResponse(text=text)
        except Exception as error:
            await abort(context, error)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        try:
            self._authorise(context)
        except HeadraceError as error:
            await abort(context, error)
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    id=model.name, revision=model.revision, max_context_tokens=self._edge.max_context_tokens(model)
                )
                for model in self._edge.models
            ]
        )

    async def _json(self, field: str, text: str) -> Any:
        return await self._edge.parse(parse_json, field, text, field, size=len(text)) if text else None

    def _authorise(self, context: Any) -> Tenant:
        return self._edge.authorise(_metadata(context).get("authorization"))

    async def _envelope(self, request: Any, context: Any) -> Envelope:
        """Who asks, and what comes beside it. The span of the answer goes back at once, where there is one."""
        arrived_at, metadata = self._edge.now(), _metadata(context)
        tenant = self._authorise(context)
        trace = self._edge.enter_trace(metadata.get("traceparent", ""))
        if trace is not None:
            await context.send_initial_metadata(((TRACE_HEADER, trace.traceparent),))
        request_id = self._edge.new_id(request.request_id)
        serving(request_id, trace)
        return Envelope(
            request_id=request_id,
            tenant=tenant,
            seconds_left=context.time_remaining(),
            traceparent=metadata.get("traceparent", ""),
            service_class=metadata.get(CLASS_HEADER),
            arrived_at=arrived_at,
            trace=trace,
            conversation=check_conversation(metadata.get(CONVERSATION_HEADER, "")),
            served=Served(),
        )


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """SERVING while the router could serve a request: asked anew at every Check. `changed` tells those who Watch."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._watched = health.aio.HealthServicer()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        await self.changed()
        return await self._watched.Check(request, context)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        await self.changed()
        await self._watched.Watch(request, context)

    async def changed(self) -> None:
        serving = self._edge.unready() is None
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._watched.set(service, status)


def open_server(host: str, port: int, max_message_bytes: int, credentials: Any = None) -> tuple[Any, int]:
    """A grpc.aio server that holds its port and serves nothing yet, plain where there are no `credentials`; ConfigError
    when the port cannot be had."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ]
    )
    try:
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if credentials is None:
            return server, server.add_insecure_port(place)
        return server, server.add_secure_port(place, credentials)
    except RuntimeError as error:
        raise ConfigError(f"router.grpc_port: cannot listen on {host}:{port}", key="router.grpc_port") from error


def add_services(server: Any, edge: Edge) -> Health:
    """All services, before the server starts; returns the health, to be told of changes."""
    service_health = Health(edge)
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(edge), server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(service_health, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return service_health


def asked(request: Any) -> Asked:
    """The Sampling of a request: absent fields stay None."""
    sampling = request.sampling
    given = {field.name: value for field, value in sampling.ListFields() if field.has_presence}
    lists = {name: list(getattr(sampling, name)) for name in _LIST_FIELDS if getattr(sampling, name)}
    return Asked(
        **given,
        **lists,
        logit_bias=dict(sampling.logit_bias) or None,
        ignore_eos=sampling.ignore_eos,
        priority=request.priority or None,  # 0 is also absent: what the tenant may have, when that is less
        cache_salt=request.cache_salt,
        service_class=request.service_class or None,
    )


def response(job: Job, piece: Piece) -> inference_pb2.GenerateResponse:
    pb = inference_pb2.GenerateResponse(request_id=job.request_id, text=piece.text, token_ids=piece.token_ids)
    if piece.index:
        pb.index = piece.index
    if piece.finish is not None:
        pb.finish_reason = piece.finish
    for at in piece.logprobs:
        entry = pb.logprobs.add(token_id=at.token_id, logprob=at.logprob)
        for token_id, logprob in at.top:
            entry.top.add(token_id=token_id, logprob=logprob)
    if piece.usage is not None:
        pb.usage.prompt_tokens = piece.usage.prompt_tokens
        pb.usage.completion_tokens = piece.usage.completion_tokens
        pb.usage.cached_tokens = piece.usage.cached_tokens
    if piece.timeline is not None:
        worker = piece.timeline.worker
        pb.timeline.CopyFrom(
            inference_pb2.Timeline(
                router_queue_seconds=piece.timeline.router_queue_seconds,
                worker_queue_seconds=worker.claim_seconds + worker.queue_seconds,
                prefill_seconds=worker.prefill_seconds,
                transfer_exposed_seconds=worker.transfer_exposed_seconds,
                decode_seconds=worker.decode_seconds,
                decode_worker=piece.timeline.decode_worker,
                prefill_worker=worker.prefill_worker,
                blocks_moved=worker.blocks_moved,
                bytes_moved=worker.bytes_moved,
                num_preemptions=worker.num_preemptions,
                attempts=piece.timeline.attempts,
                ttft_stages=piece.timeline.ttft_stages,
            )
        )
    return pb


async def abort(context: Any, error: Exception) -> NoReturn:
    """Ends the call with the error."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError):
        raise error
    if not isinstance(error, HeadraceError):
        _log.error("a request failed unforeseen", exc_info=error)
        error = InternalError(f"internal error: {type(error).__name__}")
    means = meaning(error)
    trailing: list[tuple[str, str | bytes]] = [
        (ERROR_KEY, error.type),
        (NUMBERS_KEY, json.dumps(error.numbers).encode()),
    ]
    if means.retry_after_seconds is not None:
        trailing.append((RETRY_KEY, f"{means.retry_after_seconds:g}"))
        trailing.append((DETAILS_KEY, _details(means, error.message, means.retry_after_seconds)))
    await context.abort(grpc.StatusCode[means.grpc_code], error.message, tuple(trailing))
    raise AssertionError("context.abort returned")


def _details(means: Meaning, message: str, retry_after_seconds: float) -> bytes:
    """google.rpc.Status with google.rpc.RetryInfo, as clients of any language look for it."""
    status = inference_pb2.RpcStatus(code=grpc.StatusCode[means.grpc_code].value[0], message=message)
    info = inference_pb2.RpcRetryInfo()
    info.retry_delay.FromMilliseconds(round(retry_after_seconds * 1000))
    status.details.add(type_url=RETRY_INFO_URL, value=info.SerializeToString())
    return status.SerializeToString()


def _metadata(context: Any) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
