"""`headrace canary` on a real Valkey, without a controller: what it writes, says and refuses."""

import asyncio
import json
import pathlib
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from cluster.canary import operators
from cluster.canary.control import begin
from cluster.canary.evidence import encode_sides
from cluster.canary.judge import judge, said
from cluster.canary.report import Standing, figures
from cluster.canary.store import CanaryState, Found
from cluster.canary.values import Event, Evidence, Phase, State, Test, Verdict, written
from cluster.commands.canary import _ms, command
from headrace.config import CanaryConfig, ClusterConfig, EngineConfig, PoolConfig
from headrace.errors import ConfigError, InternalError
from headrace.store import connect
from tests.unit.cluster.canary.world import ITS, LIVE, counted

FILE = {
    "model": "m",
    "pools": {"decode": {"role": "decode"}},
    "canary": {"revision": "v2", "pools": {"new": {"role": "decode"}}, "percent": 2},
}


class Cluster:
    """One by its file."""

    def __init__(self, folder: pathlib.Path, redis_url: str) -> None:
        self.name = f"c{uuid.uuid4().hex[:8]}"
        self.path = folder / "headrace.yaml"
        self.redis_url = redis_url
        self.write()

    def write(self, **changes: Any) -> None:
        text = yaml.safe_dump(FILE | {"name": self.name, "redis": {"url": self.redis_url}} | changes)
        self.path.write_text(text, encoding="utf-8")

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(command, [*arguments, "--config", str(self.path)])

    def said(self, *arguments: str) -> Any:
        result = self(*arguments, "--json")
        assert result.exception is None, result.exception
        return json.loads(result.stdout)

    def refused(self, *arguments: str) -> str:
        error = self(*arguments).exception
        assert isinstance(error, ConfigError)
        return error.message

    def change(self, of: Callable[[State], State], *events: Event) -> None:
        """As a controller would."""

        async def changing() -> None:
            store = connect(self.redis_url, 2.0)
            redis = CanaryState(store, self.name)
            found: Found = await redis.read()
            assert found.state is not None
            event = Event(0.0, "live", of(found.state))
            for one in events or (event,):
                assert await redis.ask(await redis.read(), of(found.state), one)
            await store.close()

        asyncio.run(changing())


