"""Two real workers, `python -m workers`, 1 prefill + 1 decode, over gRPC and gloo: the same ids as one alone."""

import asyncio
import gzip
import json
import pathlib
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import pytest_asyncio
from click.testing import CliRunner

from cluster.cli import cli
from headrace.v1 import control_pb2
from headrace.values import PrefillTarget, Request, RequestKey, SamplingParams
from tests.session import Answer, open_session
from tests.tiny import make_checkpoint
from tests.worker_process import WorkerProcess, a_worker_process

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

BLOCK = 8
CHUNK = 16
OPTIONS = ("--block-size", str(BLOCK), "--max-step-tokens", str(CHUNK), "--num-blocks", "96", "--fault-hooks")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(
    checkpoint: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, WorkerProcess]]:
    folder = tmp_path_factory.mktemp("workers")
    roles = {"p0": "prefill", "d0": "decode", "u0": "unified"}
    async with AsyncExitStack() as stack:
        starting = [
            a_worker_process(checkpoint, folder, name, "--role", role, *OPTIONS, forked=True)
            for name, role in roles.items()
        ]
        started = await asyncio.gather(*map(stack.enter_async_context, starting))
        yield dict(zip(roles, started, strict=True))


def request(name: str, length: int, *, n: int = 1, prefill: PrefillTarget | None = None, **sampling: object) -> Request:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    tokens = tuple((sum(name.encode()) * 13 + 7 * i) % 200 for i in range(length))
    return Request(RequestKey(name), tokens, params, n=n, prefill=prefill)


def said(answer: Answer) -> object:
    return (dict(answer.tokens), dict(answer.finishes), answer.usage and answer.usage.completion_tokens)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, 3 * CHUNK + 5])
async def test_disaggregated_and_aggregated_answers_are_equal(workers: dict[str, WorkerProcess], length: int) -> None:
    asked = request(f"length-{length}", length, num_logprobs=3)
    async with open_session(workers["u0"].address) as alone, open_session(workers["d0"].address) as router:
        expected = await alone.submit(asked).end()
        got = await router.submit(replace(asked, prefill=workers["p0"].target)).end()
    assert got.error is None
    assert said(got) == said(expected)
    assert got.timeline is not None
    assert got.timeline.prefill_worker == "p0"
    assert got.timeline.blocks_moved == -(-length // BLOCK)
    pairs = zip(got.logprobs[0], expected.logprobs[0], strict=True)
    assert len(got.logprobs[0]) == 8
    assert all(abs(a.logprob - b.logprob) < 1e-4 and a.token_id == b.token_id for a, b in pairs)


@pytest.mark.asyncio(loop_scope="module")
async def test_seeded_samples_are_equal_too(workers: dict[str, WorkerProcess]) -> None:
    asked = request("samples", 21, n=3, temperature=0.8, seed=7, num_logprobs=1)
    async with open_session(workers["u0"].address) as alone, open_session(workers["d0"].address) as router:
        expected = await alone.submit(asked).end()
        got = await router.submit(replace(asked, prefill=workers["p0"].target)).end()
    assert got.error is None
    assert said(got) == said(expected)
    assert len({tuple(tokens) for tokens in got.tokens.values()}) > 1


@pytest.mark.asyncio(loop_scope="module")
async def test_case_21_max_tokens_one_yields_one_token(workers: dict[str, WorkerProcess]) -> None:
    asked = request("one-token", 10, max_tokens=1, prefill=workers["p0"].target)
    async with open_session(workers["d0"].address) as router:
        got = await router.submit(asked).end()
    assert [len(tokens) for tokens in got.tokens.values()] == [1]
    assert got.timeline is not None
    assert got.timeline.blocks_moved == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_is_held_when_all_is_over(workers: dict[str, WorkerProcess]) -> None:
    for name in ("p0", "d0"):
        async with workers[name].control() as control:
            described = await control.Describe(control_pb2.DescribeRequest())
        blocks = described.blocks
        assert blocks.free + blocks.cached == 96, described
        assert described.load.num_running == described.load.num_waiting == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_case_60_sigterm_drains_and_exits_zero(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async with a_worker_process(checkpoint, tmp_path, "w0", *OPTIONS) as worker, open_session(worker.address) as router:
        answer = router.submit(request("live", 20, max_tokens=40))
        await answer.until(lambda answer: answer.tokens[0])
        worker.process.send_signal(signal.SIGTERM)
        await answer.end()
        assert answer.error is None
        assert len(answer.tokens[0]) == 40
        assert await worker.process.wait() == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_at_work_is_profiled(workers: dict[str, WorkerProcess], tmp_path: pathlib.Path) -> None:
    """By the command: a table of its next steps, and a trace that names them and what they were made of."""
    out = tmp_path / "trace.json.gz"
    options = ["profile", workers["u0"].address, "--steps", "5", "--seconds", "20", "--json", "--out", str(out)]
    async with open_session(workers["u0"].address, "profiler") as router:
        profiling = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, cli, options))
        number = 0
        while not profiling.done():  # steps that are made before the profile begins are in none
            number += 1
            asked = Request(RequestKey(f"profiled-{number}"), tuple(range(3, 23)), SamplingParams(max_tokens=8))
            await router.submit(asked).end()
        result = profiling.result()
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(result.output)
    assert len(rank["steps"]) == 5
    assert all(step["cpu_seconds"] > 0 for step in rank["steps"])
    assert sum(step["num_prefill_tokens"] + step["num_decode_tokens"] for step in rank["steps"]) >= 5
    names = {event["name"] for event in json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]}
    assert {f"step {step['number']}" for step in rank["steps"]} < names
    assert "aten::linear" in names
