"""What `headrace status` knows when things are not as they should be."""

import io
import json
import pathlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from rich.console import Console

from cluster.commands.screen import screen
from cluster.commands.status import _render, _say, described
from cluster.commands.up import say_ready
from cluster.session import Session, SessionFolder
from cluster.snapshot import Snapshot, WorkerStatus, take
from cluster.state import ControlState, ObservedState, WorkerRecord
from cluster.worker_client import WorkerReport
from headrace.config import ClusterConfig, PoolConfig
from headrace.errors import ConfigError
from headrace.keys import Keys
from headrace.leases import lease_fields
from headrace.store import connect
from headrace.values import BlockCounts, Load
from router.decisions.self_check import Outcome, Reason, Result, Verdict, encode_result
from tests.null_worker import worker_info

SESSION = Session("c", 1, "", "tiny", "http://h", "h:1", "redis://127.0.0.1:1/0", ready=True)
STARTING = WorkerRecord("decode-0", "decode", 2, "decode", "tp1·pp1", "starting", 1.0, reason="loads")
OBSERVED = ObservedState("token", (), {"decode": 1}, {"decode-0": (1, 1, "rank 0: its process is gone")})


@pytest.fixture
async def session(redis_url: str) -> Session:
    return replace(SESSION, cluster=f"c{uuid.uuid4().hex[:8]}", redis_url=redis_url)


@pytest.fixture
async def state(session: Session) -> AsyncIterator[ControlState]:
    store = connect(session.redis_url, 2.0)
    yield ControlState(store, session.cluster)
    await store.close()


def shown(snapshot: Snapshot) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(_render(snapshot))
    return out.getvalue()


async def test_case_65_a_worker_that_is_gone_is_missing_with_its_reason(session: Session, state: ControlState) -> None:
    await state.lead("token")
    await state.write_observed(OBSERVED)
    seen = shown(await take(session))
    assert "decode 0/1" in seen
    assert "decode-0 ended: rank 0: its process is gone" in seen
    await state.write_observed(replace(OBSERVED, trouble="Ray's head has not answered for 9 s"))
    assert "controller: Ray's head has not answered for 9 s" in shown(await take(session))

    again = {"decode-0": (3, 2, "rank 0: its process is gone")}
    await state.write_observed(replace(OBSERVED, workers=(STARTING,), history=again))
    seen = shown(await take(session))
    assert "decode-0 failed 2 times in a row, the last time: rank 0: its process is gone" in seen
    assert "decode-0 loads" in seen

    await state.write_observed(replace(OBSERVED, workers=(replace(STARTING, phase="ready", reason=""),)))
    assert "process is gone" not in shown(await take(session))


async def test_a_workers_self_check_is_shown_while_it_is_of_its_generation(
    session: Session, state: ControlState
) -> None:
    await state.lead("token")
    await state.write_observed(replace(OBSERVED, workers=(replace(STARTING, phase="ready", reason=""),)))
    key, failed = Keys(session.cluster).self_check("decode-0"), Verdict(Outcome.FAILED, Reason.KEYS)
    for generation, verdict, row, note in (
        (2, Verdict(Outcome.PASSED), "passed", False),
        (2, failed, "failed", True),
        (1, failed, "", False),
    ):
        value = encode_result(Result(generation, 1, verdict, "r"))
        await state.store.call(lambda redis, value=value: redis.set(key, value))  # type: ignore[misc]
        seen = shown(await take(session))
        (line,) = [line for line in seen.splitlines() if line.startswith("  decode-0.2")]
        assert line.split() == ["decode-0.2", "decode", "tp1·pp1", "ready", *filter(None, [row])]
        assert ("decode-0 self-check failed: keys" in seen) is note


async def test_case_65_without_a_controller_what_is_shown_is_said_to_be_old(
    session: Session, state: ControlState
) -> None:
    assert "controller: none has said anything yet" in shown(await take(session))
    await state.lead("token")
    await state.write_observed(OBSERVED)
    assert (await take(session)).controller == ""
    await state.resign("token")
    assert "controller: none leads just now; this is what the last one saw" in shown(await take(session))


async def test_case_65_without_redis_that_is_what_is_shown() -> None:
    assert "controller: Redis did not serve a call" in shown(await take(SESSION))


