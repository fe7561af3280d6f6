"""One request on its way through the router: what became of it so far, and what its client gets. Pure."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Protocol

from headrace.errors import DeadlineExceeded, HeadraceError, InternalError
from headrace.metrics import Stage
from headrace.values import FinishReason, Request, RequestKey, SequenceOutput, Timeline, Usage
from router.decisions.admission import Entrant
from router.decisions.caches import Prediction
from router.decisions.placement import Ask, Decided, Placed
from router.decisions.retry import Progress
from router.explanations import Explanation, Failure, Recent, explained, reasons_of
from router.jobs import Job, Piece
from router.stages import Marks, RequestTimeline, ttft_stages

STATES = ("queued", "prefill", "decode")
# What nobody would call late where there are no targets.
PATIENT_TTFT_SECONDS, PATIENT_TPOT_SECONDS = 10.0, 1.0
_REFUSALS = frozenset({"Overloaded", "Draining", "NoWorkers", "InvalidRequest", "ContextLengthExceeded"})


class Delta(Protocol):
    """`num_consumed` tokens were used: fewer than pushed only when `stopped`, by a stop string."""

    @property
    def text(self) -> str: ...
    @property
    def num_consumed(self) -> int: ...
    @property
    def stopped(self) -> bool: ...


class TextStream(Protocol):
    """The text of one sample: whole characters, and nothing that may still become a stop string."""

    def push(self, token_ids: Sequence[int], /) -> Delta: ...
    def flush(self) -> Delta: ...


class _Sample:
    """One of a request's n answers. `num_tokens` are the client's, `num_generated` the worker's: a stop string ends the
    first before the second."""

    __slots__ = ("finish", "num_generated", "num_tokens", "text")

    def __init__(self, text: TextStream) -> None:
        self.text = text
        self.num_tokens = 0
        self.num_generated = 0
        self.finish: str | None = None


class Flight:
    """Mutable; owned by the `Requests.stream` that carries it. `stopped`: samples that ended by a stop string, while others
    go on and the worker knows nothing of it yet. `revision` whose workers run it ("" while there is no canary), in the time
    of canary number `canary`; `beside`: it is that canary. `given_up_by` the one whose worker gave it up before."""

    def __init__(self, job: Job, key: RequestKey, open_text: Callable[[], TextStream], now: float) -> None:
        self.job = job
        self.key = key
        self.marks = Marks(now if job.arrived_at is None else job.arrived_at, now)
        self.deadline = now
        self.entrant = Entrant(
            key.request_id,
            len(job.prompt_token_ids),
            job.sampling.max_tokens,
            job.n,
            job.tenant,
            job.priority,
            job.targets,
        )
        self.queue_seconds = 0.0
        self.revision = ""
        self.canary = 0
        self.beside = False
        self.given_up_by = ""
        self.placed: Placed | None = None
        self.prediction: Prediction | None = None
        self.excluded: frozenset[str] = frozenset()
        self.first_error: HeadraceError | None = None
        self.decided: list[Decided] = []
        self.failures: list[Failure] = []
        self.outcome = "cancelled"
        self.cached_tokens = 0
        self.stages: Mapping[Stage, float] = {}
        self.last_output_at: float | None = None
        self.waits_for_prefill = True
        self.num_uncounted = 0
        self.ended_by_worker = False
        self.stopped: list[int] = []
        self._worker_timeline = Timeline()
        self._samples = [_Sample(open_text()) for _ in range(job.n)]
        self._num_open = job.n
        self._num_open_on_worker = job.n

    @property
    def state(self) -> str:
        """One of STATES: where it is, as operators count it."""
        if self.placed is None:
            return "queued"
        return "prefill" if self.waits_for_prefill else "decode"

    @property
    def done(self) -> bool:
        """Every sample has its finish."""
        return not self._num_open

    @property
    def decode(self) -> str:
        return self.placed.decode.worker_id if self.placed is not None else ""

    @property
    def prefill(self) -> str | None:
        return self.placed.prefill.worker_id if self.placed is not None and self.placed.prefill is not None else None

    @property
    def handed_over_by(self) -> str:
        """The prefill worker that the prompt's KV came from, "" when there was none; known from the first token on."""
        return self._worker_timeline.prefill_worker

    @property
    def ttft_seconds(self) -> float | None:
        """From its arrival on; None before a first token."""
        first = self.marks.first_token
        return None if first is None else first - self.marks.arrived

    @property
    def num_generated(self) -> int:
        return sum(sample.num_generated for sample in self._samples)

    @property
    def ran(self) -> bool:
        """Whether some worker may have computed of it: not where all to whom it was given refused it."""
        return self.placed is not None and (self.num_generated > 0 or self.outcome not in _REFUSALS)

    def progress(self) -> Progress:
        return Progress(self.key, self.decode, self.num_generated, self.excluded)

    def usage(self) -> Usage:
        completion = sum(sample.num_tokens for sample in self._samples)
        return Usage(len(self.job.prompt_token_ids), completion, self.cached_tokens)

    def timeline(self) -> RequestTimeline:
        return RequestTimeline(
            self._worker_timeline,
            self.queue_seconds,
            self.decode,
            self.key.attempt,
            {stage.value: seconds for stage, seconds in self.stages.items()},
            self.revision,
        )

    def failed(self, worker_id: str, error: HeadraceError) -> None:
        """A worker of the last placement did not do its part."""
        self.first_error = self.first_error or error
        self.failures.append(Failure(len(self.decided) - 1, worker_id, error.type, error.message))

    def tpot_seconds(self, now: float) -> float | None:
        """The mean until now; None before a second token."""
        first = self.marks.first_token
        if first is None or self.num_generated <= self.job.n:
            return None
        return (now - first) / (self.num_generated / self.job.n - 1)

    def verdict(self, now: float) -> str | None:
        """How it did by its targets: as Targets.judge, or "failed"; None of one that its client gave up, or ended by a
        deadline of his own before anything was late."""
        if self.outcome == "cancelled" or self._was_cut_short(now):
            return None
        if self.outcome != "finished" or self.ttft_seconds is None:
            return "failed"
        return self.job.targets.judge(self.ttft_seconds, self.tpot_seconds(now))

    def _was_cut_short(self, now: float) -> bool:
        """By its client's deadline, at a time by which nobody owed him more than he had."""
        if self.outcome != DeadlineExceeded.__name__ or self.job.seconds_left is None:
            return False
        targets, first = self.job.targets, self.marks.first_token
        ttft_seconds = targets.ttft_seconds or PATIENT_TTFT_SECONDS
        if first is None or self.ttft_seconds is None:
            return now - self.marks.arrived <= ttft_seconds
        tokens = max(self.num_generated / self.job.n, 1.0)
        return self.ttft_seconds <= ttft_seconds and now - first <= tokens * (
            targets.tpot_seconds or PATIENT_TPOT_SECONDS
        )

    def explanation(self, outcome: str, now: float) -> Explanation:
        return explained(self.outline(outcome, now), self.decided)

    def running(self, now: float) -> Recent:
        return Recent(self.outline(self.state, now), reasons_of(self.decided))

    def outline(self, outcome: str, now: float) -> Explanation:
        """The explanation without its whys."""
        return Explanation(
            self.job.request_id,
            (),
            tuple(self.failures),
            outcome,
            self.usage(),
            self.timeline(),
            now - self.marks.arrived,
            self.ttft_seconds,
            self.tpot_seconds(now),
            self.job.tenant,
            self.job.service_class,
            self.key.request_id,
            self.revision,
        )

    def relay(self, outputs: list[SequenceOutput]) -> list[Piece]:
        """The client's pieces of what the worker said: one for each sample that has something new."""
        if len(outputs) == 1:
            return self._relay_one(outputs[0])
        by_sample: dict[int, list[SequenceOutput]] = {}
        for output in outputs:
            by_sample.setdefault(output.index, []).append(output)
        return [piece for group in by_sample.values() for piece in self._relay_one(_merged(group))]

    def _relay_one(self, output: SequenceOutput) -> list[Piece]:
        if output.usage is not None:
            self.cached_tokens = output.usage.cached_tokens
        if output.timeline is not None:
            self._worker_timeline = output.timeline
        if not self.stages:
            self.stages = ttft_stages(self.marks, self.queue_seconds, self._worker_timeline)
        sample = self._sample(output.index)
        num_new = len(output.token_ids)
        sample.num_generated += num_new
        self.num_uncounted += num_new
        if sample.num_generated != output.num_generated:
            raise InternalError(
                f"the worker's tokens of sample {output.index} do not add up",
                counted=sample.num_generated,
                reported=output.num_generated,
            )
        if output.finish is not None:
            self._num_open_on_worker -= 1
            self.ended_by_worker = not self._num_open_on_worker
        elif sample.finish is None:
            delta = sample.text.push(output.token_ids)
            if not delta.stopped:
                sample.num_tokens += num_new
                cached = self.cached_tokens  # by place, as this is made for every token
                return [Piece(output.index, delta.text, output.token_ids, output.logprobs, None, None, None, cached)]
            return [self._last_piece(sample, output, delta)]
        if sample.finish is not None:
            return []
        # A token that ends the sample by its id is the client's, and counted, but it is not text.
        ids = output.token_ids[:-1] if output.finish is FinishReason.STOP else output.token_ids
        return [self._last_piece(sample, output, sample.text.push(ids))]

    def _last_piece(self, sample: _Sample, output: SequenceOutput, delta: Delta) -> Piece:
        """The sample's end: by a stop string in `delta`, else by the worker's finish."""
        text, token_ids, logprobs = delta.text, output.token_ids, output.logprobs
        if delta.stopped:
            token_ids, logprobs = token_ids[: delta.num_consumed], logprobs[: delta.num_consumed]
            sample.finish = FinishReason.STOP.value
        else:
            tail = sample.text.flush()
            text += tail.text
            sample.finish = FinishReason.STOP.value if tail.stopped or output.finish is None else output.finish.value
        sample.num_tokens += len(token_ids)
        self._num_open -= 1
        if self._num_open:
            if output.finish is None:
                self.stopped.append(output.index)
            return Piece(output.index, text, token_ids, logprobs, sample.finish, cached_tokens=self.cached_tokens)
        usage = self.usage()
        return Piece(
            output.index, text, token_ids, logprobs, sample.finish, usage, self.timeline(), usage.cached_tokens
        )

    def _sample(self, index: int) -> _Sample:
        if not 0 <= index < len(self._samples):
            raise InternalError(f"the worker answered sample {index} of {len(self._samples)}", index=index)
        return self._samples[index]

    def ask(self, cached: Mapping[str, int], local_max: int, tie: float, decode: str | None, now: float) -> Ask:
        """What placement must know of it; `decode` as in Ask."""
        job, ttft_seconds = self.job, self.job.targets.ttft_seconds
        return Ask(
            num_prompt_tokens=len(job.prompt_token_ids),
            max_tokens=job.sampling.max_tokens,
            n=job.n,
            cached_tokens=cached,
            local_prefill_max_tokens=local_max,
            decode=decode,
            excluded=self.excluded,
            tie=tie,
            ttft_seconds=ttft_seconds - (now - self.marks.arrived) if ttft_seconds is not None else None,
            tpot_seconds=job.targets.tpot_seconds,
        )

    def request(self, now: float, local_prefill_max_tokens: int) -> Request:
        """What is submitted for this attempt."""
        job = self.job
        return Request(
            key=self.key,
            prompt_token_ids=job.prompt_token_ids,
            sampling=job.sampling,
            n=job.n,
            cache_salt=job.cache_salt,
            priority=job.priority,
            seconds_left=max(self.deadline - now, 0.0),
            local_prefill_max_tokens=local_prefill_max_tokens,
            prefill=self.placed.prefill.target if self.placed is not None and self.placed.prefill else None,
            traceparent=job.traceparent,
            offer_held=self.placed is not None and self.placed.pulls,
        )


def _merged(outputs: list[SequenceOutput]) -> SequenceOutput:
    """Outputs of one sample that waited together, as the one that it might have been."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    return SequenceOutput(
        last.key,
        last.index,
        tuple(chain.from_iterable(output.token_ids for output in outputs)),
        last.num_generated,
        tuple(chain.from_iterable(output.logprobs for output in outputs)),
        last.finish,
        next((output.usage for output in outputs if output.usage is not None), None),
        next((output.timeline for output in reversed(outputs) if output.timeline is not None), None),
    )
