"""The comments that keep a silent stream alive, beside its events: one thing at a time goes to the client."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Message

from router.edge import sse

QUIET_SECONDS = 15.0
EVENT = b"data: 1\n\n"


class Wire:
    """The client's end of an answer. While it is `stopped` the client reads nothing, and what is sent waits."""

    def __init__(self) -> None:
        self.said: list[bytes | str] = []
        self.began: list[bytes | str] = []
        self.num_under_way = 0
        self.most_under_way = 0
        self._reads = asyncio.Event()
        self._reads.set()

    def stop(self) -> None:
        self._reads.clear()

    def go_on(self) -> None:
        self._reads.set()

    async def send(self, message: Message) -> None:
        what = message.get("body", "head")
        self.began.append(what)
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            await self._reads.wait()
            self.said.append(what)
        finally:
            self.num_under_way -= 1


class Time:
    """The loop's timers, which go off when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[asyncio.Handle, float]] = []

    def call_later(self, seconds: float, callback: Callable[..., None], *args: Any) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, asyncio.get_running_loop())
        self._timers.append((handle, self.now + seconds))
        return handle

    def pass_by(self, seconds: float = QUIET_SECONDS) -> None:
        self.now += seconds
        due = [timer for timer in self._timers if timer[1] <= self.now]
        self._timers = [timer for timer in self._timers if timer not in due]
        for handle, _ in due:
            if not handle.cancelled():
                handle._run()


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time, loop = Time(), asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", time.call_later)
    monkeypatch.setattr(loop, "time", lambda: time.now)
    return time


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def events(wire: Wire, time: Time) -> sse.Events:
    return sse.Events(wire.send, QUIET_SECONDS)


async def turn() -> None:
    """Lets all that can run do so: a handful of turns of the loop are more than any of it takes."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_silence_is_broken_by_a_comment_and_the_answer_goes_on(
    events: sse.Events, wire: Wire, time: Time
) -> None:
    with events.kept_alive():
        time.pass_by()
        await turn()
        assert events.begun
        await events.say(EVENT)
        time.pass_by(QUIET_SECONDS - 1)
        await turn()
        time.pass_by(1)
        await turn()
        await events.end(sse.DONE)
    assert wire.said == ["head", sse.COMMENT, EVENT, sse.COMMENT, sse.DONE]


@pytest.mark.parametrize("head_first", [True, False])
async def test_nothing_is_said_beside_what_waits_for_the_client(
    events: sse.Events, wire: Wire, time: Time, head_first: bool
) -> None:
    """A client that does not read hears no comment before, beside or behind what waits for it."""
    with events.kept_alive():
        if head_first:
            await events.begin()
        wire.stop()
        saying = asyncio.ensure_future(events.say(EVENT) if head_first else events.begin())
        await turn()
        for _ in range(3):
            time.pass_by()
            await turn()
        assert wire.began[head_first:] == [EVENT if head_first else "head"]
        wire.go_on()
        await saying
        time.pass_by(QUIET_SECONDS - 1)
        await turn()
        assert sse.COMMENT not in wire.said, "it was silent since the client had read the last"
        time.pass_by(1)
        await turn()
        assert wire.said[-1] == sse.COMMENT
        await events.end(sse.DONE)
    assert wire.most_under_way == 1


async def test_an_event_that_comes_while_a_comment_ends_waits_for_it_and_for_no_second_one(
    events: sse.Events, wire: Wire, time: Time
) -> None:
    with events.kept_alive():
        await events.begin()
        wire.stop()
        time.pass_by()
        await turn()
        saying = asyncio.ensure_future(events.say(EVENT))
        await turn()
        wire.go_on()
        await asyncio.sleep(0)  # the comment is over, and who waits for it is yet to hear of it
        time.pass_by()
        await saying
        await events.end(sse.DONE)
        await turn()
    assert wire.said == ["head", sse.COMMENT, EVENT, sse.DONE]
    assert wire.most_under_way == 1


@pytest.mark.parametrize("client", ["reads", "stopped"])
async def test_an_error_comes_behind_the_comment_that_began_the_answer(
    events: sse.Events, wire: Wire, time: Time, client: str
) -> None:
    """Its head is said once, and first, even where the client had not taken it yet."""
    if client == "stopped":
        wire.stop()
    with suppress(ValueError), events.kept_alive():
        time.pass_by()
        if client == "stopped":
            await turn()
        raise ValueError
    assert events.begun
    ending = asyncio.ensure_future(events.end(EVENT))
    await turn()
    wire.go_on()
    await ending
    await turn()
    assert wire.said == ["head", sse.COMMENT, EVENT]
    assert wire.most_under_way == 1


async def test_a_client_that_goes_away_hears_no_comment(events: sse.Events, wire: Wire, time: Time) -> None:
    wire.stop()

    async def answer() -> None:
        with events.kept_alive():
            await asyncio.get_running_loop().create_future()

    answering = asyncio.ensure_future(answer())
    await turn()
    time.pass_by()
    await turn()
    answering.cancel()
    await turn()
    assert answering.cancelled()
    assert wire.num_under_way == 0, "and what it did not take is given up"
    wire.go_on()
    time.pass_by()
    await turn()
    assert wire.said == []


async def test_no_comment_is_said_where_none_is_wanted(wire: Wire, time: Time) -> None:
    events = sse.Events(wire.send, 0)
    with events.kept_alive():
        time.pass_by(1e6)
        await turn()
    assert not events.begun
    assert wire.began == []
