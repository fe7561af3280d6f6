"""How a hand-off ends, for tests of both its sides."""

import asyncio

from headrace.values import PrefillTarget, RequestKey
from tests.session import Answer, Router
from tests.unit.workers.rig import (
    Rig,
)


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
