"""The HTTP edge: the OpenAI API, and what operators ask (/health, /ready, /metrics, /why/ID, /requests).

An error before the first token is an HTTP error. After the 200 of a stream, which comes with its first token, or with the
comment that a long wait for it brings, it is one `data: {"error": …}` event, after which the stream ends without `[DONE]`:
a client can tell it from a finished answer, and the openai SDK raises.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, TypeVar

from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import Amount, HeadraceError, InternalError, InvalidRequest
from headrace.logs import serving
from router.decisions.codec import encode
from router.edge import sse
from router.edge.common import Edge
from router.edge.http_errors import error_body, error_response, http_error_response
from router.edge.openai_models import ChatBody, CompletionBody
from router.edge.openai_replies import ChatReply, CompletionReply, Head, Reply
from router.edge.together import together
from router.edge.validate import (
    CLASS_HEADER,
    CONVERSATION_HEADER,
    ID_HEADER,
    REVISION_HEADER,
    TIMEOUT_HEADER,
    TRACE_HEADER,
    Envelope,
    check_conversation,
    check_seconds,
)
from router.jobs import Job, Piece, Served
from router.text.served import ServedModel

MAX_CHOICES = 1024
MAX_RECENT = 200
CHAT_PREFIX, COMPLETION_PREFIX = "chatcmpl-", "cmpl-"  # of an answer's id, before the request's
B = TypeVar("B", ChatBody, CompletionBody)
_log = logging.getLogger(__name__)


class OpenAi:
    """The handlers. They own nothing: an answer lives in the call that gives it. `wall_seconds` is Unix time;
    `comment_seconds`: how long a stream may be silent before it says a comment, 0 for ever."""

    def __init__(
        self, edge: Edge, max_body_bytes: int, wall_seconds: Callable[[], float], comment_seconds: float = 0.0
    ) -> None:
        self._edge = edge
        self._comment_seconds = comment_seconds
        self._max_body_bytes = max_body_bytes
        self._wall_seconds = wall_seconds
        self._started = int(wall_seconds())

    def app(self) -> ASGIApp:
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/health", self.health),
                Route("/ready", self.ready),
                Route("/metrics", self.metrics),
                Route("/why/{request_id:path}", self.why),
                Route("/requests", self.requests),
            ],
            exception_handlers={
                HeadraceError: _refuse,
                HTTPException: _refuse_http,
                ClientDisconnect: _nobody_there,
                Exception: _fail,
            },
        )
        return _Gate(app, self._edge)

    async def health(self, request: Request) -> Response:
        """This process answers; nothing is said about workers."""
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        reason = self._edge.unready()
        return PlainTextResponse("ready\n" if reason is None else f"{reason}\n", 200 if reason is None else 503)

    async def metrics(self, request: Request) -> Response:
        """As the scraper asks: OpenMetrics has exemplars, which lead to a trace."""
        generate, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(generate(REGISTRY), media_type=content_type)

    async def why(self, request: Request) -> Response:
        """One request's way, as numbers: lengths, workers, seconds; nothing of its text. Yet it is one client's, so where
        keys are configured this needs one, unlike what a scraper asks."""
        tenant = self._edge.authorise(request.headers.get("authorization"))
        given = request.path_params["request_id"]
        names = (given, given.removeprefix(CHAT_PREFIX), given.removeprefix(COMPLETION_PREFIX))
        explanation = next(filter(None, (self._edge.why(name, tenant) for name in names)), None)
        if explanation is None:
            raise HTTPException(404, f"this router knows no request {given!r}, or no longer")
        return JSONResponse(await asyncio.to_thread(encode, explanation))

    async def requests(self, request: Request) -> Response:
        """Those that run and those that ended last, each as /why has it but for what was compared: one look at all of them
        costs a router no more than an answer does."""
        tenant = self._edge.authorise(request.headers.get("authorization"))
        given = request.query_params.get("limit", "50")
        if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= MAX_RECENT):
            raise InvalidRequest.out_of_range("limit", given, f"a whole number from 1 to {MAX_RECENT}")
        return JSONResponse({"requests": [encode(one) for one in self._edge.recent(tenant, int(given))]})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(model) for model in self._edge.models]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._edge.models.get(request.path_params["name"])))

    def _model(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "headrace",
            "root": model.revision,
            "max_model_len": self._edge.max_context_tokens(model),
        }

    async def chat(self, request: Request) -> sse.Answer:
        body = await self._parsed(ChatBody, request)
        with self._edge.counted(body.model, refusals_only=True):
            job = await self._edge.chat_job(
                body.model,
                body.messages,
                body.template_tools(),
                body.template_kwargs(),
                body.asked(),
                self._envelope(request),
            )
        model = self._edge.models.get(body.model)
        head = self._head(CHAT_PREFIX, job.request_id, model)
        reply = ChatReply(head, model.text, job.n, with_logprobs=body.logprobs)
        return sse.Answer(lambda send: self._answer(send, body, [job], reply))

    async def completions(self, request: Request) -> sse.Answer:
        body = await self._parsed(CompletionBody, request)
        with self._edge.counted(body.model, refusals_only=True):
            model = self._edge.models.get(body.model)
            envelope, asked = self._envelope(request), body.asked()
            prompts = _prompts(body.prompt)
            jobs = [
                await self._edge.prompt_job(body.model, prompt, asked, self._numbered(envelope, position, len(prompts)))
                for position, prompt in enumerate(prompts)
            ]
            if len(jobs) * jobs[0].n > MAX_CHOICES:
                raise InvalidRequest.out_of_range("n", jobs[0].n, f"at most {MAX_CHOICES} choices over all prompts")
        echoes = tuple(
            prompt if isinstance(prompt, str) else model.text.decode(prompt) for prompt in prompts if body.echo
        )
        reply = CompletionReply(
            self._head(COMPLETION_PREFIX, envelope.request_id, model),
            model.text,
            jobs[0].n,
            len(jobs),
            with_logprobs=body.logprobs is not None,
            echoes=echoes,
        )
        return sse.Answer(lambda send: self._answer(send, body, jobs, reply))

    async def _parsed(self, kind: type[B], request: Request) -> B:
        body = await self._body(request)
        request.scope["headrace.arrived_at"] = self._edge.now()  # a slow client's time is its own
        return await self._edge.parse(kind.parse, body, size=len(body))

    async def _body(self, request: Request) -> bytes:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise InvalidRequest.out_of_range("content-encoding", encoding, "absent: bodies are read as they are")
        declared = request.headers.get("content-length", "")
        if declared.isdigit():
            self._check_size(int(declared), declared)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            self._check_size(size, f"{size} so far")
            parts.append(part)
        return b"".join(parts)

    def _check_size(self, size: int, shown: str) -> None:
        limit = self._max_body_bytes
        if size > limit:
            raise HTTPException(413, f"the body must be at most {limit} bytes, got {shown}", {"connection": "close"})

    def _head(self, prefix: str, request_id: str, model: ServedModel) -> Head:
        return Head(
            id=prefix + request_id,
            created=int(self._wall_seconds()),
            model=model.name,
            fingerprint=f"fp_{model.revision[:12]}",
        )

    def _envelope(self, request: Request) -> Envelope:
        timeout = request.headers.get(TIMEOUT_HEADER)
        return Envelope(
            request_id=request.scope["headrace.request_id"],
            tenant=request.scope["headrace.tenant"],
            seconds_left=check_seconds(TIMEOUT_HEADER, timeout) if timeout is not None else None,
            traceparent=request.headers.get("traceparent", ""),
            service_class=request.headers.get(CLASS_HEADER),
            arrived_at=request.scope["headrace.arrived_at"],
            trace=request.scope["headrace.trace"],
            conversation=check_conversation(request.headers.get(CONVERSATION_HEADER, "")),
            served=request.scope["headrace.served"],
        )

    def _numbered(self, envelope: Envelope, position: int, num_prompts: int) -> Envelope:
        if num_prompts == 1:
            return envelope
        trace = self._edge.another(envelope.trace) if position else envelope.trace
        return replace(envelope, request_id=f"{envelope.request_id}-{position}", trace=trace)

    async def _answer(self, send: Send, body: ChatBody | CompletionBody, jobs: list[Job], reply: Reply) -> None:
        """Writes the whole answer. Counted here, whichever way it ends; nothing but cancellation leaves it."""
        events = sse.Events(send, self._comment_seconds)
        try:
            with self._edge.counted(body.model):
                async with aclosing(self._pieces(jobs)) as pieces:
                    if not body.stream:
                        async for job, piece in pieces:
                            reply.add(job, piece, keep=True)
                    else:
                        with events.kept_alive():
                            await self._stream(events, body, jobs, reply, pieces)
            if not body.stream:
                whole = reply.whole() | ({"headrace": reply.timeline()} if body.headrace.timeline else {})
                await JSONResponse(whole)({"type": "http"}, _nothing, send)
        except Exception as error:
            known = _known(error)
            if events.begun:
                await events.end(sse.event(error_body(known)))
            else:
                await error_response(known)({"type": "http"}, _nothing, send)

    async def _stream(
        self,
        events: sse.Events,
        body: ChatBody | CompletionBody,
        jobs: list[Job],
        reply: Reply,
        pieces: AsyncGenerator[tuple[int, Piece]],
    ) -> None:
        options = body.stream_options
        with_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        num_prompt_tokens = sum(len(job.prompt_token_ids) for job in jobs)

        async def write(position: int, piece: Piece) -> None:
            chunks = reply.chunks(reply.add(position, piece, keep=False), piece)
            if continuous:
                usage: Any = {"usage": reply.usage_so_far(num_prompt_tokens)}
                chunks = (chunk | usage for chunk in chunks)
            elif with_usage:
                chunks = (chunk | {"usage": None} for chunk in chunks)
            if data := b"".join(map(sse.event, chunks)):
                await events.say(data)

        async for position, piece in pieces:
            if not events.begun:
                await events.begin()
            await write(position, piece)
        last = reply.usage_chunk() if with_usage or body.headrace.timeline else None
        if last is not None and body.headrace.timeline:
            last["headrace"] = reply.timeline()
        await events.end((sse.event(last) if last is not None else b"") + sse.DONE)

    async def _pieces(self, jobs: list[Job]) -> AsyncGenerator[tuple[int, Piece]]:
        """The pieces of all jobs as they come, with the job's position. The first job that fails ends them all."""
        async with AsyncExitStack() as ends:
            relays = [await ends.enter_async_context(self._edge.relay(job)) for job in jobs]
            if len(relays) == 1:
                async for piece in relays[0].pieces:
                    yield 0, piece
                    relays[0].num_taken += 1
            else:
                async with aclosing(together([relay.pieces for relay in relays])) as numbered:
                    async for position, piece in numbered:
                        yield position, piece
                        relays[position].num_taken += 1


