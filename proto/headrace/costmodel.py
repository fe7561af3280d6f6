"""Step and transfer times as functions of work, and their online fit (design 5.5). One model for all who predict.

prefill seconds  = a + b · tokens + c · tokens · mean context
decode seconds   = a + b · sequences + c · context tokens
transfer seconds = base + bytes / bandwidth
"""

from dataclasses import dataclass, replace


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

    def transfer_seconds(self, num_bytes: int) -> float:
        return self.transfer_base_seconds + num_bytes / self.transfer_bytes_per_second


class _Line:
    """Weighted recursive least squares of y = Σ wᵢ·xᵢ with forgetting; outliers beyond 4 mean deviations are clipped.

    Features are scaled by their running maximum, so that 1, tokens and tokens·context condition alike.
    """

    def __init__(self, start: tuple[float, float, float], forget: float = 0.99) -> None:
        self._weights = list(start)
        self._cov = [[(w or 1e-9) ** 2 * 25 if i == j else 0.0 for j in range(3)] for i, w in enumerate(start)]
        self._forget = forget
        self._deviation = 0.0
        self.num_samples = 0

    def add(self, x: tuple[float, float, float], y: float) -> None:
        error = y - sum(w * v for w, v in zip(self._weights, x, strict=True))
        if self.num_samples >= 32:
            limit = 4 * self._deviation
            error = max(-limit, min(limit, error))
        self._deviation = abs(error) if not self.num_samples else 0.95 * self._deviation + 0.05 * abs(error)
        noise = max(self._deviation, 1e-3 * abs(y), 1e-9) ** 2
        px = [sum(self._cov[i][j] * x[j] for j in range(3)) for i in range(3)]
        denominator = self._forget * noise + sum(x[i] * px[i] for i in range(3))
        gain = [p / denominator for p in px]
        self._weights = [w + g * error for w, g in zip(self._weights, gain, strict=True)]
        grow = 1 / self._forget if sum(self._cov[i][i] for i in range(3)) < 1.0 else 1.0
        self._cov = [[(self._cov[i][j] - gain[i] * px[j]) * grow for j in range(3)] for i in range(3)]
        self.num_samples += 1

    @property
    def weights(self) -> tuple[float, float, float]:
        a, b, c = (max(w, 0.0) for w in self._weights)
        return a, b, c


class OnlineFit:
    """Fits a CostModel to a worker's real steps. Warm-up samples are the caller's to leave out.

    Owned by the engine, which adds a sample a step and reads `model` when it reports.
    """

    MIN_SAMPLES = 8

    def __init__(self, start: CostModel | None = None) -> None:
        self._model = start or CostModel()
        m = self._model
        self._prefill = _Line((m.prefill_base_seconds, m.prefill_token_seconds, m.prefill_token_context_seconds))
        self._decode = _Line((m.decode_base_seconds, m.decode_sequence_seconds, m.decode_context_token_seconds))
        self._transfer = _Line((m.transfer_base_seconds, 1 / m.transfer_bytes_per_second, 0.0))

    def add_prefill(self, num_tokens: int, mean_context: float, seconds: float) -> None:
        self._prefill.add((1.0, num_tokens, num_tokens * mean_context), seconds)

    def add_decode(self, num_sequences: int, context_tokens: int, seconds: float) -> None:
        self._decode.add((1.0, num_sequences, context_tokens), seconds)

    def add_transfer(self, num_bytes: int, seconds: float) -> None:
        self._transfer.add((1.0, num_bytes, 0.0), seconds)

    @property
    def model(self) -> CostModel:
        """The fit so far; a line with fewer than MIN_SAMPLES samples stays at its start."""
        model = self._model
        if self._prefill.num_samples >= self.MIN_SAMPLES:
            a, b, c = self._prefill.weights
            model = replace(model, prefill_base_seconds=a, prefill_token_seconds=b, prefill_token_context_seconds=c)
        if self._decode.num_samples >= self.MIN_SAMPLES:
            a, b, c = self._decode.weights
            model = replace(model, decode_base_seconds=a, decode_sequence_seconds=b, decode_context_token_seconds=c)
        if self._transfer.num_samples >= self.MIN_SAMPLES:
            a, b, _ = self._transfer.weights
            model = replace(model, transfer_base_seconds=a, transfer_bytes_per_second=1 / max(b, 1e-13))
        return model
