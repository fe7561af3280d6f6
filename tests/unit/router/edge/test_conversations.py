"""What edges say of revisions to the core, and of the core's to clients."""

from collections.abc import Sequence
from typing import Any

import grpc.aio
import pytest

from headrace.clock import ManualClock
from headrace.v1 import inference_pb2, inference_pb2_grpc
from router.edge.grpc_api import add_services, open_server
from router.text.vocabulary import Text
from tests.unit.router.edge.edges import CHAT, client_of
from tests.unit.router.scripted import Scripted, make_edge

HEADER = "x-headrace-revision"


def chat(*words: str) -> dict[str, Any]:
    roles: Sequence[str] = ("system", "user", "assistant", "user")
    return {
        **CHAT,
        "max_tokens": 2,
        "messages": [{"role": r, "content": w} for r, w in zip(roles, words, strict=False)],
    }


async def test_a_chat_stays_one_conversation_as_it_goes_on(tiny: Text, clock: ManualClock) -> None:
    core = Scripted(tiny, "x")
    async with client_of(core, clock, splits=True) as client:
        for words in (("s", "a"), ("s", "a", "b", "c"), ("s", "d"), ("t", "a")):
            assert (await client.post("/v1/chat/completions", json=chat(*words))).status_code == 200
        named = {"x-headrace-conversation": "mine"}
        await client.post("/v1/chat/completions", json=chat("s", "z"), headers=named)
        await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"}, headers=named)
        await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    first, later, other, third, *rest = [job.conversation for job in core.jobs]
    assert first == later
    assert len({first, other, third, ""}) == 4
    assert rest == ["default\0mine", "default\0mine", ""]


async def test_without_a_canary_chats_are_not_looked_into(tiny: Text, clock: ManualClock) -> None:
    core = Scripted(tiny, "x")
    async with client_of(core, clock) as client:
        await client.post("/v1/chat/completions", json=chat("s", "a"))
    assert core.jobs[0].conversation == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_the_revision_it_is_of(tiny: Text, clock: ManualClock, stream: bool) -> None:
    core = Scripted(tiny, "x")
    async with client_of(core, clock) as client:
        assert HEADER not in (await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})).headers
        core.revision = "v2"
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert answer.headers[HEADER] == "v2"


async def test_a_name_that_is_too_long_is_refused(tiny: Text, clock: ManualClock) -> None:
    async with client_of(Scripted(tiny), clock) as client:
        long = {"x-headrace-conversation": "x" * 257}
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=long)
    assert answer.status_code == 400
    assert "x-headrace-conversation must be at most 256 characters, got 257 characters" in answer.text


async def test_over_grpc_the_revision_comes_behind_the_answer(tiny: Text, clock: ManualClock) -> None:
    core = Scripted(tiny, "x", revision="v2")
    server, port = open_server("127.0.0.1", 0, 10_000)
    add_services(server, make_edge(tiny, core, clock=clock))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = inference_pb2.GenerateRequest(model="tiny", text="hi")
        call = inference_pb2_grpc.InferenceStub(channel).Generate(  # type: ignore[no-untyped-call]
            request, metadata=((("x-headrace-conversation", "mine")),)
        )
        assert [piece async for piece in call]
        assert (HEADER, "v2") in tuple(await call.trailing_metadata())
    assert core.jobs[0].conversation == "default\0mine"
    await server.stop(None)
