from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.costmodel import CostModel
from headrace.errors import InternalError
from headrace.values import Load, LoadReport, Role
from router.decisions.costs import Costs
from router.decisions.health import Health
from router.decisions.ledger import Ledger
from router.decisions.told import ON_ITS_WAY_SECONDS, Brought, Told
from router.decisions.view import View
from router.decisions.views import Views, net_load, worker_view
from tests.null_worker import worker_info
from tests.unit.router.decisions.placing import Session
from tests.unit.router.decisions.strategies import costs, loads


def test_own_work_is_counted_once_and_others_as_reported() -> None:
    total = Load(num_waiting=5, num_running=7, waiting_prefill_tokens=500, context_tokens=900, used_blocks=40)
    yours = Load(num_waiting=2, num_running=3, waiting_prefill_tokens=200, context_tokens=400, used_blocks=10)
    own = Load(num_waiting=1, num_running=4, waiting_prefill_tokens=50, context_tokens=450)
    expected = Load(num_waiting=4, num_running=8, waiting_prefill_tokens=350, context_tokens=950, used_blocks=40)
    assert net_load(total, yours, own) == expected


def test_a_report_older_than_what_left_since_goes_not_below_zero() -> None:
    assert net_load(Load(num_running=1), Load(num_running=2), Load()).num_running == 0


def test_a_worker_that_has_not_reported_is_empty_but_for_our_own() -> None:
    ledger = Ledger()
    ledger.open("r", decode="w", prefill=None, num_prompt_tokens=100, prefill_tokens=100, n=1)
    info = worker_info("w", num_blocks=10, block_size=32, max_num_seqs=4)
    view = worker_view(info, None, ledger, Health(), Costs())
    assert view.load.num_waiting == 1
    assert view.free_tokens == 10 * 32 - 100
    assert view.free_slots == 3


def test_a_report_wins_over_hello_and_health_is_in_the_view() -> None:
    health = Health(max_failures=1, eject_seconds=5)
    health.failed("w", InternalError("x"), now=1.0)
    cost = CostModel(prefill_base_seconds=9.0)
    report = LoadReport(Load(num_running=2), Load(), cost, Role.DECODE, free_blocks=3, draining=True)
    view = worker_view(worker_info("w", Role.UNIFIED), report, Ledger(), health, Costs())
    assert (view.role, view.cost, view.free_blocks, view.draining) == (Role.DECODE, cost, 3, True)
    assert view.ejected_until == 6.0
    assert View((view,)).find("w") is view
    assert View((view,)).find("x") is None


def test_what_another_router_placed_is_load_here_until_the_workers_report_it_themselves() -> None:
    views, sessions = Views(Ledger(), Health()), {name: Session(worker_info(name)) for name in "pd"}
    for name, session in sessions.items():
        views.heard(name, session, 0.0)

    def load(name: str) -> Load:
        view = views.view().find(name)
        assert view is not None
        return view.load

    def report(name: str, now: float, total: Load) -> None:
        sessions[name].report = LoadReport(total, Load(), CostModel(), Role.UNIFIED, free_blocks=9)
        views.heard(name, sessions[name], now)

    views.told(Told("r", "p", (), 3.0, Brought("d", 100, 60, 2)), 1.0)
    assert load("p") == Load(num_waiting=1, waiting_prefill_tokens=60)
    assert load("d") == Load(num_waiting=2, claimed_tokens=100)
    report("p", 1.0 + ON_ITS_WAY_SECONDS / 2, Load())
    assert load("p").waiting_prefill_tokens == 60, "made before the request came there"
    report("p", 1.05, Load(num_waiting=1, waiting_prefill_tokens=60))
    assert load("p").waiting_prefill_tokens == 60, "counted twice, or not at all"
    assert load("d").claimed_tokens == 100, "by its own reports alone"
    report("p", 4.0, Load())
    assert load("d") == Load(), "told for 3 s"


def test_of_what_others_tell_no_more_is_believed_than_a_worker_can_have() -> None:
    views, session = Views(Ledger(), Health()), Session(worker_info("w", max_num_seqs=4))
    views.heard("w", session, 0.0)
    for decode, worker in (("gone", "w"), ("w", "gone")):
        views.told(Told("r", worker, (), 3.0, Brought(decode, 1, 1, 1)), 0.0)
    assert views.view().workers[0].load == Load()
    views.told(Told("r", "w", (), 3.0, Brought("w", 10**400, -5, 10**400)), 0.0)
    most = session.info.capacity.max_context_tokens
    assert views.view().workers[0].load == Load(num_waiting=4, claimed_tokens=most)
    views.heard("w", None, 0.0)
    views.heard("w", session, 0.0)
    assert views.view().workers[0].load == Load(), "it began anew"