async def test_where_no_controller_ever_was_the_workers_are_those_that_hold_a_lease(session: Session) -> None:
    """Workers under StatefulSets. One that drains says so; one that does not answer is named with the reason."""
    store = connect(session.redis_url, 2.0)
    try:
        for worker_id, draining in (("hr-decode-1", True), ("hr-decode-0", False)):
            info = replace(worker_info(), worker_id=worker_id, address="127.0.0.1:1")
            key, fields = Keys(session.cluster).lease(worker_id), lease_fields(info, draining=draining)
            await store.call(lambda redis, key=key, fields=fields: redis.hset(key, mapping=fields))  # type: ignore[misc]
    finally:
        await store.close()
    snapshot = await take(session)
    assert [(w.record.worker_id, w.record.pool, w.record.phase) for w in snapshot.workers] == [
        ("hr-decode-0", "hr-decode", "ready"),
        ("hr-decode-1", "hr-decode", "draining"),
    ]
    seen = shown(snapshot)
    assert "controller: none has said anything yet; these workers hold a lease" in seen
    assert "hr-decode 1 " in seen
    assert "127.0.0.1:1 did not answer" in seen


def test_a_reason_with_brackets_is_no_markup() -> None:
    """`headrace status` ended by MarkupError over a worker that could not open a file; an address of IPv6 was eaten."""
    why = "cannot open [/dev/shm/kv], [cuda] is busy"
    record = WorkerRecord("d-0", "d", 1, "decode", "tp1·pp1", "dead", 1.0, reason=why)
    session = replace(SESSION, http_url="http://[fe80::1]:8000")
    seen = shown(Snapshot(session, {"d": 2}, (WorkerStatus(record),), why, {"d-1": why}))
    assert seen.count(why) == 3
    assert "http://[fe80::1]:8000/v1" in seen


def test_no_cell_is_cut_where_nobody_knows_how_wide_the_screen_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `kubectl exec … headrace status`: "passed" was "pass…" there, and "IN/OUT" "IN/O…"."""
    monkeypatch.delenv("COLUMNS", raising=False)
    report = WorkerReport("d", 2, "decode", "tiny", BlockCounts(), Load(), False, 10**6, 0, 123_456, 123_456)
    worker = WorkerStatus(replace(STARTING, worker_id="prefill-1000"), report, check="passed")
    screen().print(_render(Snapshot(SESSION, {"decode": 1}, (worker,))))
    said = capsys.readouterr().out
    assert "…" not in said
    assert "passed" in said
    assert "123456/123456" in said


def test_a_cluster_that_others_run_is_described_by_its_configuration(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClusterConfig(name="far", model="m", pools={"all": PoolConfig(role="unified")})
    monkeypatch.delenv("HEADRACE_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="HEADRACE_REDIS_URL"):
        described(config, tmp_path)
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://far:6379/0")
    assert described(config, tmp_path).redis_url == "redis://far:6379/0"


def test_a_file_without_redis_names_the_cluster_that_runs_here(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`headrace canary start --config FILE` was refused on a cluster of `headrace up`, whose Redis is its own."""
    config = ClusterConfig(name="near", model="m", pools={"all": PoolConfig(role="unified")})
    monkeypatch.delenv("HEADRACE_REDIS_URL", raising=False)
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path))
    folder, near = SessionFolder("near"), replace(SESSION, cluster="near")
    with folder.owned():
        folder.write(near)
        assert described(config, tmp_path / "near.yaml") == near
    with pytest.raises(ConfigError, match=r"no cluster 'near' runs here"):
        described(config, tmp_path / "near.yaml")


def test_what_is_printed_as_json_holds_no_password_of_redis(capsys: pytest.CaptureFixture[str]) -> None:
    session = replace(SESSION, redis_url="redis://user:s3cret@r:6379/0")
    _say(Snapshot(session, {}, ()))
    say_ready(session, True, Console())
    out = capsys.readouterr().out
    assert "s3cret" not in out
    assert out.count('"redis_url": "redis://r:6379/0"') == 2


def test_all_that_a_worker_says_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Its routers are a set, which ended `status --json` of every cluster that served."""
    counts = (1, 0, 0, 0)  # steps, preemptions, hand-offs in and out
    report = WorkerReport("decode-0", 2, "decode", "tiny", BlockCounts(), Load(), False, *counts)
    report = replace(report, routers=frozenset({"router-b", "router-a"}))
    _say(Snapshot(SESSION, {"decode": 1}, (WorkerStatus(STARTING, report),)))
    (worker,) = json.loads(capsys.readouterr().out)["workers"]
    assert worker["report"]["routers"] == ["router-a", "router-b"]
