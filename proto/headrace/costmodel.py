"""Step and transfer times as functions of work, and their online fit (design 5.5). One model for all who predict.

prefill seconds  = a + b · tokens + c · tokens · mean context
decode seconds   = a + b · sequences + c · context tokens
transfer seconds = base + bytes / bandwidth

That is what a worker's own steps teach (OnlineFit) and what placement compares. A device reads its weights once a step,
whatever is in it, and computes meanwhile: `step_seconds` is the roofline of any step, by the same coefficients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp2
from statistics import median


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds. The defaults are a guess for a small model on a laptop; a worker reports its own fit."""

    prefill_base_seconds: float = 2e-2
    prefill_token_seconds: float = 1e-3
    prefill_token_context_seconds: float = 1e-8
    decode_base_seconds: float = 3e-2
    decode_sequence_seconds: float = 2e-3
    decode_context_token_seconds: float = 1e-7
    transfer_base_seconds: float = 2e-3
    transfer_bytes_per_second: float = 1e9

    def prefill_seconds(self, num_tokens: int, num_cached: int = 0) -> float:
        """One prompt's uncached part: `num_tokens` to compute behind `num_cached` tokens of context."""
        mean_context = num_cached + num_tokens / 2
        return (
            self.prefill_base_seconds
            + self.prefill_token_seconds * num_tokens
            + self.prefill_token_context_seconds * num_tokens * mean_context
        )

    def decode_step_seconds(self, num_sequences: int, context_tokens: int) -> float:
        """One step of `num_sequences` sequences that hold `context_tokens` tokens together."""
        return (
            self.decode_base_seconds
            + self.decode_sequence_seconds * num_sequences
            + self.decode_context_token_seconds * context_tokens
        )

    def step_seconds(
        self,
        prefill_tokens: int,
        mean_context: float,
        num_sequences: int = 0,
        context_tokens: int = 0,
        *,
        padding_tokens: int = 0,
    ) -> float:
        """One step that computes `prefill_tokens` of prompts at their mean context beside `num_sequences` that decode.

        Of products the longer counts, to read the weights or to compute with them; attention of both kinds adds to it.
        `padding_tokens` are computed too, and attend to nothing."""
        read = self.decode_base_seconds + self.decode_sequence_seconds * num_sequences
        row = max(self.prefill_token_seconds, self.decode_sequence_seconds)
        tokens = prefill_tokens + padding_tokens
        computed = self.prefill_base_seconds + self.prefill_token_seconds * tokens + row * num_sequences
        attention = (
            self.prefill_token_context_seconds * prefill_tokens * mean_context
            + self.decode_context_token_seconds * context_tokens
        )
        return max(read, computed) + attention

    def transfer_seconds(self, num_bytes: int) -> float:
        return self.transfer_base_seconds + num_bytes / self.transfer_bytes_per_second


Triple = tuple[float, float, float]
NANOSECOND = 1e-9  # no clock tells shorter steps apart


class _Line:
    """An online fit of y = Σ wᵢ·xᵢ with wᵢ ≥ 0 and x ≥ 0, by non-negative least squares of relative errors.

    Everything is measured in what the start predicts: u = w / start, z = start · x, so the start is u = (1, 1, 1) and
    features of any magnitude condition alike. Old samples are forgotten exponentially, by number and,
    with a clock, by time: after a pause all of them together count as LASTING do, and what the machine has become by then
    is soon learned. A sample whose relative error is
    beyond OUTLIER times the running median counts only as much as one at that border (Huber). Where samples leave a
    direction open, a small pull towards the last fit decides.
    """

    FORGET = 0.998
    OUTLIER = 4.0
    PULL = 0.05
    SETTLED = 64
    SOLVE_EVERY = 8
    HALF_LIFE_SECONDS = 60.0
    LASTING = 8.0  # how many samples are left at least

    def __init__(self, start: Triple, min_samples: int, now: Callable[[], float] | None = None) -> None:
        self._now = now
        self._faded_at = now() if now is not None else 0.0
        self._num_recent = 0.0
        self._start = tuple(max(w, 1e-15) for w in start)
        self._fit: Triple = (1.0, 1.0, 1.0)
        self._first: list[tuple[Triple, float]] | None = []
        self._min_samples = min_samples
        self._num_samples = 0
        self._error = 0.0
        self._gram = [0.0] * 6  # z·z in the order 00 01 02 11 12 22
        self._target = [0.0] * 3

    @property
    def settled(self) -> bool:
        return self._first is None

    @property
    def weights(self) -> Triple:
        a, b, c = (u * w for u, w in zip(self._fit, self._start, strict=True))
        return a, b, c

    def add(self, x: Triple, y: float) -> None:
        if not 0.0 <= y < float("inf"):
            raise ValueError(f"a step cannot have taken {y} s")
        s0, s1, s2 = self._start
        z = (s0 * x[0], s1 * x[1], s2 * x[2])
        if self._first is None:
            self._learn(z, y)
            return
        self._first.append((z, y))
        if len(self._first) >= self._min_samples:
            self._begin(self._first)
            self._first = None

    def _begin(self, samples: list[tuple[Triple, float]]) -> None:
        """The first fit is the start as a whole, sped up or slowed down by the median: one odd sample cannot bend it."""
        scale = max(median(y / sum(z) for z, y in samples), 1e-9)
        self._fit = (scale, scale, scale)
        self._error = max(median(abs(y / (scale * sum(z)) - 1) for z, y in samples), 0.01)
        for z, y in samples:
            self._learn(z, y)

    def _learn(self, z: Triple, y: float) -> None:
        u0, u1, u2 = self._fit
        expected = max(u0 * z[0] + u1 * z[1] + u2 * z[2], NANOSECOND)
        error = abs(y / expected - 1)
        border = self.OUTLIER * self._error
        weight = (1.0 if error <= border else border / error) / (expected * expected)
        # A multiplicative walk to the median: what lies beyond it moves it no further than what lies just above.
        self._error = max(self._error * (1.05 if error > self._error else 1 / 1.05), 1e-3)
        gram, target, forget = self._gram, self._target, self.FORGET * self._fade()
        z0, z1, z2 = z
        w0, w1, w2 = weight * z0, weight * z1, weight * z2
        gram[0] = gram[0] * forget + w0 * z0
        gram[1] = gram[1] * forget + w0 * z1
        gram[2] = gram[2] * forget + w0 * z2
        gram[3] = gram[3] * forget + w1 * z1
        gram[4] = gram[4] * forget + w1 * z2
        gram[5] = gram[5] * forget + w2 * z2
        target[0] = target[0] * forget + w0 * y
        target[1] = target[1] * forget + w1 * y
        target[2] = target[2] * forget + w2 * y
        self._num_samples += 1
        self._num_recent += 1
        if self._num_recent < self.SETTLED or self._num_samples % self.SOLVE_EVERY == 0:
            self._solve()

    def _fade(self) -> float:
        """What is left, by time, of what was learned until now."""
        if self._now is None:
            return 1.0
        now = self._now()
        keep, self._faded_at = exp2(-max(now - self._faded_at, 0.0) / self.HALF_LIFE_SECONDS), now
        keep = min(max(keep, self.LASTING / max(self._num_recent, 1.0)), 1.0)
        self._num_recent *= keep
        return keep

    def _solve(self) -> None:
        """Minimises Σ weight·(y − z·u)² + pull over u ≥ 0: of the 8 sets of free coefficients, the best feasible one."""
        g00, g01, g02, g11, g12, g22 = self._gram
        largest = max(self._fit)
        pull = self.PULL / (largest * largest)
        matrix = ((g00 + pull, g01, g02), (g01, g11 + pull, g12), (g02, g12, g22 + pull))
        target = tuple(t + pull * u for t, u in zip(self._target, self._fit, strict=True))
        best: Triple | None = None
        best_cost = float("inf")
        for free in _FREE_SETS:
            u = _solve_free(matrix, target, free)
            if u is None:
                continue
            if len(free) == 3:
                best = u
                break
            cost = sum(u[i] * (sum(matrix[i][j] * u[j] for j in free) - 2 * target[i]) for i in free)
            if cost < best_cost:
                best, best_cost = u, cost
        if best is not None and sum(best) > 0.0:
            self._fit = best


