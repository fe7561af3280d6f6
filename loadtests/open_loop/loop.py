"""The open loop: each request goes out at its time, and its answer is heard beside all others in one process."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import assert_never

from headrace.clock import Clock, SystemClock
from headrace.errors import DeadlineExceeded, HeadraceError, Overloaded
from loadtests.open_loop.answers import Answer, Ask, Effort, Outcome, Run
from loadtests.open_loop.client import Call, Client, OwnLimit, Unreachable

TIMEOUT_SECONDS = 600.0
GIVE_UP_AFTER = 10
SAMPLE_SECONDS = 0.05
SENT_AT_ONCE = 64  # of those that are due; one a turn of a loop with thousands of streams would fall behind for good


@dataclass
class Progress:
    """How far a run is; the loop writes, who shows it reads."""

    num_sent: int = 0
    num_in_flight: int = 0
    num_tokens: int = 0
    peak_in_flight: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    unreachable_in_a_row: int = 0
    last_unreachable: str = ""

    @property
    def lost(self) -> bool:
        """Nobody is there any more: to go on would measure a refused connection."""
        return self.unreachable_in_a_row >= GIVE_UP_AFTER


async def run(
    asks: Iterable[Ask],
    client: Client,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Run:
    """Sends all, hears all to their ends. Unreachable when the server went away: GIVE_UP_AFTER requests in a row met
    nobody, or nobody is there at the end. OwnLimit when it is this machine that allows no more."""
    clock, progress = clock or SystemClock(), progress or Progress()
    answers: list[Answer] = []
    began = clock.now()

    def now() -> float:
        return clock.now() - began

    try:
        async with _gauged(clock) as gauge, asyncio.TaskGroup() as requests:
            for ask in asks:
                call = client.prepare(ask)
                wait_seconds = ask.due - now()
                if wait_seconds > 0 or len(answers) % SENT_AT_ONCE == 0:
                    await asyncio.sleep(wait_seconds)
                if progress.lost:
                    break
                answer = Answer(ask.number, ask.due, now, asked_tokens=ask.max_tokens)
                answers.append(answer)
                requests.create_task(_hear(call, answer, timeout_seconds, progress))
    except* OwnLimit as limits:
        raise OwnLimit(f"{limits.exceptions[0]}, at {progress.peak_in_flight} streams") from limits
    await _still_there(client, answers, progress)
    lateness = [answer.sent - answer.due for answer in answers]
    return Run(answers, answers[-1].due if answers else 0.0, progress.peak_in_flight, gauge.effort(lateness))


async def _hear(call: Call, answer: Answer, timeout_seconds: float, progress: Progress) -> None:
    """One request to its end. The time that it may take counts from its due time, too."""
    answer.sent = answer.now()
    progress.num_sent += 1
    progress.num_in_flight += 1
    progress.peak_in_flight = max(progress.peak_in_flight, progress.num_in_flight)
    error: HeadraceError | None = None
    try:
        async with asyncio.timeout(answer.due + timeout_seconds - answer.sent):
            await call(answer)
    except TimeoutError:
        error = DeadlineExceeded(f"not answered within {timeout_seconds:g} s")
    except OwnLimit:
        raise
    except HeadraceError as met:
        error = met
    finally:
        progress.num_in_flight -= 1
    outcome = _outcome(error)
    answer.end(outcome, "" if error is None else f"{error.type}: {error.message}")
    progress.outcomes[outcome] += 1
    progress.num_tokens += answer.num_tokens
    if isinstance(error, Unreachable):
        progress.unreachable_in_a_row += 1
        progress.last_unreachable = error.message
    else:
        progress.unreachable_in_a_row = 0


def _outcome(error: HeadraceError | None) -> Outcome:
    match error:
        case None:
            return Outcome.FINISHED
        case Overloaded():
            return Outcome.SHED
        case DeadlineExceeded():
            return Outcome.TIMED_OUT
        case HeadraceError():
            return Outcome.FAILED
        case _:
            assert_never(error)


async def _still_there(client: Client, answers: list[Answer], progress: Progress) -> None:
    """A server that came back is one that served; those that met nobody have failed."""
    if not progress.unreachable_in_a_row:
        return
    try:
        if not progress.lost:
            await client.served()
            return
    except Unreachable as error:
        progress.last_unreachable = error.message
    finished = progress.outcomes[Outcome.FINISHED]
    raise Unreachable(
        f"the server went away {max(answer.ended for answer in answers):.1f} s into the traffic, after {finished} of "
        f"{len(answers)} requests sent were answered: {progress.last_unreachable}"
    )


@dataclass
class _Gauge:
    """What the generator costs, sampled beside it."""

    lag: "array[float]"
    began: float
    cpu_began: float
    clock: Clock

    def effort(self, lateness: list[float]) -> Effort:
        seconds = self.clock.now() - self.began
        share = (time.process_time() - self.cpu_began) / seconds if seconds else 0.0
        return Effort(lateness, self.lag, share)


@asynccontextmanager
async def _gauged(clock: Clock) -> AsyncIterator[_Gauge]:
    gauge = _Gauge(array("d"), clock.now(), time.process_time(), clock)

    async def sample() -> None:
        while True:
            before = clock.now()
            await asyncio.sleep(SAMPLE_SECONDS)
            gauge.lag.append(max(clock.now() - before - SAMPLE_SECONDS, 0.0))

    sampling = asyncio.create_task(sample())
    try:
        yield gauge
    finally:
        sampling.cancel()
