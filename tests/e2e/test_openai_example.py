"""The example of the openai package, as its reader runs it, against a real router."""

import asyncio
import os
import pathlib
import sys

from grpc_health.v1 import health_pb2

from router.text.vocabulary import Text
from tests.e2e.routers import null_info, running_router, say, soon, tiny_checkpoint, until_health
from tests.null_worker import NullWorker

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "openai_client.py"


async def test_the_example_of_the_openai_package_streams_a_chat_and_completes_a_prompt(tmp_path: pathlib.Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    words = Text.load(checkpoint)
    answer, more = words.encode("The quick brown fox"), words.encode(" Paris")
    async with (
        NullWorker(null_info(checkpoint)) as worker,
        running_router(checkpoint, tmp_path / "h.yaml", [worker.address], api_keys=["secret"]) as router,
    ):
        await until_health(router, health_pb2.HealthCheckResponse.SERVING)
        example = await asyncio.create_subprocess_exec(
            sys.executable,
            str(EXAMPLE),
            f"{router.http}/v1",
            env={**os.environ, "NO_PROXY": "127.0.0.1", "OPENAI_API_KEY": "secret"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            chat = await soon(worker.submits.get())
            assert (chat.sampling.temperature, chat.sampling.max_tokens) == (0, 64)
            say(worker, chat.key, answer)
            completion = await soon(worker.submits.get())
            assert (completion.sampling.top_k, completion.sampling.max_tokens) == (1, 16)
            say(worker, completion.key, more)
            printed, _ = await soon(example.communicate())
        finally:
            if example.returncode is None:
                example.kill()
    assert example.returncode == 0
    assert printed.decode().splitlines() == [
        "The quick brown fox",
        f"[prompt {len(chat.prompt_token_ids)} tokens, 2 of them cached; answer {len(answer)}]",
        "The capital of France is Paris [length]",
    ]