_FREE_SETS = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))


def _solve_free(matrix: tuple[Triple, ...], target: tuple[float, ...], free: tuple[int, ...]) -> Triple | None:
    """The minimum over the free coefficients, the others 0; None when it is not feasible. Gaussian elimination."""
    rows = [[*(matrix[i][j] for j in free), target[i]] for i in free]
    size = len(free)
    for k in range(size):
        if rows[k][k] <= 0.0:
            return None
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            for j in range(k, size + 1):
                rows[i][j] -= factor * rows[k][j]
    u = [0.0, 0.0, 0.0]
    for k in reversed(range(size)):
        value = (rows[k][size] - sum(rows[k][j] * u[free[j]] for j in range(k + 1, size))) / rows[k][k]
        if value < 0.0:
            return None
        u[free[k]] = value
    return u[0], u[1], u[2]


class OnlineFit:
    """Fits a CostModel to a worker's real steps. Warm-up samples are the caller's to leave out.

    Owned by the engine, which adds a sample a step and reads `model` when it reports.
    """

    MIN_SAMPLES = 8

    def __init__(self, start: CostModel | None = None, now: Callable[[], float] | None = None) -> None:
        """`now`: a clock, where time alone is to make samples old."""
        self._model = start or CostModel()
        m = self._model
        prefill = (m.prefill_base_seconds, m.prefill_token_seconds, m.prefill_token_context_seconds)
        decode = (m.decode_base_seconds, m.decode_sequence_seconds, m.decode_context_token_seconds)
        transfer = (m.transfer_base_seconds, 1 / m.transfer_bytes_per_second, 0.0)
        self._prefill = _Line(prefill, self.MIN_SAMPLES, now)
        self._decode = _Line(decode, self.MIN_SAMPLES, now)
        self._transfer = _Line(transfer, self.MIN_SAMPLES, now)

    def add_prefill(self, num_tokens: int, mean_context: float, seconds: float) -> None:
        self._prefill.add((1.0, num_tokens, num_tokens * mean_context), seconds)

    def add_decode(self, num_sequences: int, context_tokens: int, seconds: float) -> None:
        self._decode.add((1.0, num_sequences, context_tokens), seconds)

    def add_transfer(self, num_bytes: int, seconds: float) -> None:
        self._transfer.add((1.0, num_bytes, 0.0), seconds)

    @property
    def model(self) -> CostModel:
        """The fit so far; a line with fewer than MIN_SAMPLES samples stays at its start."""
        m = self._model
        prefill = m.prefill_base_seconds, m.prefill_token_seconds, m.prefill_token_context_seconds
        decode = m.decode_base_seconds, m.decode_sequence_seconds, m.decode_context_token_seconds
        transfer = m.transfer_base_seconds, m.transfer_bytes_per_second
        if self._prefill.settled:
            prefill = self._prefill.weights
        if self._decode.settled:
            decode = self._decode.weights
        if self._transfer.settled:
            base, byte, _ = self._transfer.weights
            transfer = base, 1 / max(byte, 1e-13)
        return CostModel(*prefill, *decode, *transfer)
