"""The public Python client of a Headrace router, over gRPC: sync and async, streaming.

    with Client("localhost:50051") as client:
        for part in client.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0):
            print(part.text, end="")

Errors are those of headrace.errors, as the router raised them. Closing an iterator early cancels its request.
"""

import json
import re
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from headrace.errors import (
    ConfigError,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    RequestCancelled,
    Unavailable,
    rebuild,
)
from headrace.tls import ClientTls
from headrace.v1 import inference_pb2, inference_pb2_grpc
from headrace.values import TokenLogprobs, Usage

ERROR_KEY = "headrace-error"
NUMBERS_KEY = "headrace-numbers-bin"
RETRY_KEY = "retry-after"
TLS_SCHEME = "grpcs://"
PLACE = re.compile(r"([^/\s:\[\]]+|\[[^/\s\[\]]+\]):\d{1,5}")
PLACE_BY_TLS = re.compile(rf"{PLACE.pattern}|[^/\s:\[\]]+")  # without a port: 443
_GRPCS_OWN = ("dns:", "unix:", "ipv4:", "ipv6:")  # other ways to name a server
MAX_MESSAGE_BYTES = 64 * 2**20
_OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)


@dataclass(frozen=True, slots=True)
class Path:
    """Where a request went, and how long it was where; durations in seconds. `prefill_worker` is empty when the decode
    worker prefilled alone. `ttft_stages` sum to the TTFT as the router measured it."""

    router_queue_seconds: float
    worker_queue_seconds: float
    prefill_seconds: float
    transfer_exposed_seconds: float
    decode_seconds: float
    decode_worker: str
    prefill_worker: str
    blocks_moved: int
    bytes_moved: int
    num_preemptions: int
    attempts: int
    ttft_stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """New output of sample `index`. The last part of a sample has a `finish_reason`; the last part of the request also
    has its usage and its path."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    id: str
    revision: str
    max_context_tokens: int


class _Requests:
    """What both clients ask, as protobuf. `sampling` are the fields of headrace.v1.Sampling."""

    def __init__(self, model: str | None, api_key: str | None) -> None:
        self._model = model
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    def _generate(self, prompt: str | Sequence[int], common: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(**_split(common))
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
            request.tokens.SetInParent()
        return request

    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        common: Mapping[str, Any],
    ) -> inference_pb2.ChatRequest:
        return inference_pb2.ChatRequest(
            messages_json=json.dumps(list(messages)),
            tools_json=json.dumps(list(tools)) if tools else "",
            chat_template_kwargs_json=json.dumps(template_kwargs) if template_kwargs else "",
            **_split(common),
        )


class Client(_Requests):
    """A channel to one router, used as a context manager. `model` None: the one that the router serves. It is by TLS where
    `tls` is given, or the address begins with grpcs://.

    Parameters of `generate` and `chat` by name: those of headrace.v1.Sampling, and model, priority, cache_salt,
    service_class, request_id and `timeout` (seconds for the whole request).
    """

    def __init__(
        self, address: str, *, model: str | None = None, api_key: str | None = None, tls: ClientTls | None = None
    ) -> None:
        super().__init__(model, api_key)
        place, credentials, options = _channel(address, tls)
        if credentials is None:
            self._channel = grpc.insecure_channel(place, options=options)
        else:
            self._channel = grpc.secure_channel(place, credentials, options=options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **common: Any
    ) -> Generator[Part, None, None]:
        """What follows a prompt, given as text or as token ids."""
        request = self._generate(prompt, {"model": self.model(), **common})
        return self._parts(self._stub.Generate(request, timeout=timeout, metadata=self._metadata))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **common: Any,
    ) -> Generator[Part, None, None]:
        """The answer to OpenAI-shaped messages."""
        request = self._chat(messages, tools, chat_template_kwargs, {"model": self.model(), **common})
        return self._parts(self._stub.Chat(request, timeout=timeout, metadata=self._metadata))

    def models(self) -> list[ModelInfo]:
        return _models(self._ask(self._stub.ListModels, inference_pb2.ListModelsRequest()))

    def model(self) -> str:
        """The model's name that requests carry."""
        if self._model is None:
            self._model = self.models()[0].id
        return self._model

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = inference_pb2.TokenizeRequest(model=self.model(), text=text, add_special_tokens=add_special_tokens)
        return list(self._ask(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        request = inference_pb2.DetokenizeRequest(model=self.model(), token_ids=token_ids)
        return str(self._ask(self._stub.Detokenize, request).text)

    def _ask(self, method: Any, request: Any) -> Any:
        with _translated():
            return method(request, metadata=self._metadata)

    def _parts(self, call: Any) -> Generator[Part, None, None]:
        with _ended(call):
            for message in call:
                yield _part(message)


class AsyncClient(_Requests):
    """The same as Client for asyncio; used as an async context manager."""

    def __init__(
        self, address: str, *, model: str | None = None, api_key: str | None = None, tls: ClientTls | None = None
    ) -> None:
        super().__init__(model, api_key)
        place, credentials, options = _channel(address, tls)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(place, options=options)
        else:
            self._channel = grpc.aio.secure_channel(place, credentials, options=options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **common: Any
    ) -> AsyncGenerator[Part, None]:
        """What follows a prompt, given as text or as token ids."""
        request = self._generate(prompt, {"model": await self.model(), **common})
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        with _ended(call):
            async for message in call:
                yield _part(message)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **common: Any,
    ) -> AsyncGenerator[Part, None]:
        """The answer to OpenAI-shaped messages."""
        request = self._chat(messages, tools, chat_template_kwargs, {"model": await self.model(), **common})
        call = self._stub.Chat(request, timeout=timeout, metadata=self._metadata)
        with _ended(call):
            async for message in call:
                yield _part(message)

    async def models(self) -> list[ModelInfo]:
        return _models(await self._ask(self._stub.ListModels, inference_pb2.ListModelsRequest()))

    async def model(self) -> str:
        """The model's name that requests carry."""
        if self._model is None:
            self._model = (await self.models())[0].id
        return self._model

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = inference_pb2.TokenizeRequest(
            model=await self.model(), text=text, add_special_tokens=add_special_tokens
        )
        return list((await self._ask(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        request = inference_pb2.DetokenizeRequest(model=await self.model(), token_ids=token_ids)
        return str((await self._ask(self._stub.Detokenize, request)).text)

    async def _ask(self, method: Any, request: Any) -> Any:
        with _translated():
            return await method(request, metadata=self._metadata)


@contextmanager
def _translated() -> Iterator[None]:
    """What a call fails with is raised as the router's own error."""
    try:
        yield
    except grpc.RpcError as error:
        raise _error(error) from error


@contextmanager
def _ended(call: Any) -> Iterator[None]:
    """The same, and whoever reads no further cancels the call."""
    try:
        with _translated():
            yield
    finally:
        call.cancel()


def _channel(address: str, tls: ClientTls | None) -> tuple[str, Any, Any]:
    """Where to, the credentials (None: plain), and the channel's options. ConfigError when a file cannot be used, or the
    address is none: gRPC would look for a host of that name."""
    place = address.removeprefix(TLS_SCHEME)
    secure = tls is not None or place != address
    if not place.startswith(_GRPCS_OWN) and not (PLACE_BY_TLS if secure else PLACE).fullmatch(place):
        allowed = f"HOST:PORT, where the router serves gRPC, or {TLS_SCHEME}HOST:PORT by TLS"
        raise ConfigError.out_of_range("address", address, allowed)
    if not secure:
        return place, None, _OPTIONS
    tls = tls or ClientTls()
    name = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name is not None else ()
    return place, grpc.ssl_channel_credentials(*tls.pems()), (*_OPTIONS, *name)


_CHANNEL_ERRORS: Mapping[grpc.StatusCode, type[HeadraceError]] = {
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}
_OUTSIDE_SAMPLING = ("model", "priority", "cache_salt", "request_id", "service_class")


def _split(common: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as fields of a request; those of Sampling in one. InvalidRequest names an unknown or odd one."""
    sampling = {name: value for name, value in common.items() if name not in _OUTSIDE_SAMPLING and value is not None}
    outside = {name: common[name] for name in _OUTSIDE_SAMPLING if common.get(name) is not None}
    try:
        return {"sampling": inference_pb2.Sampling(**sampling), **outside}
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling: {error}") from error


def _part(message: inference_pb2.GenerateResponse) -> Part:
    usage = path = None
    if message.HasField("usage"):
        usage = Usage(message.usage.prompt_tokens, message.usage.completion_tokens, message.usage.cached_tokens)
    if message.HasField("timeline"):
        its = message.timeline
        path = Path(**{name: getattr(its, name) for name in Path.__slots__} | {"ttft_stages": dict(its.ttft_stages)})
    return Part(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(
            TokenLogprobs(at.token_id, at.logprob, tuple((top.token_id, top.logprob) for top in at.top))
            for at in message.logprobs
        ),
        finish_reason=message.finish_reason or None,
        usage=usage,
        path=path,
    )


def _models(response: inference_pb2.ListModelsResponse) -> list[ModelInfo]:
    return [ModelInfo(model.id, model.revision, model.max_context_tokens) for model in response.models]


def _error(error: Any) -> HeadraceError:
    """The router's own error out of the trailing metadata; else what the channel met."""
    trailing = dict(error.trailing_metadata() or ())
    details = error.details() or error.code().name
    if ERROR_KEY not in trailing:
        return _CHANNEL_ERRORS.get(error.code(), InternalError)(details)
    rebuilt = rebuild(trailing[ERROR_KEY], details, json.loads(trailing.get(NUMBERS_KEY, b"{}")))
    if RETRY_KEY in trailing:
        rebuilt.retry_after_seconds = float(trailing[RETRY_KEY])
    return rebuilt
