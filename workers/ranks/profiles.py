"""What a trace of a rank at work says of its steps.

    python -m workers.ranks.profiles TRACE < PLANS > STEPS     # JSON

A trace's events are those of Chrome's format. A step is the range that its launch is in; a kernel is a step's by the launch
that both name (`correlation`), also where a graph launched it.
"""

import json
import os
import pathlib
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

MOST_STEPS = 1000
STEP = "step "  # and a plan's number: the name of its range
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
MICRO = 1e-6

Interval = tuple[float, float]
PlanFigures = tuple[int, int, int]  # number, prefill tokens, decode tokens


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """`cpu_seconds`: how long the launch held the rank's thread. `gpu_seconds`: how long the device computed for the step;
    `idle_seconds`: how long it did not, from the end of the step before. Where no device computes, idle is the time that
    the thread waited for the next step."""

    number: int
    num_prefill_tokens: int
    num_decode_tokens: int
    cpu_seconds: float
    gpu_seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class RankProfile:
    """`trace`: gzip of Chrome's JSON, as Perfetto reads it."""

    rank: int
    steps: tuple[ProfiledStep, ...]
    trace: bytes


def steps_of(events: Iterable[dict[str, Any]], plans: Sequence[PlanFigures]) -> tuple[ProfiledStep, ...]:
    """What a trace says of each plan, in order."""
    spans: dict[int, tuple[float, float, Any]] = {}
    launches: list[tuple[float, Any, int]] = []
    on_device: list[tuple[int, Interval]] = []
    for event in events:
        category, start, length = event.get("cat"), float(event.get("ts", 0)), float(event.get("dur", 0))
        if category == "user_annotation" and event["name"].startswith(STEP):
            spans[int(event["name"].removeprefix(STEP))] = (start, start + length, event.get("tid"))
        elif category in LAUNCHES and "correlation" in event.get("args", {}):
            launches.append((start, event.get("tid"), event["args"]["correlation"]))
        elif category in ON_DEVICE and "correlation" in event.get("args", {}):
            on_device.append((event["args"]["correlation"], (start, start + length)))
    numbers = [number for number, _, _ in plans if number in spans]
    starts = [spans[number][0] for number in numbers]
    owner = {}
    for start, thread, correlation in launches:
        at = bisect_right(starts, start) - 1
        if at >= 0 and start <= spans[numbers[at]][1] and thread == spans[numbers[at]][2]:
            owner[correlation] = numbers[at]
    busy: dict[int, list[Interval]] = defaultdict(list)
    for correlation, interval in on_device:
        if correlation in owner:
            busy[owner[correlation]].append(interval)
    found, device_end = [], None
    for at, (number, num_prefill, num_decode) in enumerate(plan for plan in plans if plan[0] in spans):
        start, end, _ = spans[number]
        gpu, idle = 0.0, 0.0
        if busy:
            intervals = sorted(busy[number])
            gpu = _covered(intervals)
            if intervals:
                begun = intervals[0][0] if device_end is None else device_end
                device_end = max(last for _, last in intervals)
                idle = max(0.0, device_end - begun - gpu)
        elif at + 1 < len(starts):
            idle = max(0.0, starts[at + 1] - end)
        found.append(ProfiledStep(number, num_prefill, num_decode, (end - start) * MICRO, gpu * MICRO, idle * MICRO))
    return tuple(found)


def _covered(intervals: Sequence[Interval]) -> float:
    """How much of the time line they cover, in order of their starts."""
    covered, until = 0.0, float("-inf")
    for start, end in intervals:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def main() -> None:
    os.nice(10)  # beside a worker that serves
    events = json.loads(pathlib.Path(sys.argv[1]).read_bytes())["traceEvents"]
    print(json.dumps([astuple(step) for step in steps_of(events, json.load(sys.stdin))]))


if __name__ == "__main__":
    main()
