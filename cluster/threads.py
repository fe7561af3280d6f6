"""Work that blocks, off the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LAST_SECONDS = 5.0


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """As asyncio.to_thread, but a cancelled caller waits for the thread first: what it starts is never left behind."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait({thread})
        raise


async def asking(work: Callable[..., T], *arguments: Any) -> T:
    """Of work that asks others and starts no process here: who is cancelled waits for it LAST_SECONDS at most, and this
    process may end while it still waits for an answer."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # maybe nobody waits for it any more

    def ask() -> None:
        try:
            result = work(*arguments)
        except BaseException as error:
            _tell(loop, answer.set_exception, error)
        else:
            _tell(loop, answer.set_result, result)

    threading.Thread(target=ask, name=getattr(work, "__name__", "asking"), daemon=True).start()
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        await asyncio.wait({answer}, timeout=LAST_SECONDS)
        raise


def _tell(loop: asyncio.AbstractEventLoop, setter: Callable[[Any], None], value: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: everybody has gone
        loop.call_soon_threadsafe(setter, value)
