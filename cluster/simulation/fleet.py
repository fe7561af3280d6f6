"""Workers, and routers before them, under virtual time."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Protocol

from cluster.simulation.cards import LANDING_SECONDS, MESSAGE_SECONDS, Card
from cluster.simulation.policies import POLICIES, Policy
from cluster.simulation.results import Served
from cluster.simulation.router import COUNT_EVERY_TOKENS, RouterLimits, VirtualRouter
from headrace import traces
from headrace.errors import ConfigError
from headrace.traces import TraceRow
from headrace.values import Capacity, Compatibility, ParallelLayout, Role, WorkerInfo
from router.decisions.told import Told
from workers.scheduling.scheduler import SchedulerLimits
from workers.scheduling.work import GRAPH_TOKENS, StepWork
from workers.virtual.engine import Machine, Prompt, virtual_hasher
from workers.virtual.time import VirtualTime
from workers.virtual.worker import VirtualWorker

VOCAB_SIZE = 128_000
EVENT_SECONDS = 2e-3


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many workers of which role, each on one card; those that prefill on `prefill_card`, where it is another. Limits
    as in headrace.config, `decode_step_tokens` where those that decode have another than `max_step_tokens`;
    `message_seconds` from process to process, `event_seconds` from a worker through Redis to the router's index;
    `graph_tokens` and `landing_seconds` as of workers.virtual.engine.Machine. Several `routers` take turns:
    each knows of the others' requests what workers report, and, where they are `told`, of their placements, as late as of
    events.
    """

    card: Card
    prefill: int = 0
    decode: int = 0
    unified: int = 0
    block_size: int = 32
    max_num_seqs: int = 256
    max_step_tokens: int = 8192
    decode_step_tokens: int | None = None
    max_context_tokens: int = 131_072
    max_waiting: int = 256
    claim_fraction: float = 0.9
    max_pinned_fraction: float = 0.5
    router: RouterLimits = field(default_factory=lambda: RouterLimits(message_seconds=MESSAGE_SECONDS))
    event_seconds: float = EVENT_SECONDS
    prefill_card: Card | None = None
    graph_tokens: tuple[int, ...] = GRAPH_TOKENS
    landing_seconds: float = LANDING_SECONDS
    routers: int = 1
    told: bool = True

    def __post_init__(self) -> None:
        if self.routers < 1:
            raise ConfigError.out_of_range("routers", self.routers, "at least 1")
        for name in ("prefill", "decode", "unified"):
            if getattr(self, name) < 0:
                raise ConfigError.out_of_range(name, getattr(self, name), "at least 0")
        if not self.decode and not self.unified:
            raise ConfigError.out_of_range("decode", self.decode, "at least 1 where no worker is unified")

    @property
    def roles(self) -> Iterator[tuple[str, Role]]:
        """(worker id, role) of all, in the order in which they join."""
        for role, count in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode), (Role.UNIFIED, self.unified)):
            for number in range(count):
                yield f"{role.value}-{number}", role

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.unified

    def card_of(self, role: Role) -> Card:
        return self.prefill_card or self.card if role is Role.PREFILL else self.card

    def step_tokens(self, role: Role) -> int:
        return self.decode_step_tokens or self.max_step_tokens if role is Role.DECODE else self.max_step_tokens

    def machine(self, role: Role) -> Machine:
        card = self.card_of(role)
        limits = SchedulerLimits(
            self.max_num_seqs,
            self.step_tokens(role),
            self.max_context_tokens,
            self.max_waiting,
            self.router.request_seconds,  # a pin is renewed while its puller lives, and here it does
            max_pinned_fraction=self.max_pinned_fraction,
            max_peer_pinned_fraction=self.max_pinned_fraction,
            claim_fraction=self.claim_fraction,
        )
        return Machine(
            limits,
            card.num_blocks,
            self.block_size,
            card.block_bytes,
            card.cost,
            self.graph_tokens,
            self.landing_seconds,
        )

    def info(self, worker_id: str, role: Role) -> WorkerInfo:
        """As a worker introduces itself: what its steps cost it has yet to learn."""
        card = self.card_of(role)
        capacity = Capacity(
            card.num_blocks,
            card.block_bytes,
            self.max_num_seqs,
            self.max_context_tokens,
            self.step_tokens(role),
            VOCAB_SIZE,
        )
        same = Compatibility("8b", "virtual", "", "", "bfloat16", "bfloat16", block_size=self.block_size)
        return WorkerInfo(worker_id, 1, role, worker_id, same, ParallelLayout(), capacity, "8b")


class Watcher(Protocol):
    """Who counts what happens."""

    def step(self, worker_id: str, now: float, work: StepWork, seconds: float) -> None: ...

    def ended(self, served: Served) -> None: ...


class Simulation:
    """Owns the clock, the workers and the routers. One run; equal arguments give equal results, in any process.

    `policy` is one of POLICIES, or its maker by seed.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: str | Callable[[int], Policy],
        watcher: Watcher,
        *,
        seed: int = 0,
        keep_why: bool = False,
    ) -> None:
        if isinstance(policy, str):
            if policy not in POLICIES:
                raise ConfigError.out_of_range("policy", policy, f"one of {', '.join(POLICIES)}")
            policy = POLICIES[policy]
        self.time = VirtualTime()
        self.workers: dict[str, VirtualWorker] = {}
        hasher = virtual_hasher(fleet.block_size)
        self._event_seconds = fleet.event_seconds
        self.routers = tuple(
            VirtualRouter(
                self.time,
                self.workers,
                hasher,
                policy(seed + number),
                fleet.router,
                watcher.ended,
                seed=seed + number,
                keep_why=keep_why,
                tell=partial(self._tell, number) if fleet.told and fleet.routers > 1 else _nobody,
            )
            for number in range(fleet.routers)
        )
        machines = {role: fleet.machine(role) for role in Role}
        for worker_id, role in fleet.roles:
            self.workers[worker_id] = VirtualWorker(
                self.time,
                fleet.info(worker_id, role),
                machines[role],
                hasher,
                self.workers,
                self.routers,
                meter=watcher,
                message_seconds=fleet.router.message_seconds,
                event_seconds=fleet.event_seconds,
                tell_every=COUNT_EVERY_TOKENS,
                owner=lambda request_id: int(request_id.removeprefix("r")) % fleet.routers,  # its number
            )
        for router in self.routers:
            for worker in self.workers.values():
                router.join(worker.info)
        self._prompts = traces.Prompts(VOCAB_SIZE)

    def run(self, rows: Iterable[TraceRow], until: float = float("inf")) -> None:
        """Until the last of them is answered, or it is that late. Rows in order of time."""
        with _rare_collections():
            for row in takewhile(lambda row: row.seconds <= until, rows):
                prompt = Prompt(self._prompts.of(row))
                self.time.run(row.seconds)
                router = self.routers[row.number % len(self.routers)]
                self.time.at(row.seconds, router.arrive, row.number, prompt, row.output_tokens)
            self.time.run(until)

    def _tell(self, number: int, told: Told) -> None:
        """From one router to the others."""
        for other in self.routers[:number] + self.routers[number + 1 :]:
            self.time.after(self._event_seconds, other.hear, told)


def _nobody(told: Told) -> None:
    pass


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A placement makes an object for every worker and drops them all: counted as garbage to come, they would have the
    whole fleet searched for cycles again and again."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
