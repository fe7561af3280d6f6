"""A server that costs as little as Python can, for measuring what asks: tokens at a pace, over SSE or gRPC, and no model.

    python -m loadtests.paced_server [--grpc] [--token-seconds 0.1] [--tokens-per-message 1]

Prints its address; serves until its input ends.
"""

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import httptools
import uvloop

from headrace.v1 import inference_pb2, inference_pb2_grpc

MODEL = "paced"
CONTEXT = 1 << 20
SLOTS = 20  # in which a token's time is cut, so that streams take turns
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b'data: {"id":"cmpl-0","object":"text_completion","model":"paced","choices":[{"index":0,"text":" word"}]}\n\n'


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


EVENT = chunked(CHUNK)


class Pace:
    """Owns the streams that are not over, each in the slot of the time at which it came."""

    def __init__(self, token_seconds: float) -> None:
        self._seconds = token_seconds / SLOTS
        self._slots: deque[list[Stream]] = deque([] for _ in range(SLOTS))
        self._task: asyncio.Task[None] | None = None

    def add(self, stream: "Stream") -> None:
        self._slots[-1].append(stream)
        if self._task is None:
            self._task = asyncio.ensure_future(self._turn())

    async def _turn(self) -> None:
        """No time is made up for: a server that is late is slower, and says nothing twice."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while any(self._slots):
            due = max(due + self._seconds, loop.time() - self._seconds)
            await asyncio.sleep(due - loop.time())
            self._slots.rotate(-1)
            self._slots[-1] = [stream for stream in self._slots[-1] if stream.next()]
        self._task = None


class Stream(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._parser: Any = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""
        self._left = 0
        self._num_tokens = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        assert self._transport is not None
        if self._path.endswith(b"/models"):
            body = json.dumps({"data": [{"id": MODEL, "max_model_len": CONTEXT}]}).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            return
        asked = json.loads(self._body)
        self._left = self._num_tokens = asked["max_tokens"]
        self._num_prompt = len(asked["prompt"])
        self._transport.write(HEAD)
        self._pace.add(self)

    def next(self) -> bool:
        """Another token; whether more are to come."""
        if self._transport is None:
            return False
        self._left -= 1
        if self._left:
            self._transport.write(EVENT)
            return True
        usage = {"prompt_tokens": self._num_prompt, "completion_tokens": self._num_tokens}
        last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
        self._transport.write(EVENT + chunked(last) + b"0\r\n\r\n")
        return False


class Paced(inference_pb2_grpc.InferenceServicer):
    def __init__(self, token_seconds: float, tokens_per_message: int) -> None:
        self._seconds = token_seconds * tokens_per_message
        self._message = tokens_per_message

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        num_tokens = request.sampling.max_tokens
        for at in range(0, num_tokens, self._message):
            await asyncio.sleep(self._seconds)
            ids = [256] * min(self._message, num_tokens - at)
            yield inference_pb2.GenerateResponse(request_id="0", text=" word" * len(ids), token_ids=ids)
        usage = inference_pb2.Usage(prompt_tokens=len(request.tokens.ids), completion_tokens=num_tokens)
        yield inference_pb2.GenerateResponse(
            request_id="0", finish_reason="length", usage=usage, timeline=inference_pb2.Timeline()
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: object
    ) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.Model(id=MODEL, max_context_tokens=CONTEXT)
        return inference_pb2.ListModelsResponse(models=[model])


async def serve(use_grpc: bool, token_seconds: float, tokens_per_message: int) -> None:
    if use_grpc:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        paced = Paced(token_seconds, tokens_per_message)
        inference_pb2_grpc.add_InferenceServicer_to_server(paced, server)  # type: ignore[no-untyped-call]
        await server.start()
    else:
        loop, pace = asyncio.get_running_loop(), Pace(token_seconds)
        listening = await loop.create_server(lambda: Stream(pace), "127.0.0.1", 0, backlog=4096)
        port = listening.sockets[0].getsockname()[1]
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--grpc", action="store_true")
    parser.add_argument("--token-seconds", type=float, default=0.1)
    parser.add_argument("--tokens-per-message", type=int, default=1, help="over gRPC")
    options = parser.parse_args()
    uvloop.run(serve(options.grpc, options.token_seconds, options.tokens_per_message))


if __name__ == "__main__":
    main()
