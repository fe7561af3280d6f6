"""Processes that stand for pods: each leads a group of its own, ends by SIGTERM, and is looked at from outside."""

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from headrace.ports import free_port

START_SECONDS = 120.0
HOST = "127.0.0.1"
RAY = str(pathlib.Path(sys.executable).with_name("ray"))
RAY_OPTIONS = ("start", "--head", "--block", "--disable-usage-stats")


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    process: asyncio.subprocess.Process
    log: pathlib.Path

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit status, after the signal."""
        os.kill(self.process.pid, number)
        return await self.process.wait()

    async def listens(self, port: int) -> bool:
        assert self.process.returncode is None, f"{self.name} ended with {self.process.returncode}"
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, port)
            writer.close()
            return True
        return False

    def rss_bytes(self) -> int:
        pages = int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Pods:
    """Owns the processes. `folder` takes their logs and what they keep."""

    def __init__(self, folder: pathlib.Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "HEADRACE_STATE": str(folder / "state"), **env}
        self._pods: list[Pod] = []
        self._short_folders: list[str] = []

    def short_folder(self) -> str:
        """One whose path leaves room for the names of Ray's sockets."""
        self._short_folders.append(tempfile.mkdtemp(prefix="ray-"))
        return self._short_folders[-1]

    async def start(self, name: str, command: Sequence[str]) -> Pod:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, env=self.env, start_new_session=True
            )
        self._pods.append(Pod(name, process, log))
        return self._pods[-1]

    async def run(self, *command: str) -> str:
        """What a command that ends by itself prints."""
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=self.env)
        output, _ = await process.communicate()
        assert process.returncode == 0, f"{command}: {process.returncode}"
        return output.decode()

    async def close(self) -> None:
        for pod in reversed(self._pods):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.process.pid, signal.SIGKILL)
            await pod.process.wait()
        for path in self._short_folders:
            shutil.rmtree(path, ignore_errors=True)

    def why(self) -> str:
        """The last words of each, and of Ray's own way in, for a test that failed."""
        logs = [pod.log for pod in self._pods]
        for folder in self._short_folders:
            logs += pathlib.Path(folder).glob("session_2*/logs/ray_client_server*.err")
        return "\n".join(f"-- {log.stem}\n{log.read_text(encoding='utf-8')[-1500:]}" for log in logs)


@contextlib.asynccontextmanager
async def running_pods(folder: pathlib.Path, **env: str) -> AsyncIterator[Pods]:
    pods = Pods(folder, env)
    try:
        yield pods
    except BaseException:
        print(pods.why())
        raise
    finally:
        await pods.close()


async def ray_head(pods: Pods, params: Mapping[str, str]) -> tuple[str, Pod]:
    """The head of a Ray cluster as KubeRay starts it, from its rayStartParams: where clients go, and the process."""
    client = free_port()
    here = {"port": str(free_port()), "ray-client-server-port": str(client), "dashboard-host": HOST}
    own = {"temp-dir": pods.short_folder(), "include-dashboard": "false"}
    head = await pods.start("head", [RAY, *RAY_OPTIONS, *_flags({**params, **here, **own})])
    await until(lambda: head.listens(client))
    return f"ray://{HOST}:{client}", head


def _flags(params: Mapping[str, str]) -> list[str]:
    """KubeRay passes them through a shell, so that what holds quotes is quoted once more."""
    return [f"--{name}={json.loads(value) if value.startswith(chr(34)) else value}" for name, value in params.items()]


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = START_SECONDS) -> None:
    """Looks again and again: what is waited for happens in other processes. Raises TimeoutError when it does not."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def answers(url: str, status: int = 200) -> bool:
    """Whether a GET is answered with this status now."""
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        with contextlib.suppress(httpx.TransportError):
            return (await client.get(url)).status_code == status
    return False
