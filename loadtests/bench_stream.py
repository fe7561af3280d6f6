"""`make bench-stream`: what a router costs between a worker and its clients, beside a bare grpc.aio server.

Three processes on two cores: this client, a router that does its real work, and a null worker that sends one message a
step with one token for each of 256 streams. The peer is a one-hop grpc.aio server that streams the same messages to the
same client in the same run; all run on uvloop. Rounds alternate between what is compared, so that a busy machine is
busy for all.
"""

import argparse
import asyncio
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from time import perf_counter
from typing import Any

import grpc
import uvloop
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.config import RouterConfig
from headrace.v1 import inference_pb2, inference_pb2_grpc
from loadtests.report import Report, Row, add_arguments

NUM_STREAMS = 256
NUM_CHANNELS = 4
NUM_WORDS = 1200
MODEL = "null"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
MAX_TOKENS = 60_000
START_SECONDS = 60.0
FLUSH_RATIO, COALESCED_TOK_S, ADDED_TTFT_MS = 0.6, 30_000, 5.0


@dataclass
class Meter:
    """Counts tokens as they arrive. Owned by the client's event loop."""

    num_tokens: int = 0
    num_started: int = 0
    all_started: asyncio.Event = field(default_factory=asyncio.Event)

    def started(self) -> None:
        self.num_started += 1
        if self.num_started == NUM_STREAMS:
            self.all_started.set()


# -- the processes


def write_checkpoint(folder: pathlib.Path) -> str:
    """A tokenizer whose tokens from NUM_BYTES on are one word each, " w…", so that words count tokens. Its digest."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: at for at, token in enumerate([*alphabet, *(f"Ġw{at:x}" for at in range(NUM_WORDS))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": 2**16, "vocab_size": len(vocab)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return blake2b((folder / "tokenizer.json").read_bytes(), digest_size=16).hexdigest()


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[str]:
    """A Python process; gives the first line that it prints. It ends when its input closes, or by SIGTERM."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = (await child.stdout.readline()).decode().strip()
        if not line:
            raise SystemExit(f"{' '.join(arguments)} did not start")
        yield line
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


@asynccontextmanager
async def router(
    folder: pathlib.Path, digest: str, coalesce_seconds: float, worker_options: Sequence[str] = ()
) -> AsyncIterator[dict[str, str]]:
    """A router and its null worker; gives the addresses of its edges."""
    config = {
        "model": str(folder),
        "served_model_name": MODEL,
        "pools": {"null": {"role": "unified"}},
        "router": {"http_port": 0, "grpc_port": 0, "coalesce_seconds": coalesce_seconds, "silent_seconds": 600.0},
    }
    file = folder / f"coalesce-{coalesce_seconds}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    first_token = str(len(pre_tokenizers.ByteLevel.alphabet()))
    null_worker = ("-m", "tests.null_worker", "--tokenizer", digest, "--first-token", first_token, *worker_options)
    async with process(*null_worker) as worker, process("-m", "router", str(file), "--worker", worker) as line:
        addresses = dict(word.split("=") for word in line.split()[2:])
        await until_served(addresses["grpc"])
        yield addresses


async def until_served(address: str) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with asyncio.timeout(START_SECONDS), grpc.aio.insecure_channel(address) as channel:
        async for status in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            if status.status == health_pb2.HealthCheckResponse.SERVING:
                return


class Bare(inference_pb2_grpc.InferenceServicer):
    """The peer: no router, no worker, no work; the same messages."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        request_id = "0123456789abcdef"
        for at in range(request.sampling.max_tokens):
            word = at % 1000
            yield inference_pb2.GenerateResponse(request_id=request_id, text=f" w{word:x}", token_ids=[256 + word])


async def serve_bare(servicer: inference_pb2_grpc.InferenceServicer) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


# -- what is measured


def generate_request(max_tokens: int = MAX_TOKENS) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True)
    return inference_pb2.GenerateRequest(model=MODEL, text=PROMPT, sampling=sampling)


@asynccontextmanager
async def stubs(address: str) -> AsyncIterator[list[inference_pb2_grpc.InferenceStub]]:
    """NUM_CHANNELS of them, each with a connection of its own."""
    async with AsyncExitStack() as ends:
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = [
            await ends.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for _ in range(NUM_CHANNELS)
        ]
        yield [inference_pb2_grpc.InferenceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]


async def grpc_tok_s(address: str, seconds: float) -> list[float]:
    """Tokens per second of NUM_STREAMS concurrent streams, in a window that begins once all have their first."""
    meter = Meter()

    async def stream(stub: inference_pb2_grpc.InferenceStub) -> None:
        first = True
        async for message in stub.Generate(generate_request()):
            meter.num_tokens += len(message.token_ids)
            if first:
                first = False
                meter.started()

    async with stubs(address) as several:
        streams = [stream(several[at % NUM_CHANNELS]) for at in range(NUM_STREAMS)]
        return await measured(meter, streams, seconds)


async def measured(meter: Meter, streams: Sequence[Coroutine[Any, Any, None]], seconds: float) -> list[float]:
    tasks = [asyncio.ensure_future(stream) for stream in streams]
    try:
        async with asyncio.timeout(START_SECONDS):
            await meter.all_started.wait()
        await asyncio.sleep(seconds / 4)
        before, began = meter.num_tokens, perf_counter()
        await asyncio.sleep(seconds)
        rate = (meter.num_tokens - before) / (perf_counter() - began)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [rate]


class SseReader(asyncio.Protocol):
    """Reads one SSE answer and counts its words; as cheap as a client can be."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._started = False
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        num_words = data.count(b" w")
        self._meter.num_tokens += num_words
        if num_words and not self._started:
            self._started = True
            self._meter.started()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def sse_tok_s(address: str, seconds: float) -> list[float]:
    meter = Meter()
    host, port = address.split(":")
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()

    async def stream() -> None:
        transport, reader = await loop.create_connection(lambda: SseReader(meter), host, int(port))
        transport.write((head + body).encode())
        try:
            await reader.ended
        finally:
            transport.close()

    return await measured(meter, [stream() for _ in range(NUM_STREAMS)], seconds)


