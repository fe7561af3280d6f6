"""What the notes of two workers (loadtests.noted_worker) say about each hand-off. Pure."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class HandOver:
    """Seconds. From the end of prefill's last kernel two things are on their way: its tokens (`landed`, `announced`,
    `heard` follow each other) and the last blocks (`pulled`, which may come before the kernel that draws has ended).
    `told`: from the later of the two until decode's scheduler can run the sequence, which is `runnable`. `begun`: to the
    device's start of the first step that holds it."""

    landed: float
    announced: float
    heard: float
    pulled: float
    told: float
    runnable: float
    begun: float

    PARTS: ClassVar[tuple[str, ...]] = ("landed", "announced", "heard", "pulled", "told")


def hand_overs(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, HandOver]:
    """By request id. Hand-offs must have followed each other."""
    sent, got = _by_what(prefill), _by_what(decode)
    ends = sorted(end for _, end, *_ in prefill["steps"])
    landings = _times(sent["step landed"])
    pulls = _times(got["pull ends"])
    first_steps = sorted(step[0] for step in decode["steps"] if step[4])
    announced = dict(sent["announced"])
    heard = dict(got["heard"])
    found = {}
    for key, runnable in got["runnable"]:
        done = _last(ends, announced[key])
        pulled, landed = _last(pulls, runnable), _last(landings, announced[key])
        found[key] = HandOver(
            landed=landed - done,
            announced=announced[key] - landed,
            heard=heard[key] - announced[key],
            pulled=pulled - done,
            told=runnable - max(heard[key], pulled),
            runnable=runnable - done,
            begun=_first(first_steps, runnable) - done,
        )
    return found


def step_seconds(worker: dict[str, Any], num_decodes: int) -> list[float]:
    """Of a worker's steps of so many sequences and more, one token each, that followed another at once: from its start
    to the next one's."""
    steps = sorted(worker["steps"])
    return [
        after[0] - step[0]
        for step, after in pairwise(steps)
        if step[2] >= num_decodes and step[2] == step[3] and after[2] >= num_decodes
    ]


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Of none 0."""
    return sorted(samples)[min(len(samples) - 1, int(fraction * len(samples)))] if samples else 0.0


def _by_what(worker: dict[str, Any]) -> dict[str, list[tuple[str, float]]]:
    by_what: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for what, key, at in worker["notes"]:
        by_what[what].append((key, at))
    return by_what


def _times(notes: Sequence[tuple[str, float]]) -> list[float]:
    return sorted(at for _, at in notes)


def _last(times: Sequence[float], until: float) -> float:
    return times[bisect_right(times, until) - 1]


def _first(times: Sequence[float], since: float) -> float:
    return times[bisect_left(times, since)]
