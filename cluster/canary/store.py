"""The canary's keys in Redis: its state, what was counted, what happened, and what routers are told.

The leading controller writes all of them in one step at each of its turns, fenced: only while it leads, and only over the
state that it read. Operators write the state and why, over the one that they read, and the controller acts on it. Every
call raises StoreUnavailable when Redis is away; what is no value of ours counts as absent. A state that another version
wrote does not: whoever takes it for none would end what it describes."""

import json
from dataclasses import dataclass
from typing import Any

from cluster.canary.evidence import decode_evidence, encode_evidence
from cluster.canary.report import Standing
from cluster.canary.values import Event, Evidence, State, parsed
from cluster.state import text
from headrace.errors import ConfigError
from headrace.keys import Keys
from headrace.revisions import Split, encode_split
from headrace.store import Store
from router.decisions import codec

KEPT = 64  # of the events

# KEYS: state, leader, revisions, evidence, events. ARGV: the state that was read ("" of none), who leads ("" of an
# operator, who writes state and events alone), the state, revisions, evidence, how many events are kept, then new events.
# 1 when written.
_WRITE = """
if redis.call('TYPE', KEYS[1]).ok ~= 'string' then redis.call('DEL', KEYS[1]) end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
if ARGV[2] ~= '' then
  if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
  redis.call('SET', KEYS[3], ARGV[4])
  redis.call('SET', KEYS[4], ARGV[5])
end
redis.call('SET', KEYS[1], ARGV[3])
if #ARGV > 6 then
  if redis.call('TYPE', KEYS[5]).ok ~= 'list' then redis.call('DEL', KEYS[5]) end
  for at = 7, #ARGV do redis.call('RPUSH', KEYS[5], ARGV[at]) end
  redis.call('LTRIM', KEYS[5], -tonumber(ARGV[6]), -1)
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Found:
    """The state, and the text of it that whoever writes another must name; `state` None: there is none, or it is `foreign`,
    of another version."""

    raw: str
    state: State | None
    foreign: bool = False


class CanaryState:
    """One process's view of these keys."""

    def __init__(self, store: Store, cluster: str) -> None:
        self._store = store
        self._keys = Keys(cluster)

    async def time(self) -> float:
        return await self._store.time()

    async def read(self) -> Found:
        raw = await text(self._store, self._keys.canary)
        if raw is None:
            return Found("", None)
        state = decode_state(raw)
        return Found(raw.decode(errors="replace"), state, state is None and _is_a_state(raw))

    async def known(self) -> Found:
        """For operators: ConfigError where it is of another version."""
        found = await self.read()
        if found.foreign:
            raise ConfigError(
                "the canary's state was written by another version of headrace: ask with that one, or delete the key "
                f"{self._keys.canary} of Redis; workers of its revisions are then replaced by what the file says"
            )
        return found

    async def evidence(self) -> Evidence:
        return decode_evidence(await text(self._store, self._keys.canary_evidence)) or Evidence()

    async def events(self) -> list[Event]:
        """Oldest first."""

        async def read(redis: Any) -> list[bytes]:
            if await redis.type(self._keys.canary_events) != b"list":
                return []
            found: list[bytes] = await redis.lrange(self._keys.canary_events, 0, -1)
            return found

        return [one for raw in await self._store.call(read) if (one := _decoded_event(raw)) is not None]

    async def standing(self) -> Standing | None:
        """All of it; None where there never was a canary."""
        state = (await self.read()).state
        if state is None:
            return None
        return Standing(state, await self.evidence(), await self.events(), await self._store.time())

    async def commit(
        self, found: Found, token: str, state: State, split: Split, evidence: Evidence, events: tuple[Event, ...]
    ) -> bool:
        """One turn of the controller that leads by `token`, as a whole or not at all. Not at all, and False, where it does
        not lead any more, or an operator was quicker."""
        return await self._write(found, token, state, events, encode_split(split), encode_evidence(evidence))

    async def ask(self, found: Found, state: State, event: Event) -> bool:
        """An operator's word; False where something else was written meanwhile."""
        return await self._write(found, "", state, (event,))

    async def _write(
        self, found: Found, token: str, state: State, events: tuple[Event, ...], split: str = "", evidence: str = ""
    ) -> bool:
        keys = self._keys
        names = (keys.canary, keys.leader, keys.revisions, keys.canary_evidence, keys.canary_events)
        said = [json.dumps(codec.encode(event), separators=(",", ":")) for event in events]
        values = (found.raw, token, encode_state(state), split, evidence, str(KEPT), *said)
        return bool(await self._store.call(lambda redis: redis.eval(_WRITE, len(names), *names, *values)))


def encode_state(state: State) -> str:
    return json.dumps(codec.encode(state), separators=(",", ":"))


def decode_state(raw: bytes | str) -> State | None:
    """None when it is no state of this version."""
    try:
        state = codec.decode(State, json.loads(raw))
        parsed(state.settings)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return state


def _is_a_state(raw: bytes) -> bool:
    """Whether some version of this wrote it."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    if not isinstance(data, dict) or type(data.get("number")) is not int:
        return False
    return all(isinstance(data.get(name), str) for name in ("phase", "settings"))


def _decoded_event(raw: bytes) -> Event | None:
    try:
        return codec.decode(Event, json.loads(raw))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
