"""`headrace bench` before a real router: both edges, a sweep that is kept, keys, and a router that dies under it."""

import asyncio
import json
import os
import pathlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadtests.open_loop.http_client import http_client
from loadtests.open_loop.sweep import COLUMNS
from tests.e2e.routers import RunningRouter, null_info, running_router, tiny_checkpoint
from tests.null_worker import NullWorker

pytestmark = pytest.mark.timeout(300)

LOCUSTFILE = pathlib.Path(__file__).parents[2] / "loadtests" / "locustfile.py"
KEY = "a-key"
SMALL = ("--input-tokens", "24", "--output-tokens", "5", "--seed", "3", "--slo", "ttft=5,tpot=1000ms", "--warmup", "0")


@asynccontextmanager
async def bench(*arguments: str, key: str = KEY) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli", "bench", *arguments),
        env={**os.environ, "HEADRACE_API_KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said(*arguments: str, key: str = KEY) -> tuple[int, str, str]:
    async with bench(*arguments, key=key) as process:
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


async def until_serving(router: RunningRouter) -> None:
    async with asyncio.timeout(30), http_client(router.http) as client:
        while True:
            status, _ = await client._exchange(b"GET /ready HTTP/1.1\r\nhost: r\r\n\r\n", None)
            if status == 200:
                return
            await asyncio.sleep(0.05)


async def test_a_sweep_over_each_edge_is_whole_and_a_router_that_dies_ends_it_with_numbers(
    tmp_path: pathlib.Path,
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model")
    info = null_info(checkpoint, max_num_seqs=64)
    async with (
        NullWorker(info, auto=True, step_seconds=0.01) as worker,
        running_router(
            checkpoint, tmp_path / "h.yaml", [worker.address], api_keys=[KEY], silent_seconds=600.0
        ) as router,
    ):
        await until_serving(router)
        kept = tmp_path / "kept"
        sweep = ("--rates", "60,120,240", "--requests", "40", *SMALL)
        over_http, over_grpc, stranger, _ = await asyncio.gather(
            said("--url", router.http, *sweep, "--out", str(kept)),
            said("--address", router.grpc, "--rate", "60", "--requests", "40", *SMALL),
            said("--url", router.http, *SMALL, "--out", str(tmp_path / "none"), key="another"),
            locust_asks(router),
        )
        for status, out, err in (over_http, over_grpc):
            assert status == 0, err
            assert "SLO met" in out
        check_kept(kept)
        assert stranger[0] == 1
        assert "HTTP 401" in stranger[2]
        assert not (tmp_path / "none").exists(), "nothing is written before the server has answered"

        gone = tmp_path / "gone"
        async with bench(
            "--url", router.http, "--rate", "40", "--seconds", "600", *SMALL, "--out", str(gone)
        ) as process:
            seen: set[str] = set()
            while len(seen) < 10:
                seen.update(worker._running)
                await asyncio.sleep(0.01)
            router.process.kill()
            assert process.stderr is not None
            err = (await process.stderr.read()).decode()
            assert await process.wait() == 1
        assert "the server went away" in err
        assert "requests sent were answered" in err
        assert not list(gone.glob("rate-*")), "a rate that did not end is no point of a curve"


async def locust_asks(router: RunningRouter) -> None:
    """The Locust file, headless, until it was answered a few times."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", router.http),
        *("--headless", "-u", "4", "-r", "50", "--json"),
        env={**os.environ, "HEADRACE_API_KEY": KEY, "INPUT_TOKENS": "24", "OUTPUT_TOKENS": "4", "NUM_REQUESTS": "3"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    rows = {row["method"]: row for row in json.loads(out)}
    assert rows["TTFT"]["num_requests"] == rows["TPOT"]["num_requests"] >= 3
    assert {row["num_failures"] for row in rows.values()} == {0}


def check_kept(folder: pathlib.Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    assert [point["rate"] for point in result["points"]] == [60.0, 120.0, 240.0]
    for point in result["points"]:
        assert point["outcomes"] == {"finished": 40, "shed": 0, "timed_out": 0, "failed": 0}
        assert point["attainment"]["value"] == 1.0
        assert point["cached_fraction"] == 0.0
        assert 0 < point["ttft_seconds"]["p50"]["value"] < point["e2e_seconds"]["p50"]["value"]
    one = json.loads((folder / "rate-60.json").read_text())
    tokens = COLUMNS.index("tokens")
    assert [request[tokens] for request in one["requests"]] == [5] * 40
    page = (folder / "report.html").read_text()
    assert "<table>" in page
    assert 'src="http' not in page
    assert "href=" not in page
