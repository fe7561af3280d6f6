"""How a hand-off ends, for tests of both its sides, and a puller of which the test is the whole worker."""

import asyncio
from dataclasses import replace
from typing import Any

from headrace import wire
from headrace.errors import HeadraceError
from headrace.v1 import transfer_pb2, transfer_pb2_grpc
from headrace.values import PrefillTarget, Request, RequestKey, Ticket
from tests.session import Answer, Router
from tests.unit.workers.rig import Rig
from workers.handoff import messages


def said(answer: Answer) -> object:
    assert answer.error is None, answer.error
    return dict(answer.tokens), dict(answer.finishes), dict(answer.logprobs), answer.usage


async def both_idle(*rigs: Rig) -> None:
    async with asyncio.timeout(10):
        for rig in rigs:
            await rig.idle()


async def answer_to_peer_lost(router: Router, answer: Answer, target: PrefillTarget | None) -> None:
    await answer.until(lambda answer: answer.lost)
    router.place(RequestKey(answer.lost[0].key.request_id, answer.lost[0].key.attempt + 1), target)


async def a_puller(rig: Rig, request: Request, worker_id: str = "d0", **said: Any) -> Any:
    """Its stream to a prefill worker, on which a ticket has gone, and nothing else does. `said`: of itself."""
    call = transfer_pb2_grpc.TransferStub(rig.channel).Link()
    hello = replace(rig.worker._hello, worker_id=worker_id, **said)
    await call.write(transfer_pb2.PullerMessage(hello=messages.hello_to_pb(hello)))
    await call.write(ticket_of(request))
    return call


def ticket_of(request: Request) -> transfer_pb2.PullerMessage:
    return transfer_pb2.PullerMessage(ticket=wire.ticket_to_pb(Ticket(request, 0, "r0")))


async def aborted(call: Any) -> HeadraceError:
    """Why the source gave a ticket up, once it says so."""
    while (message := await call.read()).WhichOneof("kind") != "abort":
        pass
    return wire.error_from_pb(message.abort.reason)
