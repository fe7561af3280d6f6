"""Profiles of a live worker, one at a time."""

import asyncio

from headrace.errors import Unavailable
from workers.engine import settled
from workers.ranks.executor import Executor
from workers.ranks.profiles import RankProfile


class Profiles:
    """Owns the one that is being taken."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._taking = False

    async def take(self, num_steps: int, seconds: float) -> tuple[RankProfile, ...]:
        """Of so many steps, or of those that come within `seconds`. Unavailable while another is being taken."""
        if self._taking:
            raise Unavailable("a profile is being taken already: ask again when it is over")
        self._taking = True
        try:
            found = asyncio.ensure_future(settled(self._executor.profile(num_steps)))
            await asyncio.wait({found}, timeout=seconds)
            if not found.done():
                self._executor.end_profile()
            return await found
        except asyncio.CancelledError:  # who asked is gone: the ranks need not go on
            self._executor.end_profile()
            raise
        finally:
            self._taking = False
