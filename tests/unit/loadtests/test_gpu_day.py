"""That a GPU's time is not lost to a name: every part's arguments are taken by its program, and a day goes on."""

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.disagg_plan import named_deployment
from loadtests.gpu_day_parts import BENCHMARKS, KNEES, ORDER, PAIR_PEER, PEER, Host, Part, plan, rows_of_peer

TRACES = {"azure": "examples/azure_sample.csv", "mooncake": "examples/azure_sample.csv"}


class Taken(Exception):
    """Its arguments were; it goes no further."""


@pytest.mark.torch
@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_every_part_is_there_and_takes_its_arguments(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    take = argparse.ArgumentParser.parse_args

    def taken(parser: argparse.ArgumentParser) -> None:
        take(parser)
        raise Taken

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", taken)
    parts = plan(Host("h200", num_gpus, TRACES))
    assert {part.name for part in parts} == set(ORDER[num_gpus]) - {PEER, PAIR_PEER}
    for part in parts:
        if "pytest" in part.arguments:
            assert Path(part.arguments[-1]).exists(), part
            continue
        _, name, *arguments = part.arguments
        monkeypatch.setattr(sys, "argv", [name, *arguments, *((part.peer, "FILE") if part.peer else ())])
        try:
            program = importlib.import_module(name)
        except ModuleNotFoundError as missing:
            assert missing.name == "cuda", "a host with a GPU has its bindings"  # noqa: PT017
            continue
        with pytest.raises(Taken):
            program.main()


def test_without_traces_there_is_no_traffic_to_compare_on() -> None:
    assert not [part for part in plan(Host("h200", 4)) if "disagg" in part.name]
    (part,) = [part for part in plan(Host("h200", 4, TRACES)) if part.name == "disagg-mooncake"]
    assert part.arguments[part.arguments.index("--rates") + 1] == "10"


@pytest.mark.parametrize(("trace", "num_gpus"), [(trace, number) for trace in KNEES for number in KNEES[trace]])
def test_what_is_tried_is_what_the_bench_takes_on_so_many_gpus(trace: str, num_gpus: int) -> None:
    """Both kinds of each: two pools are judged by what one pool does at the same rates."""
    knee = KNEES[trace][num_gpus]
    deployments = [named_deployment(each) for each in knee.deployments]
    assert {each.num_gpus for each in deployments} == {num_gpus}
    assert {each.num_prefill > 0 for each in deployments} == {True, False}
    assert len({(each.name, each.chunk) for each in deployments}) == len(deployments)
    assert list(knee.rates) == sorted(set(knee.rates))
    assert knee.rates[0] > 0


@pytest.mark.parametrize("slo", ["tight", "code", "chat", "long"])
@pytest.mark.parametrize("trace", KNEES)
def test_four_gpus_try_what_the_model_has_as_the_best_of_each_kind(trace: str, slo: str) -> None:
    """The best two pools for a tight TPOT, 2P2D+tight/256, were in the page's table and not among what is run."""
    rows = json.loads((BENCHMARKS / "disagg-candidates-h200.json").read_text(encoding="utf-8"))["rows"]
    named = re.compile(rf"goodput_{trace}_(\d[^@]+)@[\d.]+_{slo}$")
    found = [(match[1], row["value"]) for row in rows if (match := named.match(row["name"]))]
    tried = {each if ":" in each else f"{each}:2048" for each in KNEES[trace][4].deployments}
    for two_pools in (True, False):
        kind = [each for each in found if ("P" in each[0]) is two_pools]
        of_kind = [(name, value) for name, value in kind if named_deployment(name).num_gpus == 4]
        most = max(value for _, value in of_kind)
        assert tried & {name for name, value in of_kind if value == most}


def test_a_peers_figures_get_the_names_of_our_rows() -> None:
    said = {"start_s": 90.0, "decode_b1_tok_s": 203, "decode_b1_tpot_ms": 4.9, "mixed256_out_tok_s": 10171}
    assert rows_of_peer(said) == {"decode_b1": 203, "mixed_256": 10171}


def test_a_day_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    from loadtests.gpu_day import Day, in_turn

    day = Day(tmp_path, {PEER: f'{sys.executable} -c \'print("{{\\"decode_b1_tok_s\\": 2}}")\''})
    out = tmp_path / "row.json"
    row = {"name": "rate", "value": 2.0, "must": 3.0, "aim": None, "ratio": None, "unit": "GB/s", "met": False}
    works = Part("works", 1, 60, ("-c", f"open({str(out)!r}, 'w').write({json.dumps({'rows': [row]})!r})"), out)
    fails = Part("gpu/fails", 1, 60, ("-c", "raise SystemExit('no such thing')"))
    partly = Part("partly", 1, 60, ("-c", "print('3 are left')"), done_when="nothing is left")
    assert [day.run(part, 60) for part in (works, fails, partly)] == ["done", "failed", "cut"]
    assert day.ask_peer(PEER, 60) == "done"
    assert json.loads(day.said_by_peer(PEER).read_text())["rows"] == {"decode_b1": 2}
    day.note(PEER, "done", 1.0)
    assert in_turn([PEER], day.status()) == []
    day.said_by_peer(PEER).rename(tmp_path / "peer-another.json")
    assert in_turn([PEER], day.status()) == [PEER], "it was said of another host"
    for name, status in (("works", "done"), ("gpu/fails", "failed"), ("partly", "cut")):
        day.note(name, status, 1.0)
    again = Day(tmp_path, {})
    assert in_turn(["partly", "works", "new", "gpu/fails"], again.status()) == ["new", "partly"]
    table = "\n".join(again.table([works, fails, partly]))
    assert "MISSED" in table
    assert "no such thing" in table
    again.note("gpu/fails", "cut", 0)
    assert in_turn(["gpu/fails"], again.status()) == ["gpu/fails"]
    again.pack(tmp_path.parent / "all.tgz", [])
    assert (tmp_path.parent / "all.tgz").stat().st_size


LEAVES = """
import subprocess, sys, time
from loadtests.left_behind import adopt_orphans, end_all_below
adopt_orphans()
holds = "import time; print(1, flush=True); time.sleep(600)"
starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {holds!r}], start_new_session=True)"
child = subprocess.Popen([sys.executable, "-c", starts + "; import time; time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
end_all_below()
print("gone", len(child.stdout.read()))
"""


def test_what_was_there_before_a_part_lives_on(tmp_path: Path) -> None:
    """A Redis of the whole test run, for one, ended with the first part that was run here."""
    from loadtests.gpu_day import Day

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as before:
        assert Day(tmp_path, {}).run(Part("part", 1, 60, ("-c", "")), 60) == "done"
        assert before.poll() is None


def test_what_a_killed_part_has_left_in_a_session_of_its_own_is_ended_too() -> None:
    """It holds the pipe's other end: the last read ends with it alone."""
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "gone 0"
