"""A sweep that is kept: goes on where it was, refuses another's folder, and shows the same from its files."""

import asyncio
import json
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from headrace.errors import ConfigError
from loadtests.open_loop import html
from loadtests.open_loop.answers import Ask
from loadtests.open_loop.client import Call
from loadtests.open_loop.loop import Progress
from loadtests.open_loop.measures import Figure
from loadtests.open_loop.plan import Plan, Source, Traffic
from loadtests.open_loop.show import dry, shown, table
from loadtests.open_loop.sweep import Folder, Point, result, sweep
from tests.unit.loadtests.open_loop.scripted import Scripted, tokens
from tests.unit.loadtests.open_loop.virtual_loop import VirtualLoop, in_virtual_time

PLAN = Plan("http", "http://host", "m", rates=(200.0, 400.0, 800.0), requests=30, output_tokens=3, warmup=0.0)


@contextmanager
def unshown(traffic: Traffic, progress: Progress) -> Iterator[None]:
    yield


class Counting(Scripted):
    def __init__(self) -> None:
        super().__init__(tokens(first_after=0.01, gap=0.001))
        self.num_asked = 0

    def prepare(self, ask: Ask) -> Call:
        self.num_asked += 1
        return super().prepare(ask)


def swept(plan: Plan, client: Scripted, folder: Folder | None) -> list[Point]:
    """Under virtual time: however busy the machine is, no request is sent late."""
    if folder is not None:
        folder.open(plan)

    async def work() -> list[Point]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return await sweep(plan, Source(plan), client, folder, unshown, loop)

    return in_virtual_time(work())


def test_what_is_through_is_not_run_again_and_reads_the_same(tmp_path: pathlib.Path) -> None:
    folder = Folder(tmp_path / "s")
    client = Counting()
    first = swept(replace(PLAN, rates=(200.0, 400.0)), client, folder)
    assert client.num_asked == 60
    (tmp_path / "s" / "rate-400.json").unlink()
    again = swept(PLAN, client, folder)
    assert client.num_asked == 60 + 60, "the rate that is missing, and the new one"
    assert json.loads(json.dumps(again[0].as_json())) == json.loads(json.dumps(first[0].as_json()))
    assert again[0].summary == first[0].summary
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        "plan.json",
        "rate-200.json",
        "rate-400.json",
        "rate-800.json",
    ]


def test_a_folder_of_another_plan_is_left_as_it_is(tmp_path: pathlib.Path) -> None:
    folder = Folder(tmp_path / "s")
    swept(replace(PLAN, rates=(400.0,)), Counting(), folder)
    before = {path: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    with pytest.raises(ConfigError, match="holds a sweep of another plan: seed was 0, now 1"):
        folder.open(replace(PLAN, seed=1))
    assert before == {path: path.read_bytes() for path in (tmp_path / "s").iterdir()}


@pytest.mark.parametrize("taken", ["file", "folder"])
def test_a_place_that_is_taken_is_refused(tmp_path: pathlib.Path, taken: str) -> None:
    path = tmp_path / "s"
    if taken == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=f"out: {path}"):
        Folder(path).open(PLAN)


def test_a_point_cut_in_half_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rate-200.json").write_text('{"rate": 2')
    with pytest.raises(ConfigError, match=r"rate-200\.json is not a point of a sweep"):
        Folder(tmp_path).point(200.0)


def test_a_report_says_all_and_needs_nothing_from_elsewhere() -> None:
    points = swept(PLAN, Counting(), None)
    said = result(PLAN, points, {"bench": "load"})
    assert [point["rate"] for point in said["points"]] == [200.0, 400.0, 800.0]
    assert said["knee"]["kind"] in ("Knee", "Beyond")
    strained = replace(
        points[1], summary=replace(points[1].summary, strains=["it <sent> late"], errors={"Overloaded: full": 3})
    )
    page = html.page(replace(PLAN, trace="<b>.jsonl"), [points[0], strained], said, b"a picture")
    assert "&lt;b&gt;.jsonl" in page
    assert "at 400/s figures are the load generator&#x27;s, too: it &lt;sent&gt; late" in page
    assert "3 of 30 requests: Overloaded: full" in page
    assert "data:image/png;base64,YSBwaWN0dXJl" in page
    assert "is in no percentile of TTFT" in page
    assert "http://host" in page
    assert "<script" not in page
    assert 'src="http' not in page
    assert "they need matplotlib" in html.page(PLAN, points, said, None)
    assert [str(cell) for cell in table([strained]).columns[0].cells] == ["400 !"]


def test_figures_are_shown_with_half_their_interval() -> None:
    assert shown(Figure(0.5, 0.4, 0.7), 1e3) == "500 ±150"
    assert shown(Figure(2.5), 1e3) == "2500"
    assert shown(None) == "–"


def test_a_dry_run_shows_lengths_times_and_shared_prefixes() -> None:
    plan = replace(PLAN, shape="hot-prefix", output_tokens=None, requests=40)
    lines = dry(Source(plan).at(4.0))
    assert lines[0].startswith("4 requests a second: 40 requests within ")
    assert "prompts begin as an earlier one" in lines[1]
    assert int(lines[1].rsplit(";", 1)[1].split()[0]) >= 25
    assert len(lines) == 2 + 8 + 1