class _Gate:
    """In front of /v1: the API key, and X-Request-Id on every answer, with its span where it has one. The rest is open to
    probes and scrapers."""

    def __init__(self, app: ASGIApp, edge: Edge) -> None:
        self._app = app
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        request_id = ""
        try:
            request_id = self._edge.new_id(headers.get(ID_HEADER.encode(), ""), ID_HEADER)
            tenant = self._edge.authorise(headers.get(b"authorization"))
        except HeadraceError as error:
            refusal = error_response(error)
            refusal.headers[ID_HEADER] = request_id or self._edge.new_id()
            await refusal(scope, receive, send)
            return
        scope["headrace.request_id"], scope["headrace.tenant"] = request_id, tenant
        scope["headrace.served"] = served = Served()
        scope["headrace.trace"] = trace = self._edge.enter_trace(headers.get(b"traceparent", ""))
        serving(request_id, trace)
        shown = [(ID_HEADER.encode(), request_id.encode())]
        if trace is not None:
            shown.append((TRACE_HEADER.encode(), trace.traceparent.encode()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                revision = [(REVISION_HEADER.encode(), served.revision.encode())] if served.revision else []
                message = {**message, "headers": [*message["headers"], *shown, *revision]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _prompts(prompt: Any) -> Sequence[Any]:
    """A string, a list of strings, a list of token ids, or a list of such lists: one prompt each."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > MAX_CHOICES:
            raise InvalidRequest.out_of_range(
                "prompt", Amount(f"{len(prompt)} prompts"), f"at most {MAX_CHOICES} prompts"
            )
        return prompt
    return [prompt]


def _known(error: Exception) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error
    _log.error("a request failed unforeseen", exc_info=error)
    return InternalError(f"internal error: {type(error).__name__}")


async def _refuse(request: Request, error: Exception) -> Response:
    return error_response(_known(error))


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return http_error_response(error)


async def _nobody_there(request: Request, error: Exception) -> Response:
    """The client hung up before its request was whole: this is for the server, which sends it nowhere."""
    return Response(status_code=499)


async def _fail(request: Request, error: Exception) -> Response:
    """The framework raises it again after this answer, and the server logs it."""
    return error_response(InternalError(f"internal error: {type(error).__name__}"))


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
