"""Who has not measured a kind of work is priced by those that have; who has, by itself."""

from dataclasses import replace

from headrace.costmodel import CostModel
from headrace.values import Load, LoadReport, ParallelLayout, Role
from router.decisions.costs import Costs
from router.decisions.health import Health
from router.decisions.ledger import Ledger
from router.decisions.view import Views
from tests.null_worker import worker_info
from tests.unit.router.decisions.test_view import Session

GUESS = CostModel()
DECODES = replace(GUESS, decode_base_seconds=7e-3, decode_sequence_seconds=1e-5, decode_context_token_seconds=5e-8)
PREFILLS = replace(GUESS, prefill_base_seconds=1e-3, prefill_token_seconds=2e-5, prefill_token_context_seconds=0.0)


def test_each_line_is_lent_by_whoever_measured_it() -> None:
    costs = Costs()
    costs.heard(worker_info("d"), DECODES)
    costs.heard(worker_info("p"), PREFILLS)
    lent = costs.of(worker_info("new"), GUESS)
    assert lent.decode_base_seconds == 7e-3
    assert lent.prefill_token_seconds == 2e-5
    assert lent.transfer_bytes_per_second == GUESS.transfer_bytes_per_second, "nobody measured it"


def test_what_a_worker_measured_itself_stays() -> None:
    costs = Costs()
    costs.heard(worker_info("d"), DECODES)
    own = replace(GUESS, decode_base_seconds=9e-3)
    assert costs.of(worker_info("slow"), own) == own


def test_workers_of_another_layout_or_class_lend_nothing() -> None:
    costs, info = Costs(), worker_info("d")
    costs.heard(info, DECODES)
    assert costs.of(replace(info, layout=ParallelLayout(tp=2)), GUESS) == GUESS
    assert costs.of(replace(info, compatibility=replace(info.compatibility, dtype="float16")), GUESS) == GUESS


def test_with_the_first_measurement_all_others_are_priced_anew() -> None:
    views = Views(Ledger(), Health())
    idle = Session(worker_info("idle", Role.DECODE))
    views.heard("idle", idle)
    assert _view(views).cost == GUESS
    busy = worker_info("busy", Role.DECODE)
    views.heard("busy", Session(busy, LoadReport(Load(), Load(), DECODES, Role.DECODE, 9)))
    assert _view(views).cost == DECODES


def _view(views: Views):  # type: ignore[no-untyped-def]
    found = views.view().find("idle")
    assert found is not None
    return found