@pytest.fixture
def cluster(tmp_path: pathlib.Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.delenv("HEADRACE_REDIS_URL", raising=False)
    return Cluster(tmp_path, redis_url)


@pytest.mark.redis
def test_an_operator_leads_a_canary_from_its_start_to_its_promotion(cluster: Cluster) -> None:
    assert cluster.refused("status") == "there never was a canary in this cluster"
    began = cluster.said("start", "--percent", "7")
    assert (began["phase"], began["revision"], began["wanted_percent"], began["percent"]) == (
        "starting",
        "v2",
        7.0,
        0.0,
    )
    assert cluster.refused("start") == "canary v2 is starting: promote or abort it first"
    assert "starting, and not good yet" in cluster.refused("promote", "--force")
    cluster.change(lambda state: replace(state, phase=Phase.LIVE))
    assert cluster.said("set-share", "25")["percent"] == 25.0
    assert cluster.refused("promote") == "canary v2 is live, and not good yet; --force does not wait for that"
    assert cluster.refused("set-share", "101") == "percent: must be a number from 0 to 100, got 101.0"
    cluster.change(lambda state: replace(state, phase=Phase.GOOD))
    assert cluster.said("promote")["phase"] == "promoting"
    assert "being promoted" in cluster.refused("set-share", "5")
    assert cluster.said("abort", "--reason", "not today")["reason"] == "an operator ends it: not today"
    assert cluster.refused("abort") == "there is no canary to abort: it is aborted"
    events = cluster.said("explain")
    assert [event["state"]["phase"] for event in events][-1] == "aborted"
    assert "not today" in cluster("explain").stdout
    assert "v2 beside stable" in cluster("status").stdout
    assert cluster.said("start")["number"] == 2


@pytest.mark.redis
def test_what_was_promoted_must_be_in_the_file_before_another_begins(cluster: Cluster) -> None:
    canary = FILE["canary"] | {"engine": {"max_num_seqs": 7}}  # type: ignore[operator]
    cluster.write(canary=canary)
    cluster.said("start")
    cluster.change(lambda state: replace(state, phase=Phase.PROMOTED))
    assert cluster.refused("start").startswith("v2 was promoted, and the file has other settings")
    cluster.write(engine={"max_num_seqs": 7}, canary=canary)
    assert "another name: that is what serves" in cluster.refused("start")
    cluster.write(engine={"max_num_seqs": 7}, canary=canary | {"revision": "v3"})
    after = cluster.said("start")
    assert (after["revision"], after["base"]) == ("v3", "v2")


@pytest.mark.redis
def test_a_record_is_judged_again_and_one_that_differs_is_named(cluster: Cluster) -> None:
    cluster.said("start")
    sides = {"stable": counted(2000), "v2": counted(300, failed=90)}
    its = ITS.model_copy(update={"revision": "v2"})
    over = replace(LIVE, phase=Phase.ROLLED_BACK, settings=written(its))
    true = Event(1.0, "live", over, judge(its, sides["stable"], sides["v2"], 3), encode_sides(sides))
    cluster.change(lambda state: over, true)
    assert cluster("explain", "--check").exit_code == 0
    shown = cluster.said("status")
    assert [side["failed"] for side in shown["sides"]] == [0, 90], "of one that is over, what ended it"
    assert shown["verdict"] == "worse"
    cluster.change(lambda state: over, replace(true, judgement=judge(its, sides["stable"], sides["v2"], 4)))
    assert cluster("explain", "--check").exit_code == 0
    cluster.change(lambda state: over, replace(true, counts=encode_sides({"stable": counted(2000)})))
    error = cluster("explain", "--check").exception
    assert isinstance(error, InternalError)
    assert error.message == "judged otherwise from the same counts: v2 rolled_back"


@pytest.mark.redis
def test_without_the_section_or_redis_it_says_what_is_missing(cluster: Cluster) -> None:
    cluster.write(canary=None)
    assert "canary: must be given" in cluster.refused("start")
    cluster.write(redis={})
    assert "redis.url must be given" in cluster.refused("status")


def test_promoted_goes_back_too() -> None:
    state, event = operators.abort(replace(LIVE, phase=Phase.PROMOTED), "", 5.0)
    assert (state.phase, state.serving, event.before) == (Phase.ABORTED, "stable", "promoted")
    again = begin(state, 5.0, written(ITS), 6.0)
    assert (again.number, again.base) == (2, "stable")
    config = ClusterConfig(model="m", pools={"d": PoolConfig(role="decode")}, engine=EngineConfig(max_num_seqs=3))
    third = CanaryConfig(revision="v3", pools=ITS.pools)
    with pytest.raises(ConfigError, match="v2 was promoted"):
        operators.start(replace(LIVE, phase=Phase.PROMOTED), config, third, None, 5.0)


def test_figures_are_numbers_that_any_reader_of_json_takes() -> None:
    evidence = Evidence(1, 0.0, 50.0, {"stable": counted(2000), "v2": counted(100, failed=10)}, look=1)
    shown = figures(Standing(LIVE, evidence, (Event(1.0, "starting", LIVE),), 10.0))
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert [side["name"] for side in shown["sides"]] == ["stable", "v2"]
    assert shown["sides"][1]["failed_part"] == pytest.approx(0.1)
    assert 0.18 < shown["sides"][0]["ttft"]["p50"] < 0.22
    assert len(shown["tests"]) == 6
    assert shown["events"][0]["after"] == "live"
    empty = figures(Standing(LIVE, Evidence(), (), 10.0))
    assert json.dumps(empty, allow_nan=False)
    assert (empty["verdict"], empty["tests"]) == ("too few requests", [])


def test_case_times_beyond_a_second_are_written_as_people_write_them() -> None:
    """TTFT at 90 % was "1.47e+03 ms", and why a canary was rolled back "27974.4 ms against 367.6 ms"."""
    assert [_ms(seconds) for seconds in (0.0262, 0.26, 0.9996, 1.47, None)] == [
        "26.2 ms",
        "260 ms",
        "1.00 s",
        "1.47 s",
        "-",
    ]
    worse = Test("TTFT at 90%", 0.3676, 27.9744, 76.1, 36.44, None, 1.25, Verdict.WORSE)
    assert said(worse).startswith("TTFT at 90% 27.97 s against 368 ms, at least 36.44 times as long")
