from dataclasses import replace

from headrace.blocks import BlockHasher, BlockId, probe
from headrace.keys import Digest, Event, EventBatch, EventKind, Snapshot, Tier, low_halves
from headrace.values import Load, Role
from router.decisions.caches import EXPECT_SECONDS, SETTLE_SECONDS, Caches, Prediction
from router.decisions.chain import SLICE_BLOCKS, Chain, keys_of
from router.decisions.index import Index
from router.decisions.placement import Ask, Placed, place
from router.decisions.told import Brought, Told
from router.decisions.truth import Fallback
from router.decisions.view import View, WorkerView
from tests.null_worker import worker_info

TOKENS = range(400)


def worker(name: str, role: Role = Role.UNIFIED, **fields: int) -> WorkerView:
    info = worker_info(name, role, block_size=fields.pop("block_size", 4), **fields)
    return WorkerView(info, role, Load(), info.cost, info.capacity.num_blocks)


def ids(view: WorkerView) -> list[BlockId]:
    return list(view.hash_class.hasher().chain(TOKENS))


def batch(sequence: int, *events: Event, held: list[BlockId]) -> EventBatch:
    digest = Digest()
    digest.add(low_halves(b"".join(held)), Tier.DEVICE)
    return EventBatch(1, sequence, digest.count, digest.xor, events)


def followed(*workers: WorkerView, hold: list[BlockId] | None = None) -> Index:
    index = Index()
    for view in workers:
        stored = (Event.of(EventKind.STORED, hold),) if hold else ()
        index.load(view.worker_id, Snapshot(1, 0, stored))
    return index


def put(caches: Caches, view: View, request_id: str = "r", now: float = 0.0, to: str | None = None) -> Prediction:
    prediction = caches.predict(TOKENS, "", view, now)
    ask = Ask(len(TOKENS), 8, cached_tokens=prediction.cached_tokens, decode=to)
    placed = place(ask, view, now)
    assert isinstance(placed, Placed)
    caches.placed(request_id, prediction, placed, now)
    return prediction


def first_token(caches: Caches, view: View, now: float, request_id: str = "r") -> None:
    """Of a request that put() placed on the view's workers."""
    placed = place(Ask(len(TOKENS), 8), view, now)
    assert isinstance(placed, Placed)
    caches.computed(request_id, caches.predict(TOKENS, "", view, now), placed, now)


def test_an_equal_prompt_finds_the_first_ones_workers_before_their_events_come() -> None:
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE)
    view, caches = View((p, d)), Caches(followed(p, d))
    assert put(caches, view).cached_tokens == {}
    assert caches.predict(TOKENS, "", view, 0.0).cached_tokens == {"p": 400}
    assert caches.predict(range(80), "", view, 0.0).cached_tokens == {"p": 80}
    assert caches.predict(TOKENS, "another salt", view, 0.0).cached_tokens == {}
    assert caches.predict(range(1, 300), "", view, 0.0).cached_tokens == {}


def test_what_another_router_placed_is_found_there_until_its_time_is_over() -> None:
    """Two copies, cold: the second one's equal prompt goes where the first one's went."""
    workers = tuple(worker(name, Role.PREFILL) for name in "pq")
    view = View((*workers, worker("d", Role.DECODE)))
    told: list[Told] = []
    one, other = Caches(followed(*view.workers), told.append), Caches(followed(*view.workers))
    put(one, view)
    (placement,) = told
    other.told(placement, workers[0].info, 10.0)
    assert other.predict(TOKENS, "", view, 10.0).cached_tokens == {placement.worker_id: 400}
    assert other.predict(TOKENS, "", view, 10.0).promised == {}
    assert other.predict(TOKENS, "", view, 10.0 + placement.seconds).cached_tokens == {}


def test_the_load_of_a_placement_is_told_and_not_again_of_a_decode_worker_that_owns_the_request() -> None:
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE)
    view, told = View((p, d)), list[Told]()
    caches = Caches(followed(p, d, hold=ids(p)[:60]), told.append)
    put(caches, view)
    put(caches, view, to="d")
    assert [one.load for one in told] == [Brought("d", 400, 160, 1), Brought("d", 0, 1, 0)]


def test_a_decode_worker_holds_a_prompt_no_sooner_than_it_came_there() -> None:
    """Until then it can neither offer it nor go on from it alone: who was placed by that computed everything again."""
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE)
    view, caches = View((p, d)), Caches(followed(p, d))
    put(caches, view)
    assert "d" not in caches.predict(TOKENS, "", view, 0.9).cached_tokens
    first_token(caches, view, 1.0)
    assert caches.predict(TOKENS, "", view, 1.0).cached_tokens == {"p": 400, "d": 400}
    assert caches.predict(TOKENS, "", view, 1.0 + SETTLE_SECONDS).cached_tokens == {}


def test_what_is_to_come_goes_on_from_what_is_held_and_promises_nothing() -> None:
    u = worker("u")
    caches, view = Caches(followed(u, hold=ids(u)[:50])), View((u,))
    assert put(caches, view).cached_tokens == {"u": 200}
    prediction = caches.predict(TOKENS, "", view, 0.0)
    assert (prediction.cached_tokens, prediction.promised) == ({"u": 400}, {"u": 50})


def test_a_confirmed_block_is_the_mirrors_alone() -> None:
    u = worker("u")
    index, chain = followed(u), ids(u)
    caches, view = Caches(index), View((u,))
    put(caches, view)
    index.apply("u", batch(1, Event.of(EventKind.STORED, chain), held=chain))
    index.apply("u", batch(2, Event.of(EventKind.REMOVED, chain[60:]), held=chain[:60]))
    assert caches.predict(TOKENS, "", view, 0.0).cached_tokens == {"u": 240}


