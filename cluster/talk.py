"""A conversation with a router over gRPC, measured as the client sees it: text as it comes, then the whole answer."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from headrace.clock import Clock, SystemClock
from headrace.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, slots=True)
class Path:
    """Where a request went and how long it was where; durations in seconds. `prefill_worker` is empty when the decode
    worker prefilled alone."""

    router_queue_seconds: float = 0.0
    worker_queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    transfer_exposed_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_worker: str = ""
    prefill_worker: str = ""
    blocks_moved: int = 0
    bytes_moved: int = 0
    num_preemptions: int = 0
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request. `ttft_seconds` and `seconds` are the client's own measure, from the send on."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_seconds: float
    seconds: float
    path: Path

    @property
    def tpot_seconds(self) -> float:
        """Time per output token after the first; 0 when there was one."""
        return (self.seconds - self.ttft_seconds) / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line may say about sampling; None leaves it to the router."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def sampling(self) -> inference_pb2.Sampling:
        return inference_pb2.Sampling(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )


class Talk:
    """A channel to one router, for one model. An async context manager."""

    def __init__(self, address: str, model: str, api_key: str | None = None, clock: Clock | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._address = address
        self._model = model
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._clock = clock or SystemClock()

    async def __aenter__(self) -> "Talk":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def chat(self, messages: Sequence[Mapping[str, str]], options: Options) -> AsyncIterator[str | Answer]:
        """The answer to `messages` in pieces, and as a whole at the end."""
        request = inference_pb2.ChatRequest(
            model=self._model, messages_json=json.dumps(list(messages)), sampling=options.sampling()
        )
        return self._measured(self._inference.Chat(request, metadata=self._metadata))

    def generate(self, prompt: str, options: Options) -> AsyncIterator[str | Answer]:
        """What follows `prompt`, in pieces, and as a whole at the end."""
        request = inference_pb2.GenerateRequest(model=self._model, text=prompt, sampling=options.sampling())
        return self._measured(self._inference.Generate(request, metadata=self._metadata))

    async def _measured(
        self, call: "grpc.aio.UnaryStreamCall[object, inference_pb2.GenerateResponse]"
    ) -> AsyncIterator[str | Answer]:
        sent = self._clock.now()
        first: float | None = None
        text, finish = "", ""
        try:
            async for piece in call:
                if first is None and piece.token_ids:
                    first = self._clock.now()
                if piece.text:
                    text += piece.text
                    yield piece.text
                finish = piece.finish_reason or finish
                if piece.HasField("usage"):
                    now = self._clock.now()
                    yield _answer(piece, text, finish, (first or now) - sent, now - sent)
        except grpc.aio.AioRpcError as error:
            raise self._refused(error) from error
        finally:
            call.cancel()

    def _refused(self, error: grpc.aio.AioRpcError) -> HeadraceError:
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequest(details)
            case grpc.StatusCode.UNAVAILABLE:
                return Unavailable(f"{self._address}: {details}")
            case code:
                return HeadraceError(f"{code.name}: {details}")


def _answer(piece: inference_pb2.GenerateResponse, text: str, finish: str, ttft: float, seconds: float) -> Answer:
    path = Path(**{name: getattr(piece.timeline, name) for name in Path.__slots__})
    usage = piece.usage
    return Answer(text, finish, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, ttft, seconds, path)


def timeline(answer: Answer) -> list[tuple[str, str]]:
    """Where the request's time went, line by line: what, and how long and where."""
    path = answer.path
    cached = f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached"
    lines = [
        (
            "queue",
            f"{_ms(path.router_queue_seconds)} in the router, {_ms(path.worker_queue_seconds)} at the workers",
        ),
        (
            "prefill",
            f"{_ms(path.prefill_seconds)} on {path.prefill_worker or f'{path.decode_worker} (alone)'}, {cached}",
        ),
    ]
    if path.prefill_worker:
        blocks = "1 block" if path.blocks_moved == 1 else f"{path.blocks_moved} blocks"
        moved = f"{blocks}, {path.bytes_moved / 2**20:.2f} MiB moved"
        lines.append(("hand-off", f"{moved}; {_ms(path.transfer_exposed_seconds)} not hidden behind the prefill"))
    lines.append(("decode", f"{_ms(path.decode_seconds)} on {path.decode_worker}, {answer.completion_tokens} tokens"))
    lines.append(
        (
            "client",
            f"TTFT {_ms(answer.ttft_seconds)}, TPOT {_ms(answer.tpot_seconds)}, "
            f"{answer.tokens_per_second:.1f} tokens/s, finish {answer.finish_reason}",
        )
    )
    if path.num_preemptions or path.attempts > 1:
        lines.append(("trouble", f"{path.attempts} attempts, {path.num_preemptions} preemptions"))
    return lines


def summary(answer: Answer) -> str:
    """The same on one line, for under an answer in a chat."""
    prefilled = answer.path.prefill_worker or f"{answer.path.decode_worker} (alone)"
    return (
        f"TTFT {_ms(answer.ttft_seconds)} · {answer.tokens_per_second:.1f} tokens/s · prefilled by {prefilled} · "
        f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
