"""Every series that some process of ours shows, by its labels, read from the objects that measure."""

from prometheus_client import REGISTRY, CollectorRegistry

import router.__main__  # with all of a router's metrics
from cluster.keeper import CanaryPhase, Sizes
from cluster.state import ObservedState, WorkerRecord
from headrace import metrics
from workers.gpu_figures import GpuFigures
from workers.meters import Meters

assert router.__main__


def measured() -> dict[str, set[str]]:
    workers, keeper = CollectorRegistry(), CollectorRegistry()
    Meters(workers).costs(1.0)
    workers.register(GpuFigures(None, {}))  # of no card: its families are there all the same
    worker = WorkerRecord("a-0", "a", 1, "decode", "tp1", "ready", 0.0)
    keeper.register(Sizes(ObservedState("", (worker,), {"a": 1}), {"a": 2}))
    keeper.register(CanaryPhase(None))
    found: dict[str, set[str]] = {}
    for registry in (REGISTRY, workers, keeper):
        for collector, names in registry._collector_to_names.items():
            labels = set(getattr(collector, "_labelnames", ()))
            found |= {name: labels for name in names if not name.endswith("_created")}
        for family in registry.collect():
            for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",)):
                name = family.name + suffix
                found[name] = found.get(name, set()) | set(getattr(family, "_labelnames", ()))
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, set()) | sample.labels.keys()
    return {name: labels for name, labels in found.items() if name.startswith("headrace_")}


def names() -> dict[str, str]:
    """The metrics of headrace.metrics, by the constant's name."""
    return {key: value for key, value in vars(metrics).items() if key.isupper() and str(value).startswith("headrace_")}
