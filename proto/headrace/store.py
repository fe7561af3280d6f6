"""Redis with one small time budget and a breaker: slow, frozen or dead, it never holds a caller beyond the budget.

    store = connect("redis://127.0.0.1:16379/0", budget_seconds=0.25)
    fields = await store.call(lambda redis: redis.hgetall(key))

`call` returns the answer or raises StoreUnavailable, within the budget; while the breaker is open it raises at once.
Nothing is sent before the first call, so a process starts without Redis and finds it later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, MovedError, ReadOnlyError, ResponseError, TimeoutError

from headrace.clock import Clock, SystemClock
from headrace.errors import ConfigError, Unavailable

T = TypeVar("T")

SENTINEL_PORT = 26379
SENTINEL_SHARE = 0.25  # of the budget, for one Sentinel

_AWAY = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OSError, asyncio.TimeoutError)
_AWAY_CODES = ("MASTERDOWN", "LOADING", "READONLY", "TRYAGAIN", "NOREPLICAS", "UNKILLABLE", "BUSY ")


class StoreUnavailable(Unavailable):
    """Redis did not answer in time, or is not asked just now because it lately did not."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Whether a call may be tried. Closed: yes. After `max_failures` in a row it is open for `open_seconds` (doubling up
    to `max_open_seconds`): no. Then half-open: one call is tried, and its outcome closes or opens it again.

    Owned by one Store. Pure: every method takes `now`.
    """

    def __init__(self, max_failures: int = 2, open_seconds: float = 0.5, max_open_seconds: float = 4.0) -> None:
        self._max_failures = max_failures
        self._first_open_seconds = open_seconds
        self._max_open_seconds = max_open_seconds
        self._open_seconds = open_seconds
        self._num_failures = 0
        self._open_until: float | None = None
        self._probing = False

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def admit(self, now: float) -> bool:
        """Whether a call may be tried now. Each True is followed by succeeded(), failed() or abandoned()."""
        match self.state(now):
            case BreakerState.CLOSED:
                return True
            case BreakerState.HALF_OPEN if not self._probing:
                self._probing = True
                return True
            case _:
                return False

    def succeeded(self) -> None:
        self._num_failures = 0
        self._open_until = None
        self._open_seconds = self._first_open_seconds
        self._probing = False

    def failed(self, now: float) -> None:
        self._probing = False
        self._num_failures += 1
        if self._open_until is None:
            if self._num_failures >= self._max_failures:
                self._open_until = now + self._open_seconds
        elif now >= self._open_until:
            self._open_seconds = min(2 * self._open_seconds, self._max_open_seconds)
            self._open_until = now + self._open_seconds

    def abandoned(self) -> None:
        """The caller went away before there was an outcome."""
        self._probing = False


class Store:
    """One process's way to Redis. Owns the connections and the breaker."""

    def __init__(
        self, client: Any, budget_seconds: float, clock: Clock, breaker: Breaker, others: Sequence[Any] = ()
    ) -> None:
        """`others`: clients that `client` needs, closed with it."""
        self._client = client
        self._others = others
        self._budget_seconds = budget_seconds
        self._clock = clock
        self._breaker = breaker
        self._checked = False

    @property
    def breaker_open(self) -> bool:
        """Whether Redis is not waited for just now (the metric headrace_redis_breaker_open)."""
        return self._breaker.state(self._clock.now()) is not BreakerState.CLOSED

    async def call(self, operation: Callable[[Any], Awaitable[T]], *, wait_seconds: float = 0.0) -> T:
        """The result of `operation(client)`, within the budget.

        `wait_seconds`: how long the operation itself asks Redis to wait (BLOCK), on top of the budget. Raises
        StoreUnavailable when Redis is away, ConfigError when the endpoint is a Redis Cluster; what Redis answers to a
        wrong command (ResponseError) goes up as it is.
        """
        if not self._breaker.admit(self._clock.now()):
            raise StoreUnavailable("Redis did not answer lately and is not waited for just now")
        try:
            async with asyncio.timeout(self._budget_seconds + wait_seconds):
                if not self._checked:
                    await self._refuse_cluster()
                result = await operation(self._client)
        except _AWAY as error:
            raise self._away(error) from error
        except MovedError as error:
            self._breaker.succeeded()
            raise _cluster_refused() from error
        except ResponseError as error:
            if str(error).startswith(_AWAY_CODES):
                raise self._away(error) from error
            self._breaker.succeeded()
            raise
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        return result

    async def time(self) -> float:
        """Redis's clock, which outlives every process that asks it."""
        seconds, microseconds = await self.call(lambda redis: redis.time())
        return float(seconds) + float(microseconds) / 1e6

    async def close(self) -> None:
        for client in (self._client, *self._others):
            await client.aclose()

    def _away(self, error: BaseException) -> StoreUnavailable:
        self._breaker.failed(self._clock.now())
        reason = str(error) or type(error).__name__
        return StoreUnavailable(
            f"Redis did not serve a call within {self._budget_seconds:g} s: {reason}",
            budget_seconds=self._budget_seconds,
            reason=reason,
        )

    async def _refuse_cluster(self) -> None:
        info = await self._client.info("cluster")
        if info.get("cluster_enabled"):
            raise _cluster_refused()
        self._checked = True


