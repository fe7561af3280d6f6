"""Asks workers and routers about themselves, at a bounded cost, and keeps what they last said.

Who does not answer holds up nobody: a question goes on beside later looks until its own time is over, and no second one is
put to the same process meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import quote

import httpx

from cluster.console.pools import Seen
from cluster.console.view import Heard
from cluster.state import WorkerRecord
from cluster.worker_client import WorkerClient, WorkerReport
from headrace.clock import Clock
from headrace.errors import HeadraceError, InternalError, Unavailable
from headrace.reports import RouterReport
from headrace.tls import ClientTls
from router.decisions.codec import decode
from router.explanations import Recent

MAX_WORKERS_A_LOOK = 64
MAX_ROUTERS_A_LOOK = 4
WAIT_SECONDS = 0.5  # of a look, for answers
ROUTER_SECONDS = 2.0
NUM_REQUESTS = 50
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Said(Generic[T]):
    """The last answer of somebody, at `at`, and why there is no newer one."""

    answer: T | None
    at: float
    silence: str = ""


class Asking(Generic[T]):
    """Owns what was said, by name, and the questions under way. Those asked longest ago are asked first."""

    def __init__(self, ask: Callable[[str], Awaitable[T]], clock: Clock, max_at_once: int) -> None:
        """`ask` takes an address; it raises a HeadraceError."""
        self._ask = ask
        self._clock = clock
        self._max_at_once = max_at_once
        self._said: dict[str, Said[T]] = {}
        self._asked_at: dict[str, float] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def look(self, addresses: Mapping[str, str]) -> Mapping[str, Said[T]]:
        """What all of `addresses` last said; who is not among them any more is forgotten."""
        for name in self._said.keys() - addresses.keys():
            del self._said[name]
        for name in self._asked_at.keys() - addresses.keys():
            del self._asked_at[name]
        for name in due(addresses, self._asked_at, self._under_way, self._max_at_once):
            self._asked_at[name] = self._clock.now()
            self._under_way[name] = asyncio.create_task(self._hear(name, addresses[name]))
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=WAIT_SECONDS)
        return self._said

    async def _hear(self, name: str, address: str) -> None:
        try:
            self._said[name] = Said(await self._ask(address), self._clock.now())
        except HeadraceError as error:
            last = self._said.get(name, Said(None, self._clock.now()))
            self._said[name] = Said(last.answer, last.at, error.message)
        finally:
            del self._under_way[name]

    async def close(self) -> None:
        for task in list(self._under_way.values()):
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)


def due(
    names: Mapping[str, object], asked_at: Mapping[str, float], under_way: Mapping[str, object], max_at_once: int
) -> list[str]:
    waiting = sorted((name for name in names if name not in under_way), key=lambda name: asked_at.get(name, -1.0))
    return waiting[: max(max_at_once - len(under_way), 0)]


async def describe(address: str) -> WorkerReport:
    async with WorkerClient(address) as client:
        return await client.describe()


def seen(records: Sequence[WorkerRecord], said: Mapping[str, Said[WorkerReport]], now: float) -> list[Seen]:
    workers = []
    for record in records:
        last = said.get(record.worker_id)
        # What an older generation said is not this one's.
        if last is None or (last.answer is not None and last.answer.generation != record.generation):
            workers.append(Seen(record))
        else:
            workers.append(Seen(record, last.answer, now - last.at, last.silence))
    return workers


class Routers:
    """What routers answer over HTTP; `api_key` where they ask for one, `tls` where they speak it."""

    def __init__(self, api_key: str | None, tls: ClientTls | None = None) -> None:
        """ConfigError when a file of `tls` cannot be used."""
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._scheme = "https" if tls is not None else "http"
        self._extensions = tls.extensions if tls is not None else {}
        verify = tls.lasting_context() if tls is not None else False
        self._client = httpx.AsyncClient(headers=headers, timeout=ROUTER_SECONDS, trust_env=False, verify=verify)

    async def requests(self, address: str) -> tuple[Recent, ...]:
        response = await self._get(f"{self._scheme}://{address}/requests?limit={NUM_REQUESTS}")
        match response.status_code:
            case 200:
                try:
                    return tuple(decode(Recent, one) for one in response.json()["requests"])
                except (ValueError, KeyError, TypeError) as error:
                    raise InternalError(f"its list of requests is of another version: {error}") from error
            case 401:
                what = "a client certificate" if "certificate" in response.text else "an API key"
                raise Unavailable(f"it wants {what} for its list of requests, and none is known here")
            case status:
                raise Unavailable(f"it answered with status {status} when asked for its requests")

    async def why(self, address: str, request_id: str) -> tuple[int, bytes]:
        """Status and body, as the router gave them."""
        response = await self._get(f"{self._scheme}://{address}/why/{quote(request_id, safe='')}")
        return response.status_code, response.content

    async def _get(self, url: str) -> httpx.Response:
        try:
            return await self._client.get(url, extensions=self._extensions)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(f"it does not answer: {type(error).__name__}") from error

    async def close(self) -> None:
        await self._client.aclose()


def heard(reports: Mapping[str, RouterReport], said: Mapping[str, Said[tuple[Recent, ...]]]) -> list[Heard]:
    """Of a router that is silent now, what it said last is not shown: it is over."""
    listed = [(name, said[name]) for name in reports if name in said]
    return [Heard(name, () if its.silence else its.answer or (), its.silence) for name, its in listed]


def by_address(records: Sequence[WorkerRecord]) -> dict[str, str]:
    return {record.worker_id: record.address for record in records if record.address}
