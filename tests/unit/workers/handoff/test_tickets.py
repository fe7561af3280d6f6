"""Tickets on the prefill side, as their pullers hear of them."""

import asyncio
from dataclasses import replace

from headrace.clock import ManualClock
from headrace.errors import DeadlineExceeded, InvalidRequest, TransferFailed
from headrace.values import Role
from tests.unit.workers.handoff.ends import a_puller, aborted, ticket_of
from tests.unit.workers.rig import HANDOFF, a_request, a_worker
from workers.handoff import messages

PATIENT = HANDOFF.model_copy(update={"transfer_seconds": 600.0})


async def test_of_two_attempts_the_newer_counts_and_the_older_ones_puller_ends_nothing() -> None:
    older = a_request(length=20)
    newer = replace(older, key=older.key.next_attempt())
    async with a_worker("p0", role=Role.PREFILL, handoff=PATIENT) as rig, asyncio.timeout(20):
        rig.executor.go_steps.clear()
        one = await a_puller(rig, older)
        while not rig.worker.num_requests:
            await rig.worker.changed()
        other = await a_puller(rig, newer, "d1")
        while rig.worker.keys() != ([], [newer.key]):
            await rig.worker.changed()
        assert rig.worker.load().num_running + rig.worker.load().num_waiting == 1
        await one.write(messages.release(older.key))
        await one.write(ticket_of(older))
        assert isinstance(await aborted(one), TransferFailed)
        await one.write(messages.renew(older.key, heard=True))
        assert "is not here" in str(await aborted(one))
        assert rig.worker.keys() == ([], [newer.key])
        rig.executor.go_steps.set()
        while not (await other.read()).announce.last:
            pass
        await other.write(messages.release(newer.key))
        await rig.idle()
        one.cancel()
        other.cancel()


async def test_a_ticket_whose_time_is_up_is_told_to_its_puller(clock: ManualClock) -> None:
    asked = a_request(length=20, seconds_left=5.0)
    async with a_worker("p0", role=Role.PREFILL, handoff=PATIENT, clock=clock) as rig, asyncio.timeout(20):
        rig.executor.go_steps.clear()
        call = await a_puller(rig, asked)
        while not rig.worker.num_requests:
            await rig.worker.changed()
        clock.advance(6.0)
        assert isinstance(await aborted(call), DeadlineExceeded)
        rig.executor.go_steps.set()
        await rig.idle()
        call.cancel()


async def test_a_ticket_that_makes_no_sense_ends_itself_alone() -> None:
    """Its stream carries those of all other requests between the two."""
    async with a_worker("p0", role=Role.PREFILL, handoff=PATIENT) as rig, asyncio.timeout(20):
        rig.executor.go_steps.clear()
        call = await a_puller(rig, a_request(length=20))
        malformed = ticket_of(a_request("malformed", length=20))
        malformed.ticket.prompt_token_ids = b"123"
        await call.write(malformed)
        assert isinstance(await aborted(call), InvalidRequest)
        rig.executor.go_steps.set()
        while not (await call.read()).announce.last:
            pass
        call.cancel()
