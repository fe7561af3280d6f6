import logging
import pathlib
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from headrace import metrics
from headrace.config import DecisionLogConfig
from headrace.errors import ConfigError
from headrace.values import RequestKey
from router.decision_log import MAX_QUEUED, DecisionLog, Rotating, decision_log, is_sampled
from router.decisions.placement import Ask, place
from router.decisions.record import Decision, from_line
from router.decisions.view import View
from tests.unit.router.decisions.placing import d, p
from tests.unit.router.stage import metric

VIEW = View((p("p"), d("d")))


def decision(name: str) -> Decision:
    return Decision.of(name, RequestKey(f"t:{name}"), VIEW, 3.0, place(Ask(1000, 100), VIEW, 3.0))


def noted(name: str) -> tuple[RequestKey, Callable[[], Decision]]:
    return RequestKey(f"t:{name}"), partial(decision, name)


def config(path: pathlib.Path, **fields: float) -> DecisionLogConfig:
    return DecisionLogConfig(path=str(path), **{"fraction": 1.0, **fields})  # type: ignore[arg-type]


def lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_what_was_noted_is_on_disk_in_order_when_the_log_ends(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "decisions.jsonl"
    before = metric(metrics.DECISIONS_LOGGED)
    with decision_log(config(path), lambda: 1.5) as note:
        for number in range(20):
            note(*noted(str(number)))
    assert [from_line(line) for line in lines(path)] == [decision(str(number)) for number in range(20)]
    assert metric(metrics.DECISIONS_LOGGED) == before + 20


def test_a_second_run_goes_on_behind_the_first(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        with decision_log(config(tmp_path / "log"), lambda: 1.5) as note:
            note(*noted(name))
    assert [from_line(line).request_id for line in lines(tmp_path / "log")] == ["a", "b"]


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: pathlib.Path) -> None:
    (tmp_path / "log").write_text('{"version":1,"at":1.0,"deci')
    with decision_log(config(tmp_path / "log"), lambda: 1.5) as note:
        note(*noted("a"))
    assert from_line(lines(tmp_path / "log")[1]) == decision("a")


def test_the_disk_it_takes_is_bounded_and_the_newest_is_kept(tmp_path: pathlib.Path) -> None:
    with decision_log(config(tmp_path / "log", max_bytes=2**20, num_files=2), lambda: 1.5) as note:
        note(*noted("x" * 2**18))
        note(*noted("y" * 2**18))
        note(*noted("z" * 2**18))
        note(*noted("last"))
    files = sorted(file for file in tmp_path.iterdir() if file.suffix != ".lock")
    assert [file.name for file in files] == ["log", "log.1"]
    assert all(file.stat().st_size <= 2**20 for file in files)
    kept = [from_line(line).request_id[0] for file in reversed(files) for line in lines(file)]
    assert kept == ["y", "z", "l"]


def test_a_request_is_sampled_with_all_its_attempts_and_about_the_fraction_of_all_is() -> None:
    names = [f"router-1a2b:{number:x}" for number in range(10_000)]
    taken = [name for name in names if is_sampled(name, 0.1)]
    assert 850 < len(taken) < 1150
    assert all(is_sampled(name, 0.3) for name in taken)
    assert all(is_sampled(name, 1.0) for name in names)


def test_what_is_not_sampled_is_not_written_and_not_missed(tmp_path: pathlib.Path) -> None:
    dropped = metric(metrics.DECISIONS_DROPPED, reason="queue")
    with decision_log(config(tmp_path / "log", fraction=0.2), lambda: 1.5) as note:
        for number in range(100):
            note(*noted(str(number)))
    expected = [str(number) for number in range(100) if is_sampled(f"t:{number}", 0.2)]
    assert [from_line(line).request_id for line in lines(tmp_path / "log")] == expected
    assert metric(metrics.DECISIONS_DROPPED, reason="queue") == dropped


def test_without_a_path_nothing_is_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.active_count()
    with decision_log(DecisionLogConfig(), lambda: 1.5) as note:
        note(*noted("a"))
        assert threading.active_count() == threads
    assert not list(tmp_path.iterdir())


class Stuck(logging.Handler):
    """A disk that stands still until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = threading.Event()
        self.go = threading.Event()
        self.written: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.busy.set()
        self.go.wait(30)
        self.written.put(record.getMessage())


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    handler = Stuck()
    yield handler
    handler.go.set()


def test_noting_never_waits_for_the_disk_and_what_is_dropped_is_counted(stuck: Stuck) -> None:
    log = DecisionLog(stuck, 1.0, lambda: 1.5)
    dropped = metric(metrics.DECISIONS_DROPPED, reason="queue")
    log.note(*noted("first"))
    assert stuck.busy.wait(30)
    for number in range(MAX_QUEUED + 7):
        log.note(*noted(str(number)))
    assert metric(metrics.DECISIONS_DROPPED, reason="queue") == dropped + 7
    stuck.go.set()
    log.close()
    assert stuck.written.qsize() == MAX_QUEUED + 1


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_counted_logged_once_and_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    file = Rotating("/dev/full", encoding="utf-8")
    log = DecisionLog(file, 1.0, lambda: 1.5)
    dropped, logged = metric(metrics.DECISIONS_DROPPED, reason="disk"), metric(metrics.DECISIONS_LOGGED)
    for number in range(5):
        log.note(*noted(str(number)))
    log.close()
    assert metric(metrics.DECISIONS_DROPPED, reason="disk") == dropped + 5
    assert metric(metrics.DECISIONS_LOGGED) == logged
    assert [record.message for record in caplog.records] == ["the decision log cannot be written"]


def test_two_routers_never_share_a_file(tmp_path: pathlib.Path) -> None:
    with (
        decision_log(config(tmp_path / "log"), lambda: 1.5),
        pytest.raises(ConfigError, match=r"router\.decision_log\.path: another router writes"),
        decision_log(config(tmp_path / "log"), lambda: 1.5),
    ):
        pass
    with decision_log(config(tmp_path / "log"), lambda: 1.5) as note:
        note(*noted("after"))
    assert len(lines(tmp_path / "log")) == 1


def test_a_path_that_cannot_be_written_is_an_error_of_the_configuration(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"router\.decision_log\.path: cannot write .*: "),
        decision_log(config(tmp_path / "file" / "log"), lambda: 1.5),
    ):
        pass
