"""Two whole workers, `python -m workers`, each seeing one GPU alone (the same one where there is one): what one
computed and the other pulled continues as it does on one worker alone, and a killed prefill worker is survived."""

import asyncio
import pathlib
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import torch

from headrace.v1 import control_pb2
from headrace.values import Request, RequestKey, SamplingParams
from tests.session import Answer, open_session
from tests.tiny import make_checkpoint
from tests.worker_process import WorkerProcess, a_worker_process

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(300)]

BLOCK, CHUNK, NUM_BLOCKS = 16, 64, 96
SIZES = ("--block-size", str(BLOCK), "--max-step-tokens", str(CHUNK), "--num-blocks", str(NUM_BLOCKS))
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, 3 * CHUNK + 5)
SECONDS = 120  # three workers start, one after the other two
MARGIN = 0.1  # of log-probability: below, bfloat16's rounding may decide which token is best


def request(name: str, length: int, **sampling: object) -> Request:
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "num_logprobs": 2, **sampling}
    tokens = tuple((sum(name.encode()) * 13 + 7 * i) % 200 for i in range(length))
    return Request(RequestKey(name), tokens, SamplingParams(**params), cache_salt=name)  # type: ignore[arg-type]


def same(got: Answer, expected: Answer) -> None:
    """Equal up to the first close call."""
    assert got.error is None
    for position, (ours, theirs) in enumerate(zip(got.tokens[0], expected.tokens[0], strict=True)):
        if ours != theirs:
            (_, first), (_, second) = expected.logprobs[0][position].top[:2]
            assert first - second < MARGIN, f"differs at {position}"
            return


async def survive(folder: pathlib.Path, device: str, kind: str, devices: tuple[str, str]) -> None:
    """All of it, on CUDA devices as the environment names them."""
    model = make_checkpoint(folder)
    options = (*SIZES, "--device", device, "--dtype", "bfloat16" if device == "cuda" else "float32")

    async def worker(stack: AsyncExitStack, name: str, role: str, generation: int, where: str) -> WorkerProcess:
        found = a_worker_process(
            *(model, folder, name, "--role", role, *options),
            generation=generation,
            environment={"CUDA_VISIBLE_DEVICES": where},
        )
        return await stack.enter_async_context(found)

    async with AsyncExitStack() as stack:
        prefill, decode = await asyncio.gather(
            worker(stack, "p0", "prefill", 1, devices[0]), worker(stack, "d0", "decode", 1, devices[1])
        )
        router = await stack.enter_async_context(open_session(decode.address))
        asked = [request(f"length-{length}", length) for length in LENGTHS]
        asked.append(request("seeded", 3 * BLOCK + 2, temperature=0.8, seed=7))
        for each in asked:
            expected = await router.submit(each).end()
            named = replace(each, key=RequestKey(f"{each.key.request_id}-pair"), cache_salt=f"{each.cache_salt}-pair")
            got = await router.submit(replace(named, prefill=prefill.target)).end()
            same(got, expected)
            assert got.timeline is not None
            assert got.timeline.prefill_worker == "p0"
            assert got.timeline.blocks_moved == -(-each.num_prompt_tokens // BLOCK)
        for process in (prefill, decode):
            async with process.control() as control:
                described = await control.Describe(control_pb2.DescribeRequest())
            assert described.blocks.free + described.blocks.cached == NUM_BLOCKS
        assert [link.kind for link in described.links] == [kind]

        prefill.process.kill()
        orphan = request("orphan", 3 * CHUNK + 5)
        lost = router.submit(replace(orphan, prefill=prefill.target))
        await lost.until(lambda answer: answer.lost)
        router.place(RequestKey("orphan", 2), None)
        expected = await lost.end()
        assert expected.error is None
        replacement = await worker(stack, "p0", "prefill", 2, devices[0])
        again = replace(orphan, key=RequestKey("again"), cache_salt="again", prefill=replacement.target)
        got = await router.submit(again).end()
        same(got, expected)
        assert got.timeline is not None
        assert got.timeline.prefill_worker == "p0"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_one_worker_computed_and_another_pulled_continues_as_on_one_alone(tmp_path: pathlib.Path) -> None:
    last = str(torch.cuda.device_count() - 1)
    try:
        asyncio.run(asyncio.wait_for(survive(tmp_path, "cuda", "nvlink", (last, "0")), SECONDS))
    except TimeoutError:
        logs = "".join(f"\n{log.name}: …{log.read_text()[-1500:]}" for log in sorted(tmp_path.glob("*.log")))
        raise AssertionError(f"not over after {SECONDS} s{logs}") from None
