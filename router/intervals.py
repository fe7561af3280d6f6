"""Times between messages, counted for Prometheus at a cost that every token of every stream can bear."""

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

BOUNDS_SECONDS = tuple(0.001 * 2**at for at in range(14))


class Counts:
    """The observations of one label set. Mutable; fed from the event loop alone."""

    __slots__ = ("buckets", "sum_seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds


class Intervals(Collector):
    """A histogram by model, registered under `name`."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._name = name
        self._documentation = documentation
        self._by_model: dict[str, Counts] = {}
        registry.register(self)

    def of(self, model: str) -> Counts:
        counts = self._by_model.get(model)
        if counts is None:
            counts = self._by_model[model] = Counts()
        return counts

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model"])
        for model, counts in self._by_model.items():
            total, buckets = 0, []
            for bound, number in zip((*BOUNDS_SECONDS, float("inf")), counts.buckets, strict=True):
                total += number
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
            family.add_metric([model], buckets, counts.sum_seconds)
        yield family
