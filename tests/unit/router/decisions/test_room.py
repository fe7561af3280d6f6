from math import inf, nan

from hypothesis import given
from hypothesis import strategies as st

from headrace.costmodel import CostModel
from headrace.values import Load, Role
from router.decisions.room import Rooms
from router.decisions.view import View, WorkerView
from tests.null_worker import worker_info

ROLES = st.sampled_from((Role.PREFILL, Role.DECODE, Role.UNIFIED))
SECONDS = st.sampled_from((CostModel().prefill_token_seconds, 0.0, 1e-5, 3e-5, 0.7, inf, nan))


@st.composite
def workers(draw: st.DrawFn) -> WorkerView:
    info = worker_info("w", draw(ROLES), max_num_seqs=draw(st.sampled_from((4, 64))))
    load = Load(draw(st.integers(0, 12)), draw(st.integers(0, 90)), draw(st.integers(0, 50_000)))
    cost = CostModel(prefill_token_seconds=draw(SECONDS.filter(lambda s: s == s and s < inf)))
    view = WorkerView(info, info.role, load, cost, 100, draw(st.booleans()))
    odd = draw(SECONDS)
    if not odd < inf:
        view.queue_seconds = odd  # a worker's fit said so
    return view


@given(st.lists(workers(), max_size=12), st.data())
def test_what_changed_workers_add_up_to_is_what_all_of_them_do(fleet: list[WorkerView], data: st.DataObject) -> None:
    kept = Rooms(2.0)
    for _ in range(6):
        assert kept.of(View(tuple(fleet))) == Rooms(2.0).of(View(tuple(fleet)))
        if fleet and data.draw(st.booleans()):
            fleet[data.draw(st.integers(0, len(fleet) - 1))] = data.draw(workers())
        elif data.draw(st.booleans()):
            fleet.append(data.draw(workers()))
        elif fleet:  # one is gone; or another has come as well, and all the others have another place
            fleet.pop(data.draw(st.integers(0, len(fleet) - 1)))
            fleet += data.draw(st.lists(workers(), max_size=1))
