"""What a worker is just now, for a scrape. A scrape has a thread of its own, in which a set would be met half changed: all
is looked up in one call by the event loop that changes it, and put into words by the scrape."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import astuple, dataclass, fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace import metrics
from headrace.values import BlockCounts, Role

_PATIENCE = 5.0
"""Seconds that a loop may take to answer; half of what a scraper allows by default."""
_STATES = tuple(field.name for field in fields(BlockCounts))
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Now:
    """`in_flight`: requests by state. `links`: their number by (kind, state). `backlog`: prompt tokens that are not
    computed yet, those of the steps under way too. `tasks`: of the event loop."""

    worker_id: str
    role: Role
    model: str
    blocks: BlockCounts
    in_flight: Mapping[str, int]
    links: Mapping[tuple[str, str], int]
    preemptions: int
    backlog: int
    breaker_open: bool
    tasks: int


class Watched(Collector):
    """Families without series before it is told what to look at, and where the loop does not answer in time."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look: Callable[[], Now] | None = None

    def watch(self, look: Callable[[], Now]) -> None:
        """From the event loop that `look` is to run in."""
        self._loop, self._look = asyncio.get_running_loop(), look

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(metrics.KV_BLOCKS, "KV blocks by state.", labels=["state"])
        in_flight = GaugeMetricFamily(metrics.IN_FLIGHT, "Requests that are here now.", labels=["state"])
        links = GaugeMetricFamily(metrics.LINKS, "Links to peers that are read.", labels=["kind", "state"])
        info = GaugeMetricFamily(metrics.WORKER_INFO, "1, with what it is now.", labels=["worker", "role", "model"])
        preempted = CounterMetricFamily(metrics.PREEMPTIONS.removesuffix("_total"), "Sequences preempted.", labels=())
        backlog = GaugeMetricFamily(metrics.PREFILL_BACKLOG, "Prompt tokens that are not computed yet.", labels=())
        breaker = GaugeMetricFamily(metrics.REDIS_BREAKER, "1 while Redis is not waited for.", labels=())
        tasks = GaugeMetricFamily(metrics.TASKS, "Tasks of the event loop.", labels=())
        now = self._now()
        if now is not None:
            for state, number in zip(_STATES, astuple(now.blocks), strict=True):
                blocks.add_metric([state], number)
            for state, number in now.in_flight.items():
                in_flight.add_metric([state], number)
            for labels, number in now.links.items():
                links.add_metric(labels, number)
            info.add_metric([now.worker_id, now.role.value, now.model], 1)
            preempted.add_metric([], now.preemptions)
            backlog.add_metric([], now.backlog)
            breaker.add_metric([], float(now.breaker_open))
            tasks.add_metric([], now.tasks)
        yield from (blocks, in_flight, links, info, preempted, backlog, breaker, tasks)

    def _now(self) -> Now | None:
        """What the loop says, asked from any thread."""
        loop, look = self._loop, self._look
        if loop is None or look is None:
            return None
        if asyncio._get_running_loop() is loop:
            return look()
        answer: Future[Now] = Future()
        try:
            loop.call_soon_threadsafe(_answer, answer, look)
            return answer.result(_PATIENCE)
        except (TimeoutError, RuntimeError) as error:  # it is stuck, or over
            log.warning("a scrape got no answer from the event loop: %r", error)
            return None


def _answer(answer: "Future[Now]", look: Callable[[], Now]) -> None:
    try:
        answer.set_result(look())
    except Exception as error:  # the scrape's: the loop goes on
        answer.set_exception(error)
