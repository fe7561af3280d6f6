"""The routers of a virtual worker: what they hear, and when."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.keys import EventBatch
from headrace.values import LoadReport, RequestKey, SequenceOutput, WorkerInfo
from workers.publish import BATCH_SECONDS, Log
from workers.virtual.engine import VirtualEngine
from workers.virtual.time import VirtualTime

MIN_REPORT_SECONDS = 0.05


class Router(Protocol):
    """Who hears of a worker. Every call comes `message_seconds` after it was made."""

    def outputs(self, worker_id: str, outputs: list[SequenceOutput]) -> None: ...

    def rejected(self, worker_id: str, key: RequestKey, error: HeadraceError) -> None: ...

    def peer_lost(self, worker_id: str, key: RequestKey, prefill: str, error: HeadraceError) -> None: ...

    def reported(self, worker_id: str, report: LoadReport) -> None: ...

    def changed(self, worker_id: str, batch: EventBatch) -> None: ...


class Speaker(Protocol):
    """The worker, as far as routers hear of it."""

    info: WorkerInfo
    engine: VirtualEngine

    def report(self) -> LoadReport: ...

    def request_keys(self) -> Iterator[RequestKey]: ...


class Audience:
    """Owns what of a worker is still to be told, and the numbers of its index events. `event_seconds`: how long a batch of
    these takes to the routers, beside what it waits to be one. A router hears of a sample's first token, its last, and
    every `tell_every`th."""

    def __init__(
        self,
        time: VirtualTime,
        speaker: Speaker,
        routers: Sequence[Router],
        *,
        message_seconds: float,
        event_seconds: float,
        tell_every: int,
        owner: Callable[[str], int] | None,
    ) -> None:
        self._time = time
        self._speaker = speaker
        self._routers = tuple(routers)
        self._owner = owner if len(routers) > 1 else None
        self._message_seconds = message_seconds
        self._event_seconds = event_seconds
        self.tell_every = tell_every
        self._log = Log(speaker.info.generation)
        self._flush_due = False
        self._report_due = False
        self._report_at = 0.0

    def of(self, key: RequestKey) -> Router:
        """The one whose request it is."""
        return self._routers[0 if self._owner is None else self._owner(key.request_id)]

    def say(self, hear: object, *what: object) -> None:
        """To a router, or to another worker."""
        self._time.after(self._message_seconds, hear, *what)  # type: ignore[arg-type]

    def tell(self, outputs: Sequence[SequenceOutput]) -> None:
        every = self.tell_every
        told = [
            output
            for output in outputs
            if output.finish is not None or output.num_generated % every == 0 or output.num_generated == 1
        ]
        if not told:
            return
        worker_id = self._speaker.info.worker_id
        if self._owner is None:
            self.say(self._routers[0].outputs, worker_id, told)
            return
        for router in self._routers:
            part = [output for output in told if self.of(output.key) is router]
            if part:
                self.say(router.outputs, worker_id, part)

    def changed(self) -> None:
        """Something did: they hear of it once it is time."""
        if not self._report_due:
            self._report_due = True
            self._time.at(max(self._report_at, self._time.now), self._report)
        if not self._flush_due and self._speaker.engine.ledger.has_events:
            self._flush_due = True
            self._time.after(0.0, self._flush)

    def _report(self) -> None:
        """On change, but not faster than every MIN_REPORT_SECONDS."""
        self._report_due = False
        self._report_at = self._time.now + MIN_REPORT_SECONDS
        speaker, report = self._speaker, self._speaker.report()
        for router in self._routers:
            if self._owner is not None:
                keys = [key for key in speaker.request_keys() if self.of(key) is router]
                report = replace(report, yours=speaker.engine.scheduler.load_of(keys))
            self.say(router.reported, speaker.info.worker_id, report)

    def _flush(self) -> None:
        events = self._speaker.engine.ledger.drain_events()
        if not events:
            self._flush_due = False
            return
        batch = self._log.batch(events)
        for router in self._routers:
            self._time.after(self._event_seconds, router.changed, self._speaker.info.worker_id, batch)
        self._time.after(BATCH_SECONDS, self._flush)
