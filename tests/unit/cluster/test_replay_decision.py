import json
import pathlib
import re
from collections.abc import Callable, Sequence

import pytest
from click.testing import CliRunner, Result

from cluster.commands.replay_decision import command
from headrace.errors import ConfigError
from headrace.values import Load, RequestKey
from router.decisions.placement import Ask, place
from router.decisions.record import Decision, to_line
from router.decisions.view import View
from tests.unit.router.decisions.placing import d, p

VIEW = View((p("p.1"), p("p2", load=Load(waiting_prefill_tokens=500)), d("d")))
Run = Callable[..., Result]


ASK = Ask(1000, 100)


def decision(name: str, view: View = VIEW) -> Decision:
    return Decision.of(name, RequestKey(f"t:{name}"), view, 0.0, place(ASK, view, 0.0))


@pytest.fixture
def log(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "decisions.jsonl"


@pytest.fixture
def run(log: pathlib.Path) -> Run:
    def run(lines: Sequence[str], *options: str) -> Result:
        log.write_text("".join(line + "\n" for line in lines))
        return CliRunner().invoke(command, [str(log), *options])

    return run


def lines(*decisions: Decision) -> list[str]:
    return [to_line(one, 1.5) for one in decisions]


def test_what_was_logged_is_made_again(run: Run) -> None:
    ran = run(lines(decision("a"), decision("b"), decision("none", view=View(()))))
    assert ran.exit_code == 0
    said = ran.stdout.splitlines()
    assert said[0].startswith("a attempt 1: p.1 → d at ")
    assert said[2] == "none attempt 1: nowhere (no_workers)"
    assert said[3] == "3 decisions made again, 0 differ"


def test_one_that_comes_out_otherwise_is_a_failure_that_says_how(run: Run) -> None:
    data = json.loads(lines(decision("a"))[0])
    data["decision"]["prefill"] = "p2"
    ran = run([*lines(decision("b")), json.dumps(data)])
    assert ran.exit_code == 1
    assert ran.stdout.splitlines()[1].startswith("a attempt 1: p2 → d at ")
    assert ", now p.1 → d at " in ran.stdout.splitlines()[1]
    assert "2 decisions made again, 1 differ" in ran.stdout
    assert run([*lines(decision("b")), json.dumps(data)], "--request", "b").exit_code == 0


def test_other_figures_behind_the_same_workers_are_a_difference_too(run: Run) -> None:
    data = json.loads(lines(decision("a"))[0])
    data["decision"]["why"]["candidates"][0]["tpot_seconds"] += 1e-9
    ran = run([json.dumps(data)], "--json")
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["same"] is False


@pytest.mark.parametrize(
    "change", ["p.1.draining=true", "p.1.load.waiting_prefill_tokens=100000", "p.1.cost.prefill_token_seconds=1"]
)
def test_what_if_a_worker_had_been_otherwise(run: Run, change: str) -> None:
    ran = run(lines(decision("a")), "--set", change)
    assert ran.exit_code == 0
    assert ", now p2 → d at " in ran.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("p9.draining=true", "of one of p.1, p2, d"),
        ("p2.draining", "must be WORKER.FIELD=VALUE"),
        ("p2.speed=1", "there is no speed in a worker's view"),
        ("p2.load.speed=1", "there is no load.speed in a worker's view"),
        ("p2.free_blocks.x=1", "there is no free_blocks.x in a worker's view"),
    ],
)
def test_a_change_that_names_nothing_is_refused(run: Run, change: str, message: str) -> None:
    ran = run(lines(decision("a")), "--set", change)
    assert ran.exit_code == 2
    assert message in " ".join(ran.stderr.replace("│", " ").split())


def test_a_line_that_was_cut_off_is_passed_over_and_said(run: Run) -> None:
    ran = run([*lines(decision("a")), '{"version":1,"deci', *lines(decision("b"))])
    assert ran.exit_code == 0
    assert "2 decisions made again, 0 differ" in ran.stdout
    assert "line 2: passed over, it is not whole" in ran.stderr


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (['{"version":7,"decision":{}}'], (), "line 1: version 7 of the decision log; this build reads 2"),
        (["[]"], (), "line 1: not a logged decision"),
        ([], (), "holds no decision"),
        (lines(decision("a")), ("--request", "x"), "holds no decision of request 'x'"),
        (lines(decision("a")), ("--set", "p2.free_blocks=many"), "line 1: .*free_blocks: int was expected, got 'many'"),
    ],
)
def test_what_cannot_be_replayed_is_one_error(
    run: Run, given: list[str], options: tuple[str, ...], message: str
) -> None:
    ran = run(given, *options)
    assert isinstance(ran.exception, ConfigError)
    assert re.search(message, ran.exception.message)
