import asyncio

import pytest

from headrace.errors import InternalError, Overloaded, TransferFailed
from headrace.values import FinishReason, SequenceOutput
from router.mailbox import MAX_PENDING_OUTPUTS, WAKES_PER_TURN, GivenUp, Mailbox, Pacer, PeerFailed
from tests.unit.router.mailboxes import KEY, box, output


class ManualLoop:
    """The little of an event loop that a Pacer asks for, with time by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, object]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, action: object) -> asyncio.Handle:
        self.timers.append((when, action))
        return asyncio.Handle(lambda: None, (), asyncio.get_event_loop_policy().get_event_loop())  # only kept, not run

    def call_soon(self, action: object) -> asyncio.Handle:
        return self.call_at(self.now, action)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while due := [timer for timer in self.timers if timer[0] <= self.now]:
            for timer in due:
                self.timers.remove(timer)
                timer[1]()  # type: ignore[operator]


async def test_what_was_said_is_taken_in_order_and_a_failure_after_what_came_before_it() -> None:
    mailbox = box(Pacer(0.0, asyncio.get_running_loop()))
    failure = PeerFailed("p", TransferFailed("x"))
    mailbox.feed(output(1))
    mailbox.feed(output(2))
    mailbox.fail(failure)
    mailbox.feed(output(3))
    assert [await mailbox.take() for _ in range(3)] == [[output(1), output(2)], failure, [output(3)]]


async def test_a_failure_reaches_a_waiting_request_after_the_outputs_of_the_same_moment() -> None:
    mailbox = box(Pacer(0.0, asyncio.get_running_loop()))
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    failure = GivenUp(Overloaded("x"))
    mailbox.feed(output(1))
    mailbox.feed(output(2))
    mailbox.fail(failure)
    assert [await taking, await mailbox.take(), await mailbox.take()] == [[output(1)], [output(2)], failure]


async def test_what_relay_raises_reaches_the_request_that_takes() -> None:
    def refuses(outputs: list[SequenceOutput]) -> None:
        raise InternalError(f"{len(outputs)} outputs that do not add up")

    for waits in (True, False):
        mailbox = Mailbox(KEY, Pacer(0.0, asyncio.get_running_loop()), refuses)
        taking = asyncio.create_task(mailbox.take())
        if waits:
            await asyncio.sleep(0)
        mailbox.feed(output(1))
        with pytest.raises(InternalError, match="1 outputs"):
            await taking


async def test_taking_waits_until_something_is_said() -> None:
    mailbox = box(Pacer(0.0, asyncio.get_running_loop()))
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    mailbox.feed(output(1))
    assert await taking == [output(1)]


async def test_a_taker_that_is_cancelled_leaves_all_for_the_next() -> None:
    mailbox = box(Pacer(0.0, asyncio.get_running_loop()))
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking])
    mailbox.feed(output(1))
    assert await mailbox.take() == [output(1)]


async def test_a_client_that_does_not_read_loses_its_request_and_memory_stays_bounded() -> None:
    mailbox = box(Pacer(0.0, asyncio.get_running_loop()))
    for number in range(3 * MAX_PENDING_OUTPUTS):
        mailbox.feed(output(number + 1))
    said, last = await mailbox.take(), await mailbox.take()
    assert isinstance(said, list)
    assert len(said) == MAX_PENDING_OUTPUTS
    assert isinstance(last, GivenUp)
    assert isinstance(last.error, Overloaded)
    assert last.error.numbers == {"limit": str(MAX_PENDING_OUTPUTS)}


class Load:
    """How much CPU the process is said to have used."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
async def loop() -> ManualLoop:
    return ManualLoop()


def pacer_under(load: Load, loop: ManualLoop, coalesce_seconds: float = 0.05) -> Pacer:
    return Pacer(coalesce_seconds, loop, load)  # type: ignore[arg-type]


async def until_coalescing(pacer: Pacer, load: Load, loop: ManualLoop) -> None:
    other = box(pacer)
    other.feed(output(1))
    loop.advance(1.0)
    load.seconds += 0.9
    other.feed(output(2))
    assert pacer.coalescing
    loop.advance(1e-3)


async def test_an_idle_router_passes_every_token_on_at_once(loop: ManualLoop) -> None:
    load = Load()
    mailbox = box(pacer_under(load, loop))
    for number in range(1, 100):
        taking = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.feed(output(number))
        assert await taking == [output(number)]
        loop.advance(0.02)
        load.seconds += 0.002


async def test_under_load_the_first_token_goes_at_once_and_later_ones_wait_a_bounded_time(loop: ManualLoop) -> None:
    load = Load()
    pacer = pacer_under(load, loop)
    await until_coalescing(pacer, load, loop)
    mailbox = box(pacer)
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.feed(output(1))
    assert await taking == [output(1)]
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.feed(output(2))
    loop.advance(0.03)
    mailbox.feed(output(3))
    await asyncio.sleep(0)
    assert not taking.done()
    loop.advance(0.021)
    assert await taking == [output(2), output(3)]


async def test_under_load_a_finish_or_a_failure_does_not_wait(loop: ManualLoop) -> None:
    load = Load()
    pacer = pacer_under(load, loop)
    await until_coalescing(pacer, load, loop)
    last, failure = output(3, FinishReason.STOP), GivenUp(Overloaded("x"))
    for ends, expected in (
        (lambda mailbox: mailbox.feed(last), [output(2), last]),
        (lambda mailbox: mailbox.fail(failure), [output(2)]),
    ):
        mailbox = box(pacer)
        mailbox.feed(output(1))
        await mailbox.take()
        taking = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.feed(output(2))
        ends(mailbox)
        assert await taking == expected
    assert await mailbox.take() == failure


async def test_when_the_load_is_gone_tokens_pass_at_once_again(loop: ManualLoop) -> None:
    load = Load()
    pacer = pacer_under(load, loop)
    await until_coalescing(pacer, load, loop)
    mailbox = box(pacer)
    mailbox.feed(output(1))
    loop.advance(1.0)
    load.seconds += 0.1
    mailbox.feed(output(2))
    assert not pacer.coalescing


async def test_many_streams_that_are_due_at_once_are_woken_a_few_at_a_time(loop: ManualLoop) -> None:
    load = Load()
    pacer = pacer_under(load, loop)
    await until_coalescing(pacer, load, loop)
    mailboxes = [box(pacer) for _ in range(2 * WAKES_PER_TURN)]
    for mailbox in mailboxes:
        mailbox.feed(output(1))
        await mailbox.take()
    taking = [asyncio.create_task(mailbox.take()) for mailbox in mailboxes]
    await asyncio.sleep(0)
    for mailbox in mailboxes:
        mailbox.feed(output(2))
    loop.now += 0.06
    (timer,) = [timer for timer in loop.timers if timer[0] <= loop.now]
    loop.timers.remove(timer)
    timer[1]()  # type: ignore[operator]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(task.done() for task in taking) == WAKES_PER_TURN
    loop.advance(0.0)
    await asyncio.gather(*taking)
