import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from cluster.child import Child, end_orphan
from cluster.session import Session, SessionFolder, all_folders, find, is_locked, open_lock, wait_unlocked
from headrace.errors import ConfigError

SESSION = Session(
    "one", 1, "headrace.yaml", "model", "http://127.0.0.1:8000", "127.0.0.1:50051", "redis://x", children={"router": 7}
)


def folder(root: pathlib.Path, name: str = "one") -> SessionFolder:
    folder = SessionFolder(name, root)
    folder.path.mkdir(parents=True)
    return folder


def test_a_session_is_read_back_and_cleared(tmp_path: pathlib.Path) -> None:
    one = folder(tmp_path)
    assert one.read() is None
    one.write(SESSION)
    assert one.read() == SESSION
    one.clear()
    assert one.read() is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}', '{"nonsense": 1}'])
def test_a_broken_session_file_is_no_session(tmp_path: pathlib.Path, content: str) -> None:
    one = folder(tmp_path)
    (one.path / "session.json").write_text(content)
    assert one.read() is None


def test_a_cluster_runs_once(tmp_path: pathlib.Path) -> None:
    one = SessionFolder("one", tmp_path)
    assert not one.running
    with one.owned():
        assert one.running
        with pytest.raises(ConfigError, match="runs already"), SessionFolder("one", tmp_path).owned():
            pytest.fail("owned twice")
    assert not one.running


def test_whoever_looks_at_a_lock_is_no_cluster_that_runs(tmp_path: pathlib.Path) -> None:
    one = SessionFolder("one", tmp_path)
    with one.owned():
        pass
    look = os.open(one.lock("up"), os.O_RDWR)
    fcntl.flock(look, fcntl.LOCK_SH)
    assert not one.running
    os.close(look)


def test_the_only_cluster_needs_no_name_and_several_do(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="no cluster runs here"):
        find(None, tmp_path)
    folder(tmp_path, "one").write(SESSION)
    assert find(None, tmp_path).cluster == "one"
    folder(tmp_path, "two").write(SESSION)
    assert [each.cluster for each in all_folders(tmp_path)] == ["one", "two"]
    with pytest.raises(ConfigError, match="one, two"):
        find(None, tmp_path)
    assert find("two", tmp_path).cluster == "two"
    with pytest.raises(ConfigError, match="'three'"):
        find("three", tmp_path)


def test_a_lock_lives_as_long_as_the_child_that_inherited_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "child.alive"
    lock = open_lock(path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    assert is_locked(path)
    assert not wait_unlocked(path, 0.05)
    child.kill()
    assert wait_unlocked(path, 10.0)
    child.communicate()
    assert not is_locked(path)


async def test_a_child_is_stopped_and_its_last_words_are_kept(tmp_path: pathlib.Path) -> None:
    one = folder(tmp_path)
    child = await Child.start("talker", [sys.executable, "-c", "print('the last word'); raise SystemExit(3)"], one)
    assert await child.wait() == 3
    assert "status 3: the last word" in child.failure().message
    assert not one.child_alive("talker")


async def test_an_orphan_is_ended_and_nothing_else(tmp_path: pathlib.Path) -> None:
    one = folder(tmp_path)
    child = await Child.start("router", [sys.executable, "-c", "import time; time.sleep(600)"], one)
    assert one.child_alive("router")
    assert end_orphan(one, "router", child.pid, 10.0)
    assert await child.wait() == -15
    assert not end_orphan(one, "router", os.getpid(), 1.0), "a number that is no longer its own is left alone"


async def test_a_child_that_ignores_the_signal_is_killed(tmp_path: pathlib.Path) -> None:
    one = folder(tmp_path)
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    child = await Child.start("stubborn", [sys.executable, "-c", code], one)
    while not one.log("stubborn").read_text():
        os.sched_yield()
    await child.stop(0.1)
    assert await child.wait() == -9
