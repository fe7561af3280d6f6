"""What a router says of its traffic, for those who size and watch a cluster: one JSON value in Redis, with a TTL.

Counters grow from the router's start, so a reader takes the difference of two reports of one `router_id` and misses
nothing when a report is lost; a new id starts at 0. Nobody on the path of a request reads it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Requests of one service class that ended, by what they were given; `met` kept both targets. Shed ones `failed`;
    who gave up, and who was denied, is not among them."""

    met: int = 0
    missed_ttft: int = 0
    missed_tpot: int = 0
    missed_both: int = 0
    failed: int = 0


MOST_COUNTED = 2**53  # beyond that a float, which JSON readers may make of it, counts no more
BUCKETS_PER_OCTAVE = 16
LEAST_SECONDS = 1e-4
MOST_BUCKET = 24 * BUCKETS_PER_OCTAVE


def bucket_of(seconds: float) -> int:
    """Of latencies, which are counted by their logarithm: a bucket's ends are 4.4 % apart."""
    if seconds <= LEAST_SECONDS:
        return 0
    return min(int(BUCKETS_PER_OCTAVE * math.log2(seconds / LEAST_SECONDS)), MOST_BUCKET)


def seconds_of(bucket: int) -> float:
    """Where it begins; it ends where the next one does."""
    return LEAST_SECONDS * math.exp2(bucket / BUCKETS_PER_OCTAVE)


@dataclass(frozen=True, slots=True)
class RevisionCounts:
    """Requests that were placed on workers of one revision and are over, but for those whose clients gave up. `failed` of
    them ended in an error, or were given up by their worker and answered by another revision's; `met` kept both targets.
    Latencies of those that were answered, by bucket_of."""

    ended: int = 0
    failed: int = 0
    met: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft: Mapping[int, int] = field(default_factory=dict)
    tpot: Mapping[int, int] = field(default_factory=dict)

    def plus(self, other: "RevisionCounts", sign: int = 1) -> "RevisionCounts":
        """Sums; with sign −1 what was counted since `other`, nothing of it below 0."""
        numbers = {name: max(getattr(self, name) + sign * getattr(other, name), 0) for name in _NUMBERS}
        ttft, tpot = _sum(self.ttft, other.ttft, sign), _sum(self.tpot, other.tpot, sign)
        return replace(self, ttft=ttft, tpot=tpot, **numbers)


def _sum(own: Mapping[int, int], other: Mapping[int, int], sign: int) -> dict[int, int]:
    sums = {bucket: own.get(bucket, 0) + sign * other.get(bucket, 0) for bucket in {**own, **other}}
    return {bucket: number for bucket, number in sums.items() if number > 0}


_NUMBERS = ("ended", "failed", "met", "prompt_tokens", "cached_tokens", "generated_tokens")


@dataclass(frozen=True, slots=True)
class RouterReport:
    """`seconds` is the router's own clock: only differences mean anything. `arrivals` counts requests that passed
    validation and ask for tokens of their own, shed ones too, with their `prompt_tokens`; `max_tokens` is what they may
    generate at most. `denied` of them, with `denied_tokens` of prompts, are nothing that more workers would have served:
    beyond their tenant's quota, or longer than any worker takes. `cached_tokens` were found by workers, of
    `computed_tokens` + themselves. The queue is as it stands. `pairs` counts finished hand-offs by (prefill, decode)
    worker, prompts that a worker computed alone under ("", decode). `classes`: by service class; "" is none; what
    a canary gave is not in them, but in `revisions`: by name, of the time of canary number `canary`; empty where there was
    none."""

    router_id: str
    http_address: str
    seconds: float
    arrivals: int = 0
    prompt_tokens: int = 0
    max_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ended: int = 0
    in_flight: int = 0
    queued: int = 0
    queued_tokens: int = 0
    oldest_queued_seconds: float = 0.0
    ttft_seconds: float = 0.0  # the sum over `ended` requests that had a first token
    denied: int = 0
    denied_tokens: int = 0
    classes: Mapping[str, ClassCounts] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], int] = field(default_factory=dict)
    canary: int = 0
    revisions: Mapping[str, RevisionCounts] = field(default_factory=dict)


def encode_report(report: RouterReport) -> str:
    pairs = [[prefill, decode, number] for (prefill, decode), number in report.pairs.items()]
    classes = {name: asdict(counts) for name, counts in report.classes.items()}
    whole = {**{name: getattr(report, name) for name in _PLAIN}, "classes": classes, "pairs": pairs}
    if report.revisions:
        revisions = {name: encode_counts(counts) for name, counts in report.revisions.items()}
        whole |= {"canary": report.canary, "revisions": revisions}
    return json.dumps(whole, separators=(",", ":"))


def encode_counts(counts: RevisionCounts) -> list[Any]:
    latencies = [[list(pair) for pair in sorted(its.items())] for its in (counts.ttft, counts.tpot)]
    return [*(getattr(counts, name) for name in _NUMBERS), *latencies]


def decode_counts(data: Any) -> RevisionCounts:
    """ValueError or TypeError when it is not what encode_counts of this version makes."""
    *numbers, ttft, tpot = data
    latencies = [dict(its) for its in (ttft, tpot)]
    counted = [*numbers, *(one for its in latencies for pair in its.items() for one in pair)]
    if len(numbers) != len(_NUMBERS) or not all(_is(one, (int,)) for one in counted):
        raise ValueError("no counts of a revision")
    if any(bucket > MOST_BUCKET for its in latencies for bucket in its):
        raise ValueError(f"latencies are counted in buckets up to {MOST_BUCKET}")
    return RevisionCounts(*numbers, *latencies)


def decode_report(raw: bytes | str) -> RouterReport | None:
    """None when it is not what encode_report of this version writes."""
    try:
        data: dict[str, Any] = json.loads(raw)
        plain = {name: data[name] for name in _PLAIN}
        classes = {name: ClassCounts(**counts) for name, counts in data["classes"].items()}
        pairs = {(prefill, decode): number for prefill, decode, number in data["pairs"]}
        canary = data.get("canary", 0)
        revisions = {name: decode_counts(counts) for name, counts in data.get("revisions", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    counted = [canary, *pairs.values(), *(number for counts in classes.values() for number in asdict(counts).values())]
    if not all(_is(value, _PLAIN[name]) for name, value in plain.items()) or not all(
        _is(one, (int,)) for one in counted
    ):
        return None
    if not all(_is(name, (str,)) for pair in pairs for name in pair):
        return None
    return RouterReport(**plain, classes=classes, pairs=pairs, canary=canary, revisions=revisions)


def _is(value: object, kinds: tuple[type, ...]) -> bool:
    """A bool is no number here, and a number is not negative, and one that a counter may reach."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    return not isinstance(value, int | float) or 0 <= value <= MOST_COUNTED


_TYPES: dict[type, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float)}
_NOT_PLAIN = ("classes", "pairs", "canary", "revisions")
_PLAIN = {name: _TYPES[kind] for name, kind in RouterReport.__annotations__.items() if name not in _NOT_PLAIN}