def test_case_a_decode_worker_is_believed_to_be_loaded_by_its_own_limits() -> None:
    """Eight samples counted as two where the worker that prefills has two rows, and their prompt as its context."""
    views, capacity = Views(Ledger(), Health()), worker_info().capacity
    few, many = (replace(capacity, max_num_seqs=rows, max_context_tokens=100 * rows) for rows in (2, 8))
    for name, its in (("p", few), ("d", many)):
        views.heard(name, Session(replace(worker_info(name), capacity=its)), 0.0)
    views.told(Told("r", "p", (), 3.0, Brought("d", 500, 500, 8)), 0.0)
    assert {worker.worker_id: worker.load for worker in views.view().workers} == {
        "p": Load(num_waiting=1, waiting_prefill_tokens=200),
        "d": Load(num_waiting=8, claimed_tokens=500),
    }


NAMES = st.sampled_from("abc")
DEEDS = st.one_of(
    st.tuples(st.just("hear"), NAMES, st.integers(0, 9)),
    st.tuples(st.just("end"), NAMES, st.just(0)),
    st.tuples(st.just("lose"), NAMES, st.just(0)),
    st.tuples(st.just("place"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("first token"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("grow"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("close"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("fail"), NAMES, st.just(0)),
    st.tuples(st.just("succeed"), NAMES, st.just(0)),
)


@given(st.lists(DEEDS, max_size=40))
def test_a_kept_view_is_the_one_that_would_be_made_anew(deeds: list[tuple[str, str, int]]) -> None:
    ledger, health = Ledger(), Health(max_failures=1)
    views, sessions = Views(ledger, health), dict[str, Session]()
    for deed, name, number in deeds:
        match deed:
            case "hear":
                report = LoadReport(Load(num_running=number), Load(), CostModel(), Role.DECODE, number)
                sessions[name] = Session(worker_info(name), report)
                views.heard(name, sessions[name], 0.0)
            case "end":
                sessions.pop(name, None)
                views.heard(name, None, 0.0)
            case "place":
                ledger.open(str(number), decode=name, prefill="a", num_prompt_tokens=9, prefill_tokens=5, n=1)
            case "first token":
                ledger.first_token(str(number))
            case "grow":
                ledger.grew(str(number), 3)
            case "close":
                ledger.close(str(number))
            case "fail":
                health.failed(name, InternalError("x"), 1.0)
            case "succeed":
                health.succeeded(name)
        made = {
            name: worker_view(session.info, session.report, ledger, health, Costs())
            for name, session in sessions.items()
        }
        assert {view.worker_id: view for view in views.view().workers} == made


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdefgh"),
            loads,
            costs,
            st.sampled_from(Role),
            st.booleans() | st.none(),  # None: an error, for which it is ejected
        )
    )
)
def test_the_pools_of_a_view_that_follows_another_are_those_of_a_fresh_one(
    changes: list[tuple[str, Load, CostModel, Role, bool | None]],
) -> None:
    ledger, health = Ledger(), Health(max_failures=1, eject_seconds=5)
    views, sessions = Views(ledger, health), {name: Session(worker_info(name)) for name in "abcdefgh"}
    for name, session in sessions.items():
        views.heard(name, session, 0.0)
    for number, (name, load, cost, role, draining) in enumerate(changes):
        if draining is None:
            health.failed(name, InternalError("x"), float(number))
        else:
            ledger.open(f"r{number}", decode=name, prefill="a", num_prompt_tokens=9, prefill_tokens=5, n=1)
            sessions[name].report = LoadReport(load, Load(), cost, role, free_blocks=3, draining=draining)
            views.heard(name, sessions[name], float(number))
        view = views.view()
        assert pools(view) == pools(View(view.workers))
        some = view.only(lambda worker: worker.worker_id in "aceg")
        assert pools(some) == pools(View(tuple(worker for worker in view.workers if worker.worker_id in "aceg")))


def pools(view: View) -> list[tuple[object, ...]]:
    """All that placement reads of them; of the workers, which objects they are."""
    return [
        (
            pool.side,
            pool.members.ids,
            pool.members.limits,
            pool.members.ejected_until,
            pool.members.places,
            pool.members.least_limit,
            pool.members.last_ejection,
            [id(worker) for worker in pool.workers],
            [list(column) for column in pool.columns],
        )
        for pool in (view.decodes, view.prefills)
    ]
