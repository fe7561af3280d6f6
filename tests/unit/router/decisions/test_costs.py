"""Who has not measured a kind of work is priced by those that have; who has, by itself."""

from dataclasses import dataclass, field, replace

import pytest

from headrace.costmodel import CostModel
from headrace.values import Load, LoadReport, ParallelLayout, Role
from router.decisions.costs import HALF_LIFE_SECONDS, Costs
from router.decisions.health import Health
from router.decisions.ledger import Ledger
from router.decisions.views import Views
from tests.null_worker import worker_info
from tests.unit.router.decisions.placing import Session

GUESS = CostModel()
DECODES = replace(GUESS, decode_base_seconds=7e-3, decode_sequence_seconds=1e-5, decode_context_token_seconds=5e-8)
PREFILLS = replace(GUESS, prefill_base_seconds=1e-3, prefill_token_seconds=2e-5, prefill_token_context_seconds=0.0)


def test_each_line_is_lent_by_whoever_measured_it() -> None:
    costs = Costs()
    costs.heard(worker_info("d"), DECODES, 0.0, idle=False)
    costs.heard(worker_info("p"), PREFILLS, 0.0, idle=False)
    lent = costs.of(worker_info("new"), GUESS)
    assert lent.decode_base_seconds == 7e-3
    assert lent.prefill_token_seconds == 2e-5
    assert lent.transfer_bytes_per_second == GUESS.transfer_bytes_per_second, "nobody measured it"


def test_what_a_worker_measured_itself_stays() -> None:
    costs = Costs()
    costs.heard(worker_info("d"), DECODES, 0.0, idle=False)
    own = replace(GUESS, decode_base_seconds=9e-3)
    assert costs.of(worker_info("slow"), own) == own


def test_workers_of_another_layout_or_class_lend_nothing() -> None:
    costs, info = Costs(), worker_info("d")
    costs.heard(info, DECODES, 0.0, idle=False)
    assert costs.of(replace(info, layout=ParallelLayout(tp=2)), GUESS) == GUESS
    assert costs.of(replace(info, compatibility=replace(info.compatibility, dtype="float16")), GUESS) == GUESS


def test_with_the_first_measurement_all_others_are_priced_anew() -> None:
    views = Views(Ledger(), Health())
    idle = Session(worker_info("idle", Role.DECODE))
    views.heard("idle", idle, 0.0)
    assert _view(views).cost == GUESS
    busy = worker_info("busy", Role.DECODE)
    views.heard("busy", Session(busy, LoadReport(Load(), Load(), DECODES, Role.DECODE, 9)), 0.0)
    assert _view(views).cost == DECODES


def _view(views: Views):  # type: ignore[no-untyped-def]
    found = views.view().find("idle")
    assert found is not None
    return found


QUICK = replace(PREFILLS, transfer_base_seconds=1e-4)


def slower(times: float) -> CostModel:
    return replace(
        QUICK,
        prefill_base_seconds=times * QUICK.prefill_base_seconds,
        prefill_token_seconds=times * QUICK.prefill_token_seconds,
    )


@dataclass
class Pool:
    """Two quick workers, and one that was slow once. `own` is what its fit says; it reports every `every` seconds."""

    own: CostModel
    costs: Costs = field(default_factory=Costs)
    now: float = 0.0
    every: float = 5.0

    def wait(self, seconds: float, *, idle: bool = True) -> None:
        end = self.now + seconds
        while self.now < end:
            for worker in ("a", "b"):
                self.costs.heard(worker_info(worker), QUICK, self.now, idle=False)
            self.costs.heard(worker_info("slow"), self.own, self.now, idle=idle)
            self.now += self.every

    def ratio(self, *, idle: bool = True) -> float:
        """How much dearer it is than the others."""
        cost = self.costs.of(worker_info("slow"), self.own, Load(num_running=not idle))
        return cost.prefill_seconds(2048) / QUICK.prefill_seconds(2048)

    def until_near(self) -> float:
        """How long its price takes to come within 5 % of the others'."""
        began = self.now
        while self.ratio() > 1.05:
            self.wait(self.every)
            assert self.now < began + 50_000, "it stays where it was"
        return self.now - began


def test_an_idle_worker_that_was_slow_once_comes_near_the_price_of_its_kind_and_never_beyond() -> None:
    pool = Pool(slower(5.0))
    pool.wait(5.0)
    assert pool.ratio() == pytest.approx(5.0)
    pool.wait(HALF_LIFE_SECONDS)
    assert pool.ratio() == pytest.approx(3.0)
    pool.wait(100 * HALF_LIFE_SECONDS)
    assert pool.ratio() == pytest.approx(1.0)
    assert pool.ratio(idle=False) == pytest.approx(5.0), "what is given to it now waits at its own price"


def test_one_that_is_as_slow_as_ever_has_its_own_price_again_and_is_tried_ever_more_seldom() -> None:
    pool, took = Pool(slower(3.0), every=30.0), []
    for _ in range(7):
        took.append(pool.until_near())
        pool.wait(5.0, idle=False)
        pool.wait(5.0)
        assert pool.ratio() > 2.9
    assert took[1] > 1.8 * took[0]
    assert took[-1] == pytest.approx(took[-2], rel=0.05), "up to some bound"
    assert took[-1] > 20 * took[0]


def test_one_that_proves_faster_stays_near_until_it_has_measured_that() -> None:
    pool = Pool(slower(3.0))
    pool.until_near()
    for times in (2.8, 2.4, 1.9, 1.3, 1.02):
        pool.wait(5.0, idle=False)
        pool.own = slower(times)
        pool.wait(5.0)
        assert pool.ratio() < 1.05


def test_a_worker_at_work_is_priced_by_itself_however_long() -> None:
    pool = Pool(slower(2.0))
    pool.wait(50 * HALF_LIFE_SECONDS, idle=False)
    pool.wait(5.0)
    assert pool.ratio() == pytest.approx(2.0, rel=0.01)


def test_one_that_is_gone_leaves_nothing() -> None:
    pool = Pool(slower(2.0))
    pool.wait(10.0)
    pool.costs.forget("slow")
    assert pool.costs.of(worker_info("slow"), pool.own, Load()) == pool.own