async def ttfts_ms(address: str, num_requests: int) -> list[float]:
    """Times to the first token at concurrency 1."""
    times = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        for _ in range(num_requests):
            began = perf_counter()
            call = stub.Generate(generate_request(max_tokens=2))
            await call.read()
            times.append((perf_counter() - began) * 1e3)
            while await call.read() is not grpc.aio.EOF:
                pass
    return times[num_requests // 5 :]


async def run(rounds: int, seconds: float, num_requests: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    async with AsyncExitStack() as ends:
        folder = pathlib.Path(ends.enter_context(tempfile.TemporaryDirectory()))
        digest = write_checkpoint(folder)
        bare = await ends.enter_async_context(process("-m", "loadtests.bench_stream", "--serve-bare"))
        flushing = await ends.enter_async_context(router(folder, digest, 0.0))
        coalescing = await ends.enter_async_context(router(folder, digest, RouterConfig().coalesce_seconds))
        measures: dict[str, Callable[[], Awaitable[list[float]]]] = {
            "bare_tok_s": lambda: grpc_tok_s(bare, seconds),
            "flush_tok_s": lambda: grpc_tok_s(flushing["grpc"], seconds),
            "coalesced_tok_s": lambda: grpc_tok_s(coalescing["grpc"], seconds),
            "sse_tok_s": lambda: sse_tok_s(coalescing["http"], seconds),
            "sse_flush_tok_s": lambda: sse_tok_s(flushing["http"], seconds),
            "bare_ttft_ms": lambda: ttfts_ms(bare, num_requests),
            "ttft_ms": lambda: ttfts_ms(coalescing["grpc"], num_requests),
        }
        for at in range(rounds):
            for name, measure in measures.items():
                found = await measure()
                samples.setdefault(name, []).extend(found)
                print(
                    f"round {at + 1} of {rounds}: {name} {statistics.median(found):,.2f}", file=sys.stderr, flush=True
                )
    return samples


def add_rows(report: Report, samples: dict[str, list[float]]) -> None:
    """Ratios are those of the rounds: neighbours in time share the machine's mood."""
    bare, peer_name = samples["bare_tok_s"], "bare grpc.aio, one hop"

    def rate(name: str, must: float | None = None, note: str = "") -> Row:
        ratio = statistics.median(ours / peer for ours, peer in zip(samples[name], bare, strict=True))
        return Row(
            name=name,
            value=statistics.median(samples[name]),
            unit="tok/s",
            better="higher",
            must=must,
            samples=samples[name],
            peer=statistics.median(bare),
            peer_name=peer_name,
            ratio=ratio,
            note=note,
        )

    flush = rate("flush_tok_s", note=f"{NUM_STREAMS} gRPC streams, a message for every token")
    report.add(flush)
    report.add(
        Row(
            "flush_ratio",
            flush.ratio or 0.0,
            "ratio",
            "higher",
            must=FLUSH_RATIO,
            samples=[ours / peer for ours, peer in zip(samples["flush_tok_s"], bare, strict=True)],
            note="flush_tok_s against the bare server, by round",
        )
    )
    report.add(rate("coalesced_tok_s", COALESCED_TOK_S, "first token at once, later ones wait under load alone"))
    report.add(rate("sse_tok_s", note=f"{NUM_STREAMS} SSE streams, coalesced"))
    report.add(rate("sse_flush_tok_s", note=f"{NUM_STREAMS} SSE streams, an event for every token"))
    direct = statistics.median(samples["bare_ttft_ms"])
    report.add(
        Row(
            "added_ttft_ms_p50",
            statistics.median(samples["ttft_ms"]) - direct,
            "ms",
            "lower",
            must=ADDED_TTFT_MS,
            samples=samples["ttft_ms"],
            peer=direct,
            peer_name=peer_name,
            note="at concurrency 1; samples are whole times to the first token",
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--serve-bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--requests", type=int, default=50, help="of each measurement of TTFT")
    options = parser.parse_args()
    if options.serve_bare:
        uvloop.run(serve_bare(Bare()))
        return 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    report = Report("stream", ("grpcio", "protobuf", "uvloop", "uvicorn", "starlette", "tokenizers"))
    add_rows(report, uvloop.run(run(options.rounds, options.seconds, options.requests)))
    return report.close(options)


if __name__ == "__main__":
    sys.exit(main())
