"""Who gets a request of disagg: the worker with the least to do, or whom production's placement names, without a router."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from time import monotonic

from headrace.config import HandoffConfig
from headrace.values import PrefillTarget, SamplingParams
from loadtests.open_loop.answers import Answer, Ask
from loadtests.open_loop.client import Call, Served
from loadtests.worker_session import Session
from router.decisions.health import Health
from router.decisions.ledger import Ledger
from router.decisions.placement import Ask as PlacementAsk
from router.decisions.placement import Placed, place
from router.decisions.tenants import Targets
from router.decisions.views import Views
from router.requests import COUNT_EVERY_TOKENS


@dataclass
class Place:
    """One worker, and what is on its way there: this process alone sends to it."""

    session: Session
    target: PrefillTarget
    prompt_tokens: int = 0
    running: int = 0


@dataclass
class Pools:
    """An open loop's client. Owns what it knows of each worker's load."""

    prefill: list[Place]
    decode: list[Place]
    most_context: int
    num_asked: int = 0

    async def served(self) -> Served:
        return Served("random", self.most_context)

    def prepare(self, ask: Ask) -> Call:
        return partial(self._answer, ask)

    def _name(self) -> str:
        self.num_asked += 1
        return f"d{self.num_asked}"

    async def _answer(self, ask: Ask, answer: Answer) -> None:
        decode = min(self.decode, key=lambda place: (place.prompt_tokens, place.running))
        prefill = min(self.prefill, key=lambda place: place.prompt_tokens, default=None)
        computes, count = prefill or decode, len(ask.prompt)
        name, sampling = self._name(), _sampling(ask)
        began = monotonic() - answer.now()
        target = None if prefill is None else prefill.target
        computes.prompt_tokens += count
        decode.running += 1
        try:
            heard = decode.session.ask(name, ask.prompt, sampling, target)
            try:
                await heard.reach(1)
            finally:
                computes.prompt_tokens -= count
            await heard.end()
        finally:
            decode.running -= 1
        answer.times = array("d", [at - began for at in heard.at])
        answer.count(count, len(heard.at), 0)


@dataclass
class PlacedPools(Pools):
    """As a router's requests are placed: by the workers' reports and what is in flight here, by prices and `targets`. There
    is no queue before placement, and no prefix. Owns the ledger."""

    targets: Targets = field(default_factory=Targets)
    num_alone: int = 0

    def __post_init__(self) -> None:
        self._ledger = Ledger()
        self._views = Views(self._ledger, Health())
        self._places: Mapping[str, Place] = {place.target.worker_id: place for place in (*self.prefill, *self.decode)}
        self._random = Random(0)
        for name, known in self._places.items():
            known.session.on_report = partial(self._reported, name)
            self._reported(name)

    def _reported(self, name: str) -> None:
        self._views.heard(name, self._places[name].session, monotonic())

    async def _answer(self, ask: Ask, answer: Answer) -> None:
        name, count, began = self._name(), len(ask.prompt), monotonic() - answer.now()
        placed = self._place(ask)
        prefill = None if placed.prefill is None else placed.prefill.worker_id
        decode = placed.decode.worker_id
        self.num_alone += prefill is None and bool(self.prefill)
        self._ledger.open(name, decode=decode, prefill=prefill, num_prompt_tokens=count, prefill_tokens=count, n=1)
        try:
            target = None if prefill is None else self._places[prefill].target
            heard = self._places[decode].session.ask(name, ask.prompt, _sampling(ask), target)
            heard.every = COUNT_EVERY_TOKENS, partial(self._ledger.grew, name, COUNT_EVERY_TOKENS)
            await heard.reach(1)
            self._ledger.first_token(name)
            await heard.end()
        finally:
            self._ledger.close(name)
        answer.times = array("d", [at - began for at in heard.at])
        answer.count(count, len(heard.at), 0)

    def _place(self, ask: Ask) -> Placed:
        now = monotonic()
        asked = PlacementAsk(
            len(ask.prompt),
            ask.max_tokens,
            local_prefill_max_tokens=HandoffConfig().local_prefill_max_tokens,
            tie=self._random.random(),
            ttft_seconds=self.targets.ttft_seconds,
            tpot_seconds=self.targets.tpot_seconds,
        )
        placement = place(asked, self._views.view(), now)
        if not isinstance(placement, Placed):
            raise SystemExit(f"nobody takes a prompt of {len(ask.prompt)} tokens: {placement.reason}")
        return placement


def _sampling(ask: Ask) -> SamplingParams:
    return SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
