"""Router processes that share a tenant's quotas over Redis, before a worker that answers by itself."""

import asyncio
import pathlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from grpc_health.v1 import health_pb2

from cluster.router_reports import router_reports
from headrace import metrics
from headrace.reports import RouterReport
from headrace.store import connect
from tests.e2e.routers import RunningRouter, null_info, running_router, tiny_checkpoint, until_health
from tests.null_worker import NullWorker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]
SERVING = health_pb2.HealthCheckResponse.SERVING
QUOTA = 30
NUM_REFUSED = 200
BODY = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def routers(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, redis_url: str
) -> AsyncIterator[list[RunningRouter]]:
    keys = tmp_path / "keys"
    keys.write_text("# of acme\nacme-1\n", encoding="utf-8")
    sections: dict[str, Any] = {
        "name": "quotas",
        "redis": {"url": redis_url},
        "tenants": {"acme": {"key_files": [str(keys)], "requests_per_minute": QUOTA}, "default": {}},
        "admission": {"quota_sync_seconds": 0.05},
    }
    async with NullWorker(null_info(checkpoint), auto=True) as worker, AsyncExitStack() as ends:
        yield [
            await ends.enter_async_context(
                running_router(
                    checkpoint, tmp_path / f"r{number}.yaml", [worker.address], sections, api_keys=["operator"]
                )
            )
            for number in range(2)
        ]


async def ask(client: httpx.AsyncClient, router: RunningRouter, key: str) -> httpx.Response:
    return await client.post(f"{router.http}/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})


async def arrived(redis_url: str, number: int) -> list[RouterReport]:
    """What the routers say in Redis, once so many requests have come and gone."""
    store = connect(redis_url, 2.0)
    try:
        async with asyncio.timeout(10):
            while True:
                reports = list((await router_reports(store, "quotas")).values())
                if sum(report.ended for report in reports) >= number:
                    return reports
                await asyncio.sleep(0.1)
    finally:
        await store.close()


async def test_two_routers_spend_one_quota_and_say_when_to_come_back(
    routers: list[RunningRouter], redis_url: str
) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        await asyncio.gather(*(until_health(router, SERVING) for router in routers))
        loop = asyncio.get_running_loop()
        began, statuses, refused = loop.time(), Counter[int](), None
        while statuses[429] < NUM_REFUSED:  # both routers are asked in turn, far beyond the quota
            for router in routers:
                response = await ask(client, router, "acme-1")
                statuses[response.status_code] += 1
                refused = response if response.status_code == 429 else refused
        passed = loop.time() - began
        assert set(statuses) == {200, 429}
        assert QUOTA - 4 <= statuses[200] <= QUOTA + QUOTA / 60 * passed + 1
        assert refused is not None
        assert 1 <= float(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "acme-1" not in refused.text
        for router in routers:
            assert (await ask(client, router, "operator")).status_code == 200
            assert (await ask(client, router, "acme-2")).status_code == 401
        pages = [(await client.get(f"{router.http}/metrics")).text for router in routers]
    counts = [
        sum(
            float(line.split()[-1])
            for line in page.splitlines()
            if line.startswith(metrics.ADMISSIONS + "{") and 'tenant="acme"' in line and f'outcome="{outcome}"' in line
        )
        for outcome in ("admitted", "quota_requests")
        for page in pages
    ]
    assert sum(counts[:2]) == statuses[200]
    assert sum(counts[2:]) == statuses[429]
    reports = await arrived(redis_url, sum(statuses.values()) + 2)
    assert {report.http_address for report in reports} == {router.http.removeprefix("http://") for router in routers}
    assert sum(report.classes[""].met for report in reports) == statuses[200] + 2
    assert sum(report.arrivals for report in reports) == sum(statuses.values()) + 2, "who is refused has arrived too"
    assert sum(report.denied for report in reports) == statuses[429]
    assert sum(report.classes[""].failed for report in reports) == 0, "and no worker more would have served it"
    assert sum(report.generated_tokens for report in reports) == 4 * (statuses[200] + 2)
    assert not any(key in page for page in pages for key in ("acme-1", "acme-2", "operator"))
