"""`plan_s` of bench-operate: `headrace plan examples/plan.yaml` as a whole process, simulation and page included."""

import json
import pathlib
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from loadtests.report import Row

EXAMPLE = pathlib.Path(__file__).resolve().parent.parent / "examples" / "plan.yaml"


def measure(num_runs: int) -> Sequence[Row]:
    """Processor seconds of one core: what else runs on the machine does not count."""
    seconds, said = [], ""
    for _ in range(num_runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "cluster.cli",
                "plan",
                str(EXAMPLE),
                "--json",
                "--html",
                f"{folder}/plan.html",
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        chosen = json.loads(done.stdout)["chosen"]
        requests = sum(one["simulated"]["num_requests"] for one in chosen["rounds"])
        said = f"{chosen['num_gpus']} {chosen['gpu_type']}; {requests} requests simulated for the way that was taken"
    middle = sorted(seconds)[len(seconds) // 2]
    return [Row("plan_s", middle, "s", "lower", must=30.0, samples=seconds, note=said)]
