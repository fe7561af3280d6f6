"""What NVML says of this process' GPUs, read when somebody scrapes. Without a GPU or the library (the extra `nvml`) there
is no series. Its counters grow from the driver's start."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace import metrics

log = logging.getLogger(__name__)


class GpuFigures(Collector):
    """Of the devices with these UUIDs or numbers. A figure that a card does not have is absent, and so is one that a
    driver in trouble does not give: a scrape never fails over it."""

    def __init__(self, nvml: Any, handles: dict[str, Any]) -> None:
        self._nvml = nvml
        self._handles = handles

    def collect(self) -> Iterator[Metric]:
        nvml = self._nvml
        memory = GaugeMetricFamily(metrics.GPU_MEMORY, "Bytes of device memory.", labels=["gpu", "state"])
        errors = CounterMetricFamily(
            metrics.GPU_ERRORS.removesuffix("_total"), "Errors that the driver counted.", labels=["gpu", "kind"]
        )
        plain: list[tuple[GaugeMetricFamily, Callable[[Any], float]]] = [
            (gauge(metrics.GPU_BUSY, "Part of the last moment in which a kernel ran."), self._busy),
            (gauge(metrics.GPU_TEMPERATURE, "Degrees Celsius."), lambda h: float(nvml.nvmlDeviceGetTemperature(h, 0))),
            (gauge(metrics.GPU_POWER, "Watts."), lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000),
        ]
        for name, handle in self._handles.items():
            for family, read in plain:
                with suppress(nvml.NVMLError):
                    family.add_metric([name], read(handle))
            with suppress(nvml.NVMLError):
                its = nvml.nvmlDeviceGetMemoryInfo(handle)
                memory.add_metric([name, "used"], its.used)
                memory.add_metric([name, "free"], its.free)
            for kind, count in self._errors():
                with suppress(nvml.NVMLError):
                    errors.add_metric([name, kind], count(handle))
        yield from (*(family for family, _ in plain), memory, errors)

    def _busy(self, handle: Any) -> float:
        return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100

    def _errors(self) -> tuple[tuple[str, Callable[[Any], float]], ...]:
        nvml = self._nvml
        uncorrected, since_reset = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return (
            ("pcie_replay", nvml.nvmlDeviceGetPcieReplayCounter),
            ("ecc_uncorrected", lambda h: nvml.nvmlDeviceGetTotalEccErrors(h, uncorrected, since_reset)),
        )


def gauge(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=["gpu"])


def watch_gpus(registry: CollectorRegistry, visible: str | None = None) -> bool:
    """Shows the GPUs that this process may use (`visible`: as CUDA_VISIBLE_DEVICES names them; None: as it does here).
    Whether there are any."""
    try:
        import pynvml
    except ImportError:
        return False
    try:
        pynvml.nvmlInit()
        named = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        handles = _handles(pynvml, named)
    except pynvml.NVMLError as error:
        log.debug("NVML shows no GPU: %s", error)
        return False
    if handles:
        registry.register(GpuFigures(pynvml, handles))
    return bool(handles)


def _handles(nvml: Any, visible: str | None) -> dict[str, Any]:
    if visible is None:
        return {str(at): nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())}
    names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    return {
        name: nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdecimal()
        else nvml.nvmlDeviceGetHandleByUUID(name.encode())
        for name in names
    }
