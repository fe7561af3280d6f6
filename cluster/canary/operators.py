"""What operators may ask of a canary: each answers the state that follows, and why it does, or a ConfigError that says what
is in the way. Pure; the leading controller acts on it within a turn."""

from dataclasses import replace

from cluster.canary.control import begin, is_configured
from cluster.canary.values import Event, Phase, State, written
from headrace.config import CanaryConfig, ClusterConfig
from headrace.errors import ConfigError

MAX_REASON = 200
Asked = tuple[State, Event]


def start(
    before: State | None, config: ClusterConfig, canary: CanaryConfig, percent: float | None, now: float
) -> Asked:
    if before is not None and before.phase.under_way:
        raise ConfigError(f"canary {before.canary.revision} is {before.phase.value}: promote or abort it first")
    if before is not None and before.phase is Phase.PROMOTED and not is_configured(config, before):
        raise ConfigError(
            f"{before.canary.revision} was promoted, and the file has other settings: write its model and engine there, or "
            "go back with `headrace canary abort`"
        )
    base = before.serving if before is not None else None
    if canary.revision == base:
        raise ConfigError.out_of_range("canary.revision", canary.revision, "another name: that is what serves")
    share = canary.percent if percent is None else _percent(percent)
    state = begin(before, share, written(canary), now)
    state = replace(state, reason="an operator starts it")
    return state, Event(now, before.phase.value if before else "", state)


def set_share(before: State | None, percent: float, now: float) -> Asked:
    state = _under_way(before)
    if state.phase is Phase.PROMOTING:
        raise ConfigError(f"canary {state.canary.revision} is being promoted: its share follows its workers")
    state = replace(state, percent=_percent(percent), reason=f"an operator gives it {percent:g} %")
    return state, Event(now, state.phase.value, state)


def promote(before: State | None, now: float, *, force: bool) -> Asked:
    state = _under_way(before)
    if state.phase is not Phase.GOOD and not (force and state.phase is Phase.LIVE):
        more = "; --force does not wait for that" if state.phase is Phase.LIVE else ""
        raise ConfigError(f"canary {state.canary.revision} is {state.phase.value}, and not good yet{more}")
    after = replace(state, phase=Phase.PROMOTING, since=now, reason="an operator promotes it")
    return after, Event(now, state.phase.value, after)


def abort(before: State | None, reason: str, now: float) -> Asked:
    """One that was promoted goes back too: its workers are replaced by those of before, one at a time."""
    if before is None or not (before.phase.under_way or before.phase is Phase.PROMOTED):
        raise ConfigError("there is no canary to abort" + (f": it is {before.phase.value}" if before else ""))
    why = f"an operator ends it{f': {reason}' if reason else ''}"[:MAX_REASON]
    after = replace(before, phase=Phase.ABORTED, since=now, reason=why)
    return after, Event(now, before.phase.value, after)


def _under_way(state: State | None) -> State:
    if state is None or not state.phase.under_way:
        raise ConfigError("there is no canary under way" + (f": it is {state.phase.value}" if state else ""))
    return state


def _percent(percent: float) -> float:
    if not 0 <= percent <= 100:
        raise ConfigError.out_of_range("percent", percent, "a number from 0 to 100")
    return float(percent)
