"""Revisions of a served model: what routers are told of them, under one key in Redis.

A revision is a set of settings under which workers serve the model. `base` serves; beside it there may be a canary, to
which a part of the conversations goes. The leading controller alone writes this, at every turn of its loop: where `beat`
stands still nobody judges the canary, and routers give it nothing.
"""

import json
import math
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from headrace.values import STABLE

MAX_NAME = 63


@dataclass(frozen=True, slots=True)
class Split:
    """`number` counts canaries: what a router counted under another one says nothing of this. `canary` is "" where there
    is none. `percent` of the conversations are its own, 0 while it starts and once it is rolled back."""

    number: int = 0
    base: str = STABLE
    canary: str = ""
    percent: float = 0.0
    beat: int = 0

    def takes(self, conversation: str) -> bool:
        """Whether a conversation is the canary's: always the same of one conversation, on whatever router, and one that is
        stays so as the share grows. Each canary draws anew who meets it first."""
        if not self.percent:
            return False
        drawn = blake2b(f"{self.number}\0{self.canary}\0{conversation}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn) * 100 < self.percent * 2**64


def encode_split(split: Split) -> str:
    return json.dumps(asdict(split), separators=(",", ":"))


def decode_split(raw: bytes | str) -> Split | None:
    """None when it is not what encode_split of this version writes."""
    try:
        data: dict[str, Any] = json.loads(raw)
        split = Split(**data)
    except (ValueError, TypeError, RecursionError):
        return None
    whole = all(type(number) is int and 0 <= number < 2**63 for number in (split.number, split.beat))
    named = all(isinstance(name, str) and len(name) <= MAX_NAME for name in (split.base, split.canary))
    percent = split.percent
    if not whole or not named or isinstance(percent, bool) or not isinstance(percent, int | float):
        return None
    return split if math.isfinite(percent) and 0 <= percent <= 100 and split.base else None
