"""An Executor in memory whose answers show whether KV is right: every token is a hash of the KV that its row can see.

"KV" of a position is one number made of its token and position. The next token hashes all positions of the row as they
stand in the pool, through the block table; one wrong, missing or foreign block changes it. Steps and pulls run on
threads, and can be held and let go.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from itertools import count

import numpy as np

from headrace.errors import LinkClosed, StaleBlocks, WorkerLost
from headrace.values import ParallelLayout, SamplingParams, TokenLogprobs
from workers.kv.layout import ModelShape
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt
from workers.kv.links.choice import AWAIT_STEPS
from workers.ranks.profiles import RankProfile
from workers.scheduling.plan import RowStart, RowWork, StepPlan, StepResult

VOCAB = 997
_numbers = count(1)
_open: dict[str, "MemoryExecutor"] = {}
AWAIT_STEPS.add("memory")


class _Row:
    def __init__(self, start: RowStart) -> None:
        self.sampling: SamplingParams = start.sampling
        self.sample_index = start.sample_index
        self.blocks: list[int] = []
        self.last = start.output_ids[-1] if start.output_ids else 0


class MemoryExecutor:
    """Implements workers.ranks.executor.Executor. `hold_steps` and `hold_pulls` are gates: clear them to make work wait."""

    layout = ParallelLayout()
    shape = ModelShape(num_layers=1, num_kv_heads=1, head_dim=1, num_heads=1)
    block_bytes = 64

    def __init__(self, num_blocks: int = 64, block_size: int = 4) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.failed: Future[Exception] = Future()
        self.asked_to_profile = asyncio.Event()
        self.pool = np.zeros((num_blocks, block_size), dtype=np.int64)
        self.epochs = np.zeros(num_blocks, dtype=np.int64)
        self.endpoints = (f"memory://{next(_numbers)}",)
        self.go_steps = threading.Event()
        self.go_pulls = threading.Event()
        self.go_steps.set()
        self.go_pulls.set()
        self.num_steps = 0
        self.profiling: Future[tuple[RankProfile, ...]] = Future()
        self.num_pulled = 0
        self.asked_ahead = 0
        self.pull_error: Exception | None = None
        self.step_error: Exception | None = None
        self._rows: dict[int, _Row] = {}
        self._stepped = threading.Condition()
        self._num_done = 0
        self._closed = False
        self.peers: dict[tuple[str, int], threading.Event] = {}
        self._stepping = ThreadPoolExecutor(1)
        self._pulling = ThreadPoolExecutor(2)
        _open[self.endpoints[0]] = self

    def step(self, plan: StepPlan) -> Future[StepResult]:
        if self._closed:
            raise WorkerLost("closed")
        return self._stepping.submit(self._step, plan)

    def _step(self, plan: StepPlan) -> StepResult:
        self.go_steps.wait()
        if self._closed:
            raise WorkerLost("closed")
        if self.step_error is not None:
            raise self.step_error
        self.num_steps += 1
        for row in plan.ends:
            del self._rows[row]
        for block, epoch in plan.fresh:
            self.epochs[block] = epoch
        for source, target in plan.copies:
            self.pool[target] = self.pool[source]
        for start in plan.starts:
            assert start.row not in self._rows, "a row is taken twice"
            self._rows[start.row] = _Row(start)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for work in plan.work:
            row = self._rows[work.row]
            self._compute(row, work)
            for sample in range(work.num_samples):
                index = sample if work.num_samples > 1 else row.sample_index
                token = self._draw(row, work.start + work.num_tokens, index)
                tokens.append(token)
                wanted = row.sampling.num_logprobs
                logprobs.append(None if wanted is None else _logprobs(token, wanted))
                if sample == 0:
                    row.last = token
        with self._stepped:
            self._num_done = plan.number
            self._stepped.notify_all()
        asked = any(entry is not None for entry in logprobs)
        return StepResult(plan.number, tuple(tokens), tuple(logprobs) if asked else (), seconds=1e-4)

    def _compute(self, row: _Row, work: RowWork) -> None:
        row.blocks += work.new_blocks
        ids = (row.last,) if work.token_ids is None else work.token_ids
        assert len(ids) == work.num_tokens
        for position, token in enumerate(ids, work.start):
            block, offset = divmod(position, self.block_size)
            self.pool[row.blocks[block], offset] = token * 100_003 + position + 1

    def _draw(self, row: _Row, length: int, index: int) -> int:
        content = self.pool[row.blocks].reshape(-1)[:length]
        seed = b"" if row.sampling.greedy else f"{row.sampling.seed}/{index}".encode()
        return int.from_bytes(blake2b(content.tobytes() + seed, digest_size=4).digest(), "little") % VOCAB

    def pull(self, peer: PeerRanks, blocks: Sequence[BlockPull], after_step: int = 0) -> Future[PullReceipt]:
        cut = self.peers.setdefault(peer.key, threading.Event())
        self.asked_ahead += after_step > 0
        return self._pulling.submit(self._pull, peer, tuple(blocks), cut, after_step)

    def _pull(self, peer: PeerRanks, blocks: Sequence[BlockPull], cut: threading.Event, after_step: int) -> PullReceipt:
        while not self.go_pulls.wait(0.005):
            if cut.is_set() or self._closed:
                raise LinkClosed(f"the link to {peer.worker_id} was closed")
        if self.pull_error is not None:
            raise self.pull_error
        source = _open.get(peer.endpoints[0])
        if source is None or cut.is_set():
            raise LinkClosed(f"{peer.worker_id} is gone")
        source.await_step(after_step, lambda: cut.is_set() or self._closed)
        content = source.pool[[pull.source for pull in blocks]].copy()
        if any(source.epochs[pull.source] != pull.epoch for pull in blocks):
            raise StaleBlocks(f"blocks of {peer.worker_id} changed hands")
        self.pool[[pull.target for pull in blocks]] = content
        self.num_pulled += len(blocks)
        return PullReceipt(len(blocks), len(blocks) * self.block_bytes, 1e-4)

    def await_step(self, step: int, given_up: Callable[[], bool]) -> None:
        with self._stepped:
            while not self._stepped.wait_for(lambda: self._num_done >= step, 0.005):
                if given_up() or self._closed:
                    raise LinkClosed(f"plan {step} was never done")

    def close_links(self, peer: tuple[str, int]) -> None:
        if (cut := self.peers.pop(peer, None)) is not None:
            cut.set()

    def profile(self, num_steps: int) -> Future[tuple[RankProfile, ...]]:
        """Ends when it is told to."""
        self.profiling = Future()
        self.asked_to_profile.set()
        return self.profiling

    def end_profile(self) -> None:
        if not self.profiling.done():
            self.profiling.set_result((RankProfile(0, (), b""),))

    def digests(self, blocks: Sequence[tuple[int, int]]) -> Future[tuple[bytes, ...]]:
        def digest() -> tuple[bytes, ...]:
            parts = (self.pool[block, :filled].tobytes() for block, filled in blocks)
            return tuple(blake2b(part, digest_size=8).digest() for part in parts)

        return self._stepping.submit(digest)

    def die(self, reason: str) -> None:
        """A rank is lost."""
        _open.pop(self.endpoints[0], None)
        if not self.failed.done():
            self.failed.set_result(WorkerLost(reason))

    def close(self) -> None:
        _open.pop(self.endpoints[0], None)
        self._closed = True
        self.go_steps.set()
        self._stepping.shutdown()
        self._pulling.shutdown()


def _logprobs(token: int, wanted: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, tuple(((token + i) % VOCAB, -0.5 - i) for i in range(wanted)))
