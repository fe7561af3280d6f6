"""The gRPC client before a real server in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from headrace.errors import InternalError, ModelNotFound, NoWorkers, Overloaded
from headrace.traces import Prompts, TraceRow
from headrace.v1 import inference_pb2, inference_pb2_grpc
from loadtests.open_loop.answers import Answer, Ask, Outcome, asks
from loadtests.open_loop.client import Unreachable
from loadtests.open_loop.grpc_client import grpc_client
from loadtests.open_loop.loop import run
from loadtests.paced_server import CONTEXT, Paced
from router.edge.grpc_api import abort

ASK = Ask(0, 0.0, (1, 2, 3), 4)


@asynccontextmanager
async def serving(servicer: inference_pb2_grpc.InferenceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Failing(Paced):
    """A token, then the error as a router gives it; or, with none, an end without a usage."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(0.0, 1)
        self._error = error

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(request_id="0", text="a", token_ids=[1])
        if self._error is not None:
            await abort(context, self._error)


async def test_streams_are_heard_whole_with_the_servers_counts() -> None:
    rows = [TraceRow(0, at * 0.001, 5, 6) for at in range(40)]
    async with serving(Paced(0.001, tokens_per_message=4)) as address, grpc_client(address) as client:
        served = await client.served()
        found = await run(asks(rows, Prompts(400)), client)
    assert (served.model, served.max_context_tokens) == ("paced", CONTEXT)
    assert [(one.outcome, one.num_tokens, len(one.times), one.prompt_tokens) for one in found.answers] == [
        (Outcome.FINISHED, 6, 2, 5)
    ] * 40


@pytest.mark.parametrize(
    ("error", "message"),
    [(Overloaded("the queue is full"), "the queue is full"), (NoWorkers("none"), "none"), (None, "without its usage")],
)
async def test_what_a_router_says_is_the_error(error: Exception | None, message: str) -> None:
    answer = Answer(0, 0.0, lambda: 1.0)
    async with serving(Failing(error)) as address, grpc_client(address, model="paced") as client:
        with pytest.raises(type(error) if error else InternalError, match=message) as caught:
            await client.prepare(ASK)(answer)
    assert not isinstance(caught.value, Unreachable), "somebody answered"
    assert answer.num_tokens == 1


async def test_a_model_that_is_not_served_is_named() -> None:
    async with serving(Paced(0.0, 1)) as address, grpc_client(address, model="other") as client:
        with pytest.raises(ModelNotFound, match="model must be one of paced, got 'other'"):
            await client.served()


async def test_nobody_there_is_said_with_the_address(unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    async with grpc_client(address, model="m") as client:
        with pytest.raises(Unreachable, match=f"no router answers at {address}"):
            await client.served()
        with pytest.raises(Unreachable, match=f"no router answers at {address}"):
            await client.prepare(ASK)(Answer(0, 0.0, lambda: 1.0))
