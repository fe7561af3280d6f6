"""A server that answers the open loop as a script says."""

import asyncio
from collections.abc import Callable

from loadtests.open_loop.answers import Answer, Ask
from loadtests.open_loop.client import Call, Served, Unreachable


class Scripted:
    """Answers each request as its script says; `here` is whether anybody answers at all."""

    def __init__(self, script: Callable[[Ask, Answer], Call] | None = None, here: bool = True) -> None:
        self._script = script
        self.here = here

    async def served(self) -> Served:
        if not self.here:
            raise Unreachable("refused")
        return Served("scripted", 0)

    def prepare(self, ask: Ask) -> Call:
        async def call(answer: Answer) -> None:
            if not self.here:
                raise Unreachable("refused")
            if self._script is not None:
                await self._script(ask, answer)(answer)

        return call


def tokens(first_after: float, gap: float) -> Callable[[Ask, Answer], Call]:
    def script(ask: Ask, answer: Answer) -> Call:
        async def call(answer: Answer) -> None:
            await asyncio.sleep(first_after)
            answer.hear(1)
            for _ in range(ask.max_tokens - 1):
                await asyncio.sleep(gap)
                answer.hear(1)

        return call

    return script
