"""A decision as a value: the whole input of one `place`, and what came of it. Pure.

It can be written down, read again by this version, and made again by the same `place`. It holds worker ids, counts and
times of the router's clock; of a prompt nothing but how long it is and how much of it who holds.
"""

import json
from dataclasses import dataclass
from typing import Literal

from headrace.values import RequestKey
from router.decisions.codec import decode, encode
from router.decisions.placement import NoCapacity, Placed, Placement, Why, place
from router.decisions.view import View

VERSION = 2


@dataclass(frozen=True, slots=True)
class Decision:
    """Input: `why.ask` (with the draw among near-equals), `view`, `now`. Output: the rest of `why`, the workers, and what
    the prefilling one was expected to hold and to compute; or `refused`, why nobody took it. `request_id` is the client's,
    `key` the router's own name for it and the attempt."""

    request_id: str
    key: RequestKey
    now: float
    view: View
    why: Why
    decode: str | None = None
    prefill: str | None = None
    cached_tokens: int = 0
    prefill_tokens: int = 0
    refused: Literal["no_workers", "draining", "context", "excluded"] | None = None

    @classmethod
    def of(cls, request_id: str, key: RequestKey, view: View, now: float, placement: Placement) -> "Decision":
        match placement:
            case NoCapacity(reason=reason, why=why):
                return cls(request_id, key, now, view, why, refused=reason)
            case Placed(decode=decode, prefill=prefill, why=why):
                return cls(
                    request_id,
                    key,
                    now,
                    view,
                    why,
                    decode.worker_id,
                    prefill.worker_id if prefill is not None else None,
                    placement.cached_tokens,
                    placement.prefill_tokens,
                )

    def again(self) -> "Decision":
        """What `place` says to the same input now: equal to this one, unless `place` has changed since."""
        return Decision.of(self.request_id, self.key, self.view, self.now, place(self.why.ask, self.view, self.now))


def to_line(decision: Decision, unix_seconds: float) -> str:
    """One line of JSON, without its end. The time of day is for people: nothing is decided by it."""
    line = {"version": VERSION, "at": unix_seconds, "decision": encode(decision)}
    return json.dumps(line, separators=(",", ":"), allow_nan=False)


def from_line(line: str) -> Decision:
    """ValueError when it is no decision of this version."""
    return from_data(json.loads(line))


def from_data(data: object) -> Decision:
    """The same, from a line that is parsed already."""
    if not isinstance(data, dict) or "version" not in data or "decision" not in data:
        raise ValueError("not a logged decision")
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']!r} of the decision log; this build reads {VERSION}")
    return decode(Decision, data["decision"])
