"""`make bench-operate`: what it costs to run a cluster. One function a row, or for rows that one run gives together.

To add a row: a function in MEASURES under the row's name. It gets the number of runs to take the median of. Load tests and
the control plane do not import each other: what measures the latter runs its commands, as bench_sim does.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from loadtests import measure_loadgen, measure_metrics, measure_plan, measure_scaling
from loadtests.report import Report, Row, add_arguments

Measure = Callable[[int], Sequence[Row]]
MEASURES: dict[str, Measure] = {
    "loadgen_streams": measure_loadgen.measure,
    "loadgen_tok_s": measure_loadgen.measure,
    "metrics_overhead_fraction": measure_metrics.measure,
    "plan_s": measure_plan.measure,
    "controller_1000_ms": measure_scaling.measure_decision,
    "week_slo_attainment": measure_scaling.measure_week,
    "week_gpu_hours_vs_clairvoyant": measure_scaling.measure_week,
    "week_fluid_error": measure_scaling.measure_spots,
}


def run(measures: Mapping[str, Measure], report: Report, num_runs: int) -> None:
    """A function that stands under several names runs once."""
    for measure in dict.fromkeys(measures.values()):
        for row in measure(num_runs):
            report.add(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", action="append", choices=sorted(MEASURES), help="this row; may be given often")
    parser.add_argument("--runs", type=int, default=5, help="of each row, which is their median")
    add_arguments(parser)
    arguments = parser.parse_args()
    report = Report("operate", ("grpcio", "protobuf", "uvloop", "redis"))
    run({name: MEASURES[name] for name in arguments.only or MEASURES}, report, arguments.runs)
    return report.close(arguments)


if __name__ == "__main__":
    sys.exit(main())
