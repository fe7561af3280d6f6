"""Random views and asks, as hypothesis draws them: sound ones, and what a router may see when things go wrong."""

from hypothesis import strategies as st

from headrace.costmodel import CostModel
from headrace.values import Load, RequestKey, Role
from router.decisions.placement import Ask, place
from router.decisions.record import Decision
from router.decisions.view import View, WorkerView
from tests.null_worker import worker_info

NAMES = [f"w{number}" for number in range(6)]
seconds = st.floats(min_value=1e-9, max_value=10.0)
counts = st.integers(0, 200)

costs = st.builds(
    CostModel,
    prefill_base_seconds=seconds,
    prefill_token_seconds=seconds,
    prefill_token_context_seconds=st.floats(0.0, 1e-6),
    decode_base_seconds=seconds,
    decode_sequence_seconds=seconds,
    decode_context_token_seconds=st.floats(0.0, 1e-6),
    transfer_base_seconds=seconds,
    transfer_bytes_per_second=st.floats(1e3, 1e12),
)
loads = st.builds(
    Load,
    num_waiting=counts,
    num_running=counts,
    waiting_prefill_tokens=st.integers(0, 100_000),
    context_tokens=st.integers(0, 1_000_000),
    used_blocks=counts,
    pinned_blocks=counts,
    claimed_tokens=st.integers(0, 1_000_000),
)


@st.composite
def worker_views(draw: st.DrawFn, name: str) -> WorkerView:
    role = draw(st.sampled_from(Role))
    info = worker_info(
        name,
        role,
        block_size=draw(st.sampled_from([16, 32])),
        revision=draw(st.sampled_from(["r1", "r2"])),
        cost=draw(costs),
    )
    ejected_until = draw(st.sampled_from([0.0, 5.0, float("inf")]))
    return WorkerView(
        info,
        role,
        draw(loads),
        draw(costs),
        draw(st.integers(0, 5000)),
        draw(st.booleans()),
        ejected_until,
        draw(st.none() | st.dictionaries(st.sampled_from(NAMES), seconds, min_size=1)),
    )


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    view = View(tuple(draw(worker_views(name)) for name in names))
    ask = Ask(
        num_prompt_tokens=draw(st.integers(1, 70_000)),
        max_tokens=draw(st.integers(1, 4096)),
        n=draw(st.integers(1, 4)),
        cached_tokens=draw(st.none() | st.dictionaries(st.sampled_from(NAMES), st.integers(0, 70_000))),
        local_prefill_max_tokens=draw(st.integers(0, 512)),
        decode=draw(st.none() | st.sampled_from(NAMES)),
        excluded=draw(st.frozensets(st.sampled_from(NAMES))),
        tie=draw(st.floats(0.0, 1.0, exclude_max=True)),
    )
    now = draw(st.floats(0.0, 1e6))
    key = RequestKey("router:1", draw(st.integers(1, 10)))
    return Decision.of(draw(st.text()), key, view, now, place(ask, view, now))
