"""A process that belongs to a session: the router, the embedded Redis.

It leads a process group of its own, so that Ctrl-C reaches `headrace up` alone, which then ends things in order. It
inherits a lock that lives exactly as long as it does: see cluster.session.
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence

from cluster.session import SessionFolder, open_lock
from headrace.errors import InternalError

KILL_SECONDS = 5.0
ORPHAN_SECONDS = 5.0


class Child:
    """Owned by whoever started it; stop() or the process's own end releases it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, folder: SessionFolder) -> None:
        self.name = name
        self._process = process
        self._folder = folder

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], folder: SessionFolder, env: Mapping[str, str] | None = None
    ) -> "Child":
        """Runs `command`; its output goes to the session's log of that name."""
        lock = open_lock(folder.lock(name))
        try:
            with folder.log(name).open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder.path,
                    env={**os.environ, **(env or {})},
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        finally:
            os.close(lock)
        return cls(name, process, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status, once it ended."""
        return await self._process.wait()

    async def stop(self, seconds: float) -> None:
        """SIGTERM, and SIGKILL to its whole group when it is still there `seconds` later. Idempotent."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            await self._process.wait()

    def failure(self) -> InternalError:
        """What its end means, with the last line it logged."""
        lines = self._folder.log(self.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        return InternalError(f"{self.name} ended with status {self._process.returncode}{last}", status=self.name)


def end_leftovers(folder: SessionFolder) -> list[str]:
    """Ends what an `up` that was killed left running, the router before Redis as in an orderly end; their names."""
    session = folder.read()
    if session is None:
        return []
    children = sorted(session.children.items(), reverse=True)
    ended = [name for name, pid in children if end_orphan(folder, name, pid, ORPHAN_SECONDS)]
    folder.clear()
    return ended


def end_orphan(folder: SessionFolder, name: str, pid: int, seconds: float) -> bool:
    """Ends a child whose `headrace up` is gone, if it still lives; whether it did."""
    if pid <= 0 or not folder.child_alive(name):
        return False
    os.kill(pid, signal.SIGTERM)
    if not folder.wait_child(name, seconds):
        os.kill(pid, signal.SIGKILL)
        folder.wait_child(name, KILL_SECONDS)
    return True
