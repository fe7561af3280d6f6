"""Several streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")
ROOM_PER_STREAM = 8


async def together(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """The items of all streams as they come, each with its stream's position. The first stream that fails ends all; all
    are closed when this ends. A reader that lags holds the streams back."""
    items: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()
    room = asyncio.Semaphore(ROOM_PER_STREAM * len(streams))

    async def pump(position: int, stream: AsyncGenerator[T]) -> None:
        async with aclosing(stream):
            async for item in stream:
                await room.acquire()
                items.put_nowait((position, item))

    tasks = [asyncio.ensure_future(pump(position, stream)) for position, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(lambda _: items.put_nowait(None))
    try:
        for _ in tasks:
            while (item := await items.get()) is not None:
                room.release()
                yield item
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