def test_a_request_that_ends_before_its_first_token_brings_nothing_and_one_that_ends_after_it_does() -> None:
    u = worker("u")
    caches, view = Caches(followed(u)), View((u,))
    put(caches, view)
    caches.ended("r")
    assert caches.predict(TOKENS, "", view, 0.0).cached_tokens == {}
    put(caches, view)
    first_token(caches, view, 1.0)
    assert caches.predict(TOKENS, "", view, 1.0 + SETTLE_SECONDS / 2).cached_tokens == {"u": 400}
    assert caches.predict(TOKENS, "", view, 1.0 + SETTLE_SECONDS).cached_tokens == {}


def test_what_never_comes_is_believed_for_a_time_only() -> None:
    u = worker("u")
    caches, view = Caches(followed(u)), View((u,))
    put(caches, view)
    assert caches.predict(TOKENS, "", view, EXPECT_SECONDS).cached_tokens == {"u": 400}
    assert caches.predict(TOKENS, "", view, 10 * EXPECT_SECONDS).cached_tokens == {}


def test_a_request_placed_again_leaves_its_first_worker() -> None:
    a, b = worker("a"), worker("b")
    caches, view = Caches(followed(a, b)), View((a, b))
    put(caches, view, to="a")
    put(caches, view, to="b")
    assert caches.predict(TOKENS, "", view, 0.0).cached_tokens == {"b": 400}


def test_case_30_a_reset_and_a_new_generation_end_what_was_to_come() -> None:
    for change in ("reset", "generation", "gone"):
        u = worker("u")
        index = followed(u)
        caches, view = Caches(index), View((u,))
        put(caches, view)
        if change == "reset":
            index.apply("u", batch(1, Event(EventKind.CLEARED), held=[]))
        elif change == "generation":
            index.expect("u", 2)
        else:
            index.drop("u")
        assert caches.predict(TOKENS, "", view, 0.0).cached_tokens == {}


def test_each_hash_class_is_hashed_by_itself() -> None:
    small, large, other = worker("small"), worker("large", block_size=32), worker("other", revision="r2")  # type: ignore[arg-type]
    index = Index()
    for view in (small, large, other):
        index.load(view.worker_id, Snapshot(1, 0, (Event.of(EventKind.STORED, ids(view)[:3]),)))
    found = Caches(index).predict(TOKENS, "", View((small, large, other)), 0.0)
    assert found.cached_tokens == {"small": 12, "large": 96, "other": 12}


def test_a_lying_worker_is_routed_by_load_alone_until_its_promises_come_true_again() -> None:
    liar, honest = worker("liar"), worker("honest")
    caches, view = Caches(followed(liar, honest, hold=ids(liar))), View((liar, honest))
    prediction = caches.predict(TOKENS, "", view, 0.0)
    assert prediction.fallbacks == ()
    for _ in range(5):
        assert caches.found(honest, prediction, 396, 0.0) == 0.0
        error = caches.found(liar, prediction, 0, 0.0)
    assert error > 0.9
    doubted = caches.predict(TOKENS, "", view, 0.0)
    assert (doubted.cached_tokens, doubted.fallbacks) == ({"honest": 400}, (Fallback.DISTRUSTED,))
    for _ in range(20):
        caches.found(liar, doubted, 396, 0.0)
    assert caches.predict(TOKENS, "", view, 0.0).cached_tokens == {"honest": 400, "liar": 400}


def test_case_31_a_worker_whose_ids_are_not_this_routers_is_routed_by_load_alone() -> None:
    odd, even = worker("odd"), worker("even")
    caches, view = Caches(followed(odd, even, hold=ids(odd))), View((odd, even))
    assert caches.met(even.info)
    for wrong in (b"", probe(BlockHasher(revision="r1", kv_format=odd.info.compatibility.kv_format, block_size=8))):
        assert not caches.met(replace(odd.info, probe=wrong))
        prediction = caches.predict(TOKENS, "", view, 0.0)
        assert (prediction.cached_tokens, prediction.fallbacks) == ({"even": 400}, (Fallback.UNPROVEN,))
    assert caches.met(replace(odd.info, generation=2))
    assert caches.predict(TOKENS, "", view, 0.0).cached_tokens == {"odd": 400, "even": 400}


def test_what_was_only_expected_is_no_promise() -> None:
    u = worker("u")
    caches, view = Caches(followed(u)), View((u,))
    put(caches, view)
    for _ in range(5):
        assert caches.found(u, caches.predict(TOKENS, "", view, 0.0), 0, 0.0) == 0.0


def test_a_worker_that_is_not_followed_is_a_fallback_with_a_name() -> None:
    a, b = worker("a"), worker("b")
    assert Caches(followed(a)).predict(TOKENS, "", View((a, b)), 0.0).fallbacks == (Fallback.UNFOLLOWED,)


def test_a_chain_is_hashed_no_further_than_it_is_read_and_once() -> None:
    class Counted(BlockHasher):
        num_hashed = 0

        def child(self, parent: BlockId, packed_tokens: bytes) -> BlockId:
            self.num_hashed += 1
            return super().child(parent, packed_tokens)

    hasher = Counted(revision="r", kv_format="f", block_size=4)
    chain = Chain(hasher.chain(TOKENS))
    assert chain.reaches(0)
    assert hasher.num_hashed == len(chain.keys) == SLICE_BLOCKS
    assert not chain.reaches(100)
    assert chain.after(98) == keys_of(low_halves(b"".join(hasher.chain(TOKENS))))[98:]
    assert hasher.num_hashed == 200
