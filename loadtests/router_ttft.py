"""What a router adds to the time to the first token at NUM_STREAMS concurrent streams (`make bench-router`).

Every stream asks again once it is answered, so that requests come all the time and not at once. The worker answers the
prompt at once and then decodes at TPOT_SECONDS; the peer does the same without a router. Both are asked by the same
client, in turns; three processes share two cores.
"""

import asyncio
import os
import pathlib
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from random import Random
from time import perf_counter

import grpc
import uvloop

from headrace.config import RouterConfig
from headrace.v1 import inference_pb2, inference_pb2_grpc
from loadtests.bench_stream import MODEL, NUM_CHANNELS, process, router, serve_bare, stubs, write_checkpoint

NUM_STREAMS = 128
TPOT_SECONDS = 0.025
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = (32, 96)


class Bare(inference_pb2_grpc.InferenceServicer):
    """The peer: no router, no worker, no work; the same messages at the same times."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for at in range(request.sampling.max_tokens):
            yield inference_pb2.GenerateResponse(request_id="0123456789abcdef", text=f" w{at:x}", token_ids=[256 + at])
            await asyncio.sleep(TPOT_SECONDS)


async def ttfts_ms(address: str, seconds: float) -> list[float]:
    """Of all requests that were asked after the first quarter of the time."""
    random, found = Random(8), []
    began = perf_counter()
    prompt = "".join(random.choices("abcdefgh ", k=PROMPT_TOKENS - 8))

    async def client(number: int, stub: inference_pb2_grpc.InferenceStub) -> None:
        await asyncio.sleep(number / NUM_STREAMS * TPOT_SECONDS * OUTPUT_TOKENS[1])
        while True:
            sampling = inference_pb2.Sampling(max_tokens=random.randint(*OUTPUT_TOKENS), ignore_eos=True)
            text = f"{random.randrange(10**8):08}{prompt}"
            asked = perf_counter()
            call = stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text=text, sampling=sampling))
            await call.read()
            if asked - began > seconds / 4:
                found.append((perf_counter() - asked) * 1e3)
            while await call.read() is not grpc.aio.EOF:
                pass

    async with stubs(address) as several:
        clients = [asyncio.create_task(client(at, several[at % NUM_CHANNELS])) for at in range(NUM_STREAMS)]
        done, _ = await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        assert not done, "a client failed"
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return found


async def ttft_shares_ms(rounds: int = 5, seconds: float = 8.0) -> dict[str, list[float]]:
    """Medians by round, of both; and the router's 99th percentile over all rounds."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    medians: dict[str, list[float]] = {"router": [], "bare": []}
    whole: list[float] = []
    async with AsyncExitStack() as ends:
        folder = pathlib.Path(ends.enter_context(tempfile.TemporaryDirectory()))
        digest = write_checkpoint(folder)
        bare = await ends.enter_async_context(process("-m", "loadtests.router_ttft"))
        worker = ("--step-seconds", str(TPOT_SECONDS), "--first-at-once")
        ours = await ends.enter_async_context(router(folder, digest, RouterConfig().coalesce_seconds, worker))
        for _ in range(rounds):
            medians["bare"].append(statistics.median(await ttfts_ms(bare, seconds)))
            found = await ttfts_ms(ours["grpc"], seconds)
            whole += found
            medians["router"].append(statistics.median(found))
    whole.sort()
    return {**medians, "p99": [whole[len(whole) * 99 // 100]], "num_requests": [float(len(whole))]}


if __name__ == "__main__":
    uvloop.run(serve_bare(Bare()))
