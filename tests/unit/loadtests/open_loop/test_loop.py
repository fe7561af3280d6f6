"""The open loop under virtual time, before a server whose times are a script's."""

import asyncio
from collections.abc import Sequence

import pytest

from headrace.errors import InvalidRequest, Overloaded
from headrace.traces import Prompts, TraceRow
from loadtests.open_loop.answers import Answer, Ask, Outcome, Run, asks
from loadtests.open_loop.client import Call, Unreachable
from loadtests.open_loop.loop import GIVE_UP_AFTER, Progress, run
from tests.unit.loadtests.open_loop.scripted import Scripted, tokens
from tests.unit.loadtests.open_loop.virtual_loop import VirtualLoop, in_virtual_time


def traffic(times: Sequence[float], num_tokens: int = 3) -> list[Ask]:
    return list(asks([TraceRow(0, at, 8, num_tokens) for at in times], Prompts(400)))


def ran(client: Scripted, sent: Sequence[Ask], timeout_seconds: float = 60.0, progress: Progress | None = None) -> Run:
    async def work() -> Run:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return await run(sent, client, timeout_seconds=timeout_seconds, progress=progress, clock=loop)

    return in_virtual_time(work())


def test_requests_go_out_at_their_times_though_none_was_answered() -> None:
    found = ran(Scripted(tokens(first_after=30.0, gap=1.0)), traffic([0.0, 0.5, 0.5, 2.0]))
    assert [answer.sent for answer in found.answers] == pytest.approx([0.0, 0.5, 0.5, 2.0])
    assert found.peak_in_flight == 4
    assert {answer.outcome for answer in found.answers} == {Outcome.FINISHED}
    assert [answer.ttft_seconds for answer in found.answers] == pytest.approx([30.0] * 4)
    assert [answer.tpot_seconds for answer in found.answers] == pytest.approx([1.0] * 4)
    assert found.answers[3].e2e_seconds == pytest.approx(32.0)
    assert found.seconds == 2.0


def test_latency_counts_from_the_due_time_when_the_generator_is_late() -> None:
    """Coordinated omission: a generator that was held up hides no wait."""
    sent = traffic([0.0, 0.1, 0.2])

    class HeldUp(Scripted):
        def prepare(self, ask: Ask) -> Call:
            if ask.number == 1:  # as a process that got no CPU for 5 s
                loop = asyncio.get_running_loop()
                assert isinstance(loop, VirtualLoop)
                loop._jumping.seconds += 5.0
            return super().prepare(ask)

    found = ran(HeldUp(tokens(first_after=0.5, gap=0.1)), sent)
    assert found.effort.lateness_seconds == pytest.approx([5.0, 4.9, 4.8])
    assert [answer.ttft_seconds for answer in found.answers] == pytest.approx([5.5, 5.4, 5.3])


def test_what_is_due_goes_out_in_few_turns_of_a_loop_that_is_slow() -> None:
    """With thousands of streams a turn takes long; one send a turn fell behind by seconds and never caught up."""

    async def work() -> Run:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        async def slow_turns() -> None:
            while True:
                loop._jumping.seconds += 0.01
                await asyncio.sleep(0)

        turning = asyncio.create_task(slow_turns())
        try:
            return await run(traffic([at * 0.001 for at in range(1000)]), Scripted(), clock=loop)
        finally:
            turning.cancel()

    lateness = in_virtual_time(work()).effort.lateness_seconds
    assert max(lateness) < 0.05


def test_each_end_is_told_apart_and_counts_from_the_due_time() -> None:
    ends: dict[int, Exception] = {1: Overloaded("full"), 2: InvalidRequest("too long")}

    def script(ask: Ask, answer: Answer) -> Call:
        async def call(answer: Answer) -> None:
            answer.hear(1)
            if ask.number in ends:
                raise ends[ask.number]
            await asyncio.sleep(100.0 if ask.number == 3 else 1.0)

        return call

    progress = Progress()
    found = ran(Scripted(script), traffic([0.0, 1.0, 2.0, 3.0]), timeout_seconds=10.0, progress=progress)
    assert [str(answer.outcome) for answer in found.answers] == ["finished", "shed", "failed", "timed_out"]
    assert found.answers[3].e2e_seconds == pytest.approx(10.0)
    assert found.answers[2].error == "InvalidRequest: too long"
    assert sum(progress.outcomes.values()) == progress.num_sent == 4
    assert progress.num_in_flight == 0


def test_a_server_that_goes_away_ends_the_run_with_numbers() -> None:
    client = Scripted(tokens(first_after=0.1, gap=0.1))

    def script(ask: Ask, answer: Answer) -> Call:
        client.here = ask.number < 5
        return tokens(0.1, 0.1)(ask, answer)

    client._script = script
    progress = Progress()
    with pytest.raises(
        Unreachable, match=r"went away .* s into the traffic, after 6 of 1\d requests sent were answered"
    ):
        ran(client, traffic([at * 1.0 for at in range(100)]), progress=progress)
    assert progress.num_sent <= 6 + GIVE_UP_AFTER + 1


def test_a_server_that_is_back_at_the_end_ends_no_run() -> None:
    client = Scripted(tokens(first_after=0.1, gap=0.1))

    def script(ask: Ask, answer: Answer) -> Call:
        async def call(answer: Answer) -> None:
            raise Unreachable("the connection broke")

        return call if ask.number == 3 else tokens(0.1, 0.1)(ask, answer)

    client._script = script
    found = ran(client, traffic([0.0, 1.0, 2.0, 3.0]))
    assert [str(answer.outcome) for answer in found.answers] == ["finished"] * 3 + ["failed"]


def test_no_traffic_is_a_run_without_answers() -> None:
    found = ran(Scripted(), [])
    assert (found.answers, found.seconds, found.peak_in_flight) == ([], 0.0, 0)