def _cluster_refused() -> ConfigError:
    return ConfigError(
        "redis.url names a node of a Redis Cluster (cluster_enabled:1), which is not supported: give the URL of a "
        "standalone server, or redis+sentinel:// for the primary that Sentinels name",
        key="redis.url",
    )


def connect(url: str, budget_seconds: float, clock: Clock | None = None, breaker: Breaker | None = None) -> Store:
    """A store on redis:// or rediss:// (TLS), or on the primary that Sentinels name:

        redis+sentinel://[user:password@]host:port[,host:port…]/SERVICE[/DB][?sentinel_password=…]

    Sends nothing yet. ConfigError on any other URL."""
    # Replies are bounded by `call` as a whole, so that a BLOCK longer than the budget can be asked for.
    options: dict[str, Any] = {
        "socket_connect_timeout": budget_seconds,
        "socket_timeout": None,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
    }
    try:
        if url.startswith(("redis+sentinel://", "rediss+sentinel://")):
            client, sentinels = _behind_sentinels(url, options, budget_seconds * SENTINEL_SHARE)
        elif url.startswith(("redis://", "rediss://")):
            client, sentinels = Redis.from_url(url, **options), ()
        else:
            raise ConfigError.out_of_range("redis.url", public(url), "a redis(s):// or redis(s)+sentinel:// URL")
    except ValueError as error:
        shown = public(url)
        # What was read amiss may be of a password that holds a / or #, not percent-encoded.
        why = error if shown == url else "it cannot be read; special characters of a password are percent-encoded"
        raise ConfigError(f"redis.url: {why}, got {shown!r}", key="redis.url", value=shown) from None
    return Store(client, budget_seconds, clock or SystemClock(), breaker or Breaker(), sentinels)


def public(url: str) -> str:
    """Without its user, passwords and parameters: fit to be shown, well-formed or not."""
    *scheme, rest = url.split("://", 1)
    return "://".join((*scheme, rest.rpartition("@")[2].partition("?")[0]))


def _behind_sentinels(url: str, options: Mapping[str, Any], seconds: float) -> tuple[Any, Sequence[Any]]:
    """A client of the primary, which is asked for at every new connection, and the clients that ask: `seconds` for each
    Sentinel, so that one that is gone leaves time for the next. ValueError when the URL names no Sentinel or service."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = (unquote(part) for part in credentials.partition(":"))
    places = [urlsplit(f"//{host}") for host in hosts.split(",")]
    service, _, database = parts.path.strip("/").partition("/")
    if not service or not all(place.hostname for place in places):
        raise ValueError("Sentinels are named by host:port[,host:port…]/SERVICE")
    asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    own = {name: asked.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    shared = {**asked, "ssl": parts.scheme == "rediss+sentinel"}
    timeouts = {"socket_connect_timeout": seconds, "socket_timeout": seconds}
    manager = Sentinel(  # type: ignore[no-untyped-call]
        [(place.hostname, place.port or SENTINEL_PORT) for place in places],
        sentinel_kwargs={**options, **shared, **own, **timeouts},
        username=user or None,
        password=password or None,
        db=int(database or 0),
        **options,
        **shared,
    )
    return manager.master_for(service), manager.sentinels
