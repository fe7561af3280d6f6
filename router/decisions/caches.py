"""What this router believes of the workers' caches: the mirror, what its own placements will add, and how far the mirror
is to be believed. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.blocks import probe
from headrace.values import WorkerInfo
from router.decisions.chain import Chain
from router.decisions.index import Index
from router.decisions.placement import Placed
from router.decisions.told import Brought, Told
from router.decisions.truth import Fallback, Truth
from router.decisions.view import HashClass, View, WorkerView, class_of

EXPECT_SECONDS = 10.0
SETTLE_SECONDS = 2.0


@dataclass(slots=True)
class Prediction:
    """What of one prompt each worker holds. `cached_tokens` is what placement may count on; `promised`, in blocks, is
    what the mirror alone says of all workers, those too that are not believed."""

    cached_tokens: dict[str, int]
    promised: dict[str, int]
    chains: dict[HashClass, Chain]
    fallbacks: tuple[Fallback, ...] = ()


class Caches:
    """Owns the truth records and, through the index, the overlay; owned by router.requests. `tell` hears of each placement
    of this router's."""

    def __init__(self, index: Index, tell: Callable[[Told], None] = lambda told: None) -> None:
        self._index = index
        self._tell = tell
        self._truth = Truth()
        self._unproven: set[str] = set()
        self._failed: set[str] = set()  # their self-check

    def predict(
        self,
        token_ids: Sequence[int],
        cache_salt: str,
        view: View,
        now: float,
        hashed: Mapping[HashClass, Chain] | None = None,
    ) -> Prediction:
        """Ids are hashed once for every hash class there is; `hashed` are the same prompt's chains from before."""
        hashed = hashed or {}
        chains = {
            hash_class: hashed.get(hash_class) or Chain(hash_class.hasher(cache_salt).chain(token_ids))
            for hash_class in {worker.hash_class for worker in view.workers}
        }
        return self.predict_from(chains, view, now)

    def predict_from(self, chains: dict[HashClass, Chain], view: View, now: float) -> Prediction:
        self._index.overlay.expire(now)
        prediction = Prediction({}, {}, chains)
        for hash_class, chain in chains.items():
            match = self._index.match(chain)
            credited = match.credited_tokens(hash_class.block_size)
            if len(chains) == 1:  # as most often
                prediction.cached_tokens, prediction.promised = credited, match.promised
            else:
                prediction.cached_tokens.update(credited)
                prediction.promised = prediction.promised | match.promised
        prediction.fallbacks = tuple(self._fall_back(prediction, view, now))
        return prediction

    def _fall_back(self, prediction: Prediction, view: View, now: float) -> Iterator[Fallback]:
        if self._index.num_followed < len(view.workers):
            yield Fallback.UNFOLLOWED
        for reason, workers in (
            (Fallback.DISTRUSTED, self._truth.distrusted(now)),
            (Fallback.UNPROVEN, self._unproven),
            (Fallback.SELF_CHECK, self._failed),
        ):
            for worker in workers:
                if prediction.cached_tokens.pop(worker, None) is not None:
                    yield reason

    def placed(self, request_id: str, prediction: Prediction, placed: Placed, now: float) -> None:
        """Whoever prefills will hold the prompt by the time that what is placed there later runs; the request's earlier
        workers will not. A decode worker that prefills nothing holds it only once it came: see computed()."""
        self.ended(request_id)
        chosen = placed.decided.chosen
        ttft = chosen.ttft_seconds if chosen is not None else 0.0
        worker = placed.prefill or placed.decode
        keys = self._expect(request_id, prediction, worker, now + EXPECT_SECONDS + 2 * ttft)
        ask = placed.decided.ask
        joins = ask.decode is None  # it is not there already
        load = Brought(
            placed.decode.worker_id, ask.num_prompt_tokens if joins else 0, placed.prefill_tokens, ask.n if joins else 0
        )
        self._tell(Told(request_id, worker.worker_id, keys, SETTLE_SECONDS + 2 * ttft, load))

    def _expect(self, request_id: str, prediction: Prediction, worker: WorkerView, expires: float) -> Sequence[int]:
        chain = prediction.chains.get(worker.hash_class)
        if chain is None:
            return ()
        keys = chain.after(prediction.promised.get(worker.worker_id, 0))
        self._index.overlay.expect(request_id, worker.worker_id, keys, worker.info.capacity.num_blocks, expires)
        return keys

    def told(self, told: Told, info: WorkerInfo, now: float) -> None:
        """Another router placed a prompt on this worker. How that ends it does not say, so it is believed for a shorter
        time."""
        capacity = info.capacity.num_blocks
        self._index.overlay.expect(told.name, told.worker_id, told.keys, capacity, now + told.seconds)

    def computed(self, request_id: str, prediction: Prediction, placed: Placed, now: float) -> None:
        """The request's first token came: its decode worker holds the prompt too, and its blocks' events are due soon,
        whatever becomes of it."""
        self._index.overlay.settle(request_id, now + SETTLE_SECONDS)
        if placed.prefill is not None:
            self._expect(request_id, prediction, placed.decode, now + SETTLE_SECONDS)

    def ended(self, request_id: str) -> None:
        """The request ended, or left its workers, before its first token."""
        self._index.overlay.withdraw(request_id)

    def found(self, worker: WorkerView, prediction: Prediction, cached_tokens: int, now: float) -> float:
        """What the worker that prefilled had in fact; returns the error of its part of the index."""
        block_size = worker.hash_class.block_size
        promised = prediction.promised.get(worker.worker_id, 0) * block_size
        self._truth.found(worker.worker_id, promised, cached_tokens, block_size, now)
        return self._truth.error(worker.worker_id)

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._truth.forget(worker_id)
        self._unproven.discard(worker_id)
        self._failed.discard(worker_id)

    def checked(self, worker_id: str, *, passed: bool) -> None:
        """A self-check of the worker ended: one that failed is placed by load alone until one passes."""
        (self._failed.discard if passed else self._failed.add)(worker_id)

    def met(self, info: WorkerInfo) -> bool:
        """A new generation of the worker begins, without a record. Whether its ids are proven to be this router's: where
        they are not, its part of the index means nothing here, and it is placed by load alone."""
        self._truth.forget(info.worker_id)
        self._failed.discard(info.worker_id)
        proven = info.probe == probe(class_of(info.compatibility).hasher())
        (self._unproven.discard if proven else self._unproven.add)(info.worker_id)
        return proven
