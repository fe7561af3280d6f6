"""The frame of bench-operate: which rows run."""

from loadtests.bench_operate import run
from loadtests.report import Report, Row


def test_a_function_that_gives_two_rows_runs_once() -> None:
    asked: list[int] = []

    def both(num_runs: int) -> list[Row]:
        asked.append(num_runs)
        return [Row("streams", 1.0, "streams", "higher"), Row("tok_s", 2.0, "tok/s", "higher")]

    report = Report("operate", hardware="a CPU")
    run({"streams": both, "tok_s": both, "plan_s": lambda _: [Row("plan_s", 3.0, "s", "lower")]}, report, 7)
    assert asked == [7]
    assert [row.name for row in report.rows] == ["streams", "tok_s", "plan_s"]
