"""Whether the generator itself was the bottleneck: then its figures say nothing of the server."""

from headrace.goodput import percentiles
from loadtests.open_loop.answers import Effort

LATE_SECONDS = 0.02
LAG_SECONDS = 0.02
CPU_SHARE = 0.9
IDLE_SHARE = 0.5


def strains(effort: Effort) -> list[str]:
    """What was too much for it, with numbers; nothing when latencies are the server's."""
    found = []
    late, lag = percentiles(effort.lateness_seconds).get("p99", 0.0), percentiles(effort.lag_seconds).get("p99", 0.0)
    if late > LATE_SECONDS:
        found.append(f"it sent late: p99 {late * 1e3:.0f} ms, at most {LATE_SECONDS * 1e3:.0f} ms is fair")
    if lag > LAG_SECONDS:
        found.append(f"events waited for it: p99 {lag * 1e3:.0f} ms, at most {LAG_SECONDS * 1e3:.0f} ms is fair")
    if found and effort.cpu_share < IDLE_SHARE:
        found[-1] += f" (it took {effort.cpu_share:.0%} of a core: something else keeps this machine busy)"
    if effort.cpu_share > CPU_SHARE:
        found.append(f"it took {effort.cpu_share:.0%} of a core, at most {CPU_SHARE:.0%} is fair")
    return found
