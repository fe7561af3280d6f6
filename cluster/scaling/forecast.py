"""What will come within the time that a worker takes to start: the level of now, its trend, and the time of day.

    level    arrivals of the last minutes
    trend    least squares over half an hour, where it is steeper than chance makes it
    season   level × how the same time of earlier days went on, the median of them: what happened once is no season;
             never more than half beyond what those days saw

The peak is the highest of the three. Arrivals alone are looked at, never completions: what is not served is still wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from cluster.scaling.values import Forecast

BUCKET_SECONDS = 300
DAY = 86_400 // BUCKET_SECONDS
KEPT_BUCKETS = 8 * DAY
TREND_BUCKETS = 6
UNKNOWN = -1.0
MOST_GROWTH = 3.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in stretches of BUCKET_SECONDS, `first` being that of the oldest; UNKNOWN where nobody looked for most of
    it. The last one is under way."""

    first: int = 0
    counts: tuple[float, ...] = ()
    known_seconds: float = 0.0


class History:
    """Owns the arrivals of the last days. `now` is Redis's clock."""

    def __init__(self, arrivals: Arrivals | None = None) -> None:
        arrivals = arrivals or Arrivals()
        self._first = arrivals.first
        self._counts = list(arrivals.counts)
        self._known_seconds = arrivals.known_seconds

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals(self._first, tuple(self._counts), self._known_seconds)

    def add(self, number: float, seconds: float, now: float) -> bool:
        """`number` came within the last `seconds`. Whether a stretch is complete."""
        bucket = int(now // BUCKET_SECONDS)
        if not self._counts or bucket >= self._first + len(self._counts) + KEPT_BUCKETS:
            self._first, self._counts, self._known_seconds = bucket, [0.0], 0.0
        finished = False
        while self._first + len(self._counts) <= bucket:
            self._close()
            self._counts.append(0.0)
            finished = True
        if self._first + len(self._counts) - 1 == bucket:  # else a clock was set back: what is there stays
            self._counts[-1] += number
            self._known_seconds += seconds
        del self._counts[: len(self._counts) - KEPT_BUCKETS]
        self._first = max(self._first, bucket + 1 - len(self._counts))
        return finished

    def _close(self) -> None:
        """The last stretch is over: what was seen of it stands for the whole, if it was most of it."""
        seen = self._known_seconds / BUCKET_SECONDS
        self._counts[-1] = self._counts[-1] / min(seen, 1.0) if seen > 0.5 else UNKNOWN
        self._known_seconds = 0.0

    def forecast(self, level: float, lead_seconds: float) -> Forecast:
        """`level`: arrivals a second now."""
        return _forecast(
            [count / BUCKET_SECONDS if count >= 0 else UNKNOWN for count in self._counts], level, lead_seconds
        )


def _forecast(rates: Sequence[float], level: float, lead_seconds: float) -> Forecast:
    trend = max(level + _slope(rates[-1 - TREND_BUCKETS : -1]) * lead_seconds, 0.0)
    ahead = int(lead_seconds // BUCKET_SECONDS) + 2
    growths: list[float] = []
    most = 0.0
    for day in range(1, 8):
        at = len(rates) - 1 - day * DAY
        then = _smooth(rates, at)
        later = [rate for rate in (_smooth(rates, at + step) for step in range(ahead)) if rate >= 0]
        if then > 0 and later:
            growths.append(min(max(later) / then, MOST_GROWTH))
            most = max(most, *later)
    if not growths:
        return Forecast(max(level, trend), level, trend)
    season = min(level * median_low(growths), max(1.5 * most, level))
    return Forecast(max(level, trend, season), level, trend, season, len(growths))


def _smooth(rates: Sequence[float], at: int) -> float:
    """The mean of three stretches around one; UNKNOWN where none is known."""
    known = [rates[near] for near in range(max(at - 1, 0), min(at + 2, len(rates))) if rates[near] >= 0]
    return sum(known) / len(known) if at >= 0 and known else UNKNOWN


def _slope(rates: Sequence[float]) -> float:
    """Arrivals a second, a second; 0 where it is within what chance does to counts."""
    points = [(number * BUCKET_SECONDS, rate) for number, rate in enumerate(rates) if rate >= 0]
    if len(points) < 4:
        return 0.0
    mean_at = sum(at for at, _ in points) / len(points)
    mean = sum(rate for _, rate in points) / len(points)
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    slope = sum((at - mean_at) * (rate - mean) for at, rate in points) / spread
    deviation = (mean / BUCKET_SECONDS / spread) ** 0.5
    return slope if abs(slope) > 2 * deviation else 0.0
