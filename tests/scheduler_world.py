"""Two schedulers that hand requests over to each other, and everything that can happen to them, without time or I/O.

Driven by a seeded random source: the same seed gives the same life. The world plays the engines' part of a hand-off:
claims, tickets, reads that take a while, releases, failures, cancels, deadlines.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from headrace.errors import InvalidRequest, Overloaded
from headrace.values import FinishReason, Request, RequestKey, SamplingParams, SequenceOutput
from tests.plan_checker import CheckedWorker, FakeModel
from workers.scheduling.blocks import Holding
from workers.scheduling.scheduler import ChunkDone, FirstToken, StepEvents

Block = tuple[int, int]


@dataclass
class Read:
    """A read of announced blocks that is under way: it writes its targets when it ends, whoever still wants them."""

    key: RequestKey
    pairs: list[tuple[Block, Block]]
    hold: Holding


@dataclass
class HandOff:
    request: Request
    key: RequestKey
    claimed: bool = False
    announced: deque[Block] = field(default_factory=deque)
    num_reading: int = 0
    last: ChunkDone | None = None


class World:
    """`prefill` computes tickets and some prompts of its own; `decode` takes hand-offs and some prompts of its own.

    `pressed`: pools shrink and grow, and whoever has come so far is preempted, on top of what happens anyway. `stopping`:
    samples are stopped in the middle, as by a stop string that their reader met."""

    def __init__(
        self,
        seed: int,
        *,
        overlap: bool,
        calm: bool = False,
        pressed: bool = False,
        stopping: bool = False,
        num_micro_batches: int = 1,
    ) -> None:
        self.random = random = Random(seed)
        self.calm = calm
        self.pressed = pressed
        self.num_micro_batches = num_micro_batches
        self.stopping = stopping
        self.stopped: set[tuple[RequestKey, int]] = set()
        self.now = 0.0
        self.model = FakeModel()
        self.prefill = self._worker(overlap)
        self.decode = self._worker(overlap)
        self.local: dict[RequestKey, tuple[CheckedWorker, Request]] = {}
        self.handoffs: dict[str, HandOff] = {}
        self.reads: list[Read] = []
        self.cancelled: set[str] = set()
        self.answered: list[tuple[CheckedWorker, Request, RequestKey]] = []
        self.num_made = 0
        self.prompts = [[random.randrange(1, 32) for _ in range(40)] for _ in range(3)]

    def _worker(self, overlap: bool) -> CheckedWorker:
        random = self.random
        return CheckedWorker(
            self.model,
            num_blocks=random.choice([14, 20, 40]),
            block_size=4,
            max_num_seqs=random.choice([2, 3, 6]),
            max_step_tokens=random.choice([3, 8, 24]),
            max_waiting=12,
            pin_seconds=30.0 if self.calm else 5.0,
            max_pinned_fraction=random.choice([0.3, 0.6, 1.0]),
            max_peer_pinned_fraction=random.choice([0.2, 1.0]),
            max_bypass=random.choice([1, 4]),
            num_micro_batches=self.num_micro_batches,
            overlap=overlap,
        )

    def live(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self._happen()
            self._turn()

    def settle(self, max_turns: int = 4000) -> None:
        """Lets everything that is here come to its end, with nothing more happening to it."""
        self.calm = True
        for worker in (self.prefill, self.decode):
            worker.ledger.resize(worker.ledger.size)
        for _ in range(max_turns):
            if self._is_idle():
                return
            self._turn()
        raise AssertionError(f"no end: {self.local or self.handoffs}, {self.prefill.scheduler.load()}")

    def check(self) -> None:
        for worker, request, key in self.answered:
            for index in range(request.n):
                tokens, finish = self.model.answer(request, index)
                if (key, index) in self.stopped:
                    tokens, finish = tokens[: len(worker.tokens(key, index))], FinishReason.STOP
                assert (worker.tokens(key, index), worker.finish(key, index)) == (tokens, finish), (key, index)
        for worker in (self.prefill, self.decode):
            worker.check_empty()
            assert worker.scheduler.load().num_running == 0

    def _is_idle(self) -> bool:
        flights = self.prefill.flights or self.decode.flights
        return not (self.local or self.handoffs or self.reads or flights)

    # -- what happens

    def _happen(self) -> None:
        random = self.random
        match random.randrange(12):
            case 0 | 1:
                self._submit(random.choice([self.prefill, self.decode]))
            case 2 | 3 | 4:
                self._expect()
            case 5 if not self.calm:
                self._cancel()
            case 6 if not self.calm:
                self._fail()
            case 7 if not self.calm:
                self.now += random.random() * 3
                self._expire()
            case 8 if not self.calm and random.random() < 0.2:
                random.choice([self.prefill, self.decode]).scheduler.reset_cache()
            case 9 if self.pressed:
                random.choice([self.prefill, self.decode]).scheduler.preempt_at(random.randrange(40))
            case 10 if self.pressed:
                worker = random.choice([self.prefill, self.decode])
                worker.ledger.resize(random.choice([3, 10, worker.ledger.size]))
            case 11 if self.stopping:
                self._stop_sample()
            case _:
                pass

    def _stop_sample(self) -> None:
        begun = [
            (worker, key, index)
            for key, (worker, request) in self.local.items()
            for index in range(request.n)
            if worker.tokens(key, index) and worker.finish(key, index) is None
        ]
        if begun:
            worker, key, index = self.random.choice(begun)
            output = worker.scheduler.stop_sample(key, index, self.now)
            assert output is not None
            assert worker.scheduler.stop_sample(key, index, self.now) is None
            worker.collect([output])
            self.stopped.add((key, index))
            self._maybe_over(worker, key)

    def _request(self) -> Request:
        random = self.random
        self.num_made += 1
        prompt = random.choice(self.prompts)[: random.randint(1, 30)]
        prompt += [random.randrange(32) for _ in range(random.choice([0, 0, 3]))]
        max_tokens = random.choice([1, 2, 5, 20])
        return Request(
            RequestKey(f"r{self.num_made}"),
            tuple(prompt),
            SamplingParams(
                max_tokens=max_tokens,
                seed=random.randrange(3),
                min_tokens=random.choice([0, 0, min(3, max_tokens)]),
                ignore_eos=random.random() < 0.2,
                stop_token_ids=random.choice([(), (5, 9)]),
                num_logprobs=random.choice([None, None, 2]),
            ),
            n=random.choice([1, 1, 1, 2]),
            priority=random.choice([0, 0, 1]),
            seconds_left=None if self.calm else random.choice([None, 4.0, 40.0]),
            cache_salt=random.choice(["", "", "salt"]),
        )

    def _submit(self, worker: CheckedWorker) -> None:
        request = self._request()
        try:
            worker.scheduler.submit(request, self.now)
        except (Overloaded, InvalidRequest):
            return
        self.local[request.key] = (worker, request)

    def _expect(self) -> None:
        request = self._request()
        try:
            self.decode.scheduler.expect(request, self.now)
        except (Overloaded, InvalidRequest):
            return
        self.handoffs[request.key.request_id] = HandOff(request, request.key)

    def _cancel(self) -> None:
        names = sorted(self.handoffs) + sorted(key.request_id for key in self.local)
        if not names:
            return
        name = self.random.choice(names)
        self.cancelled.add(name)
        if handoff := self.handoffs.pop(name, None):
            assert self.decode.scheduler.cancel(handoff.key, self.now)
            self.prefill.scheduler.release(handoff.key, self.now)
            assert not self.decode.scheduler.cancel(handoff.key, self.now)
        else:
            key = next(key for key in self.local if key.request_id == name)
            worker, _ = self.local.pop(key)
            assert worker.scheduler.cancel(key, self.now)

    def _fail(self) -> None:
        if self.handoffs:
            self._again(self.handoffs[self.random.choice(sorted(self.handoffs))])

    def _again(self, handoff: HandOff) -> None:
        """The hand-off failed: another attempt, or alone."""
        self.prefill.scheduler.release(handoff.key, self.now)
        old, handoff.key = handoff.key, handoff.key.next_attempt()
        if self.random.random() < 0.5:
            self.decode.scheduler.incoming.restart(old, handoff.key, self.now)
            self.handoffs[old.request_id] = HandOff(handoff.request, handoff.key)
        else:
            self.decode.scheduler.incoming.fall_back(old, handoff.key, self.now)
            del self.handoffs[old.request_id]
            self.local[handoff.key] = (self.decode, handoff.request)

    def _expire(self) -> None:
        for worker in (self.prefill, self.decode):
            late, unpinned = worker.scheduler.expire(self.now)
            for key in late + unpinned:
                handoff = self.handoffs.get(key.request_id)
                if key in self.local and self.local[key][0] is worker:
                    del self.local[key]
                elif handoff is not None and handoff.key == key:
                    if worker is self.decode:
                        del self.handoffs[key.request_id]
                        self.prefill.scheduler.release(key, self.now)
                    else:
                        self._again(handoff)

    # -- the engines' part

    def _turn(self) -> None:
        for worker in (self.prefill, self.decode):
            events = worker.turn(self.now)
            events.chunks[:0] = worker.ahead
            worker.ahead.clear()
            self._note(worker, events)
        for handoff in list(self.handoffs.values()):
            self._drive(handoff)
        for read in list(self.reads):
            if self.random.random() < 0.5:
                self._end_read(read)

    def _note(self, worker: CheckedWorker, events: StepEvents) -> None:
        for chunk in events.chunks:
            handoff = self.handoffs.get(chunk.key.request_id)
            if handoff is not None and handoff.key == chunk.key:
                handoff.announced.extend(chunk.blocks)
                if chunk.last:
                    handoff.last = chunk
        for key in {output.key for output in events.outputs}:
            self._maybe_over(worker, key)

    def _maybe_over(self, worker: CheckedWorker, key: RequestKey) -> None:
        if key in self.local:
            request = self.local[key][1]
            if all(worker.finish(key, index) for index in range(request.n)):
                del self.local[key]
                self.answered.append((worker, request, key))

    def _drive(self, handoff: HandOff) -> None:
        scheduler = self.decode.scheduler
        if not handoff.claimed:
            if scheduler.incoming.may_claim(handoff.key):
                outlook = scheduler.incoming.claim(handoff.key)
                ticket = Request(
                    handoff.key,
                    handoff.request.prompt_token_ids,
                    handoff.request.sampling,
                    handoff.request.n,
                    cache_salt=handoff.request.cache_salt,
                )
                handoff.claimed = True
                try:
                    ahead = self.random.random() < 0.5
                    self.prefill.scheduler.ticket(ticket, outlook.held_blocks, self.now, "decode", ahead=ahead)
                except (Overloaded, InvalidRequest):
                    self._again(handoff)
            return
        if handoff.last and (outputs := self._finish_early(handoff)):
            self._arrived(handoff, outputs=outputs)
            return
        if handoff.announced and handoff.num_reading == 0:
            theirs = [handoff.announced.popleft() for _ in range(self.random.randint(1, len(handoff.announced)))]
            ours = scheduler.incoming.allocate(handoff.key, len(theirs))
            if ours is None:
                handoff.announced.extendleft(reversed(theirs))
            else:
                handoff.num_reading += 1
                self.reads.append(
                    Read(handoff.key, list(zip(theirs, ours, strict=True)), scheduler.incoming.begin_pull(ours))
                )
        elif handoff.last and not handoff.announced and handoff.num_reading == 0:
            last = handoff.last
            self.prefill.scheduler.release(handoff.key, self.now)
            self._arrived(
                handoff,
                outputs=scheduler.incoming.arrive(handoff.key, last.first_tokens, last.cached_tokens, self.now),
            )

    def _finish_early(self, handoff: HandOff) -> list[SequenceOutput] | None:
        assert handoff.last is not None
        firsts: tuple[FirstToken, ...] = handoff.last.first_tokens
        outputs = self.decode.scheduler.incoming.finish_early(handoff.key, firsts, handoff.last.cached_tokens, self.now)
        if outputs is not None:
            self.prefill.scheduler.release(handoff.key, self.now)
        return outputs

    def _arrived(self, handoff: HandOff, outputs: list[SequenceOutput]) -> None:
        self.decode.collect(outputs)
        del self.handoffs[handoff.key.request_id]
        self.local[handoff.key] = (self.decode, handoff.request)
        self._maybe_over(self.decode, handoff.key)

    def _end_read(self, read: Read) -> None:
        self.reads.remove(read)
        valid = self.decode.checker.pull(self.prefill.checker, read.pairs)
        self.decode.scheduler.incoming.end_pull(read.hold)
        handoff = self.handoffs.get(read.key.request_id)
        if handoff is None or handoff.key != read.key:
            return
        handoff.num_reading -= 1
        if valid:
            self.decode.scheduler.incoming.landed(read.key, len(read.pairs))
        else:
            self._again(handoff)
