"""Takes the profile of a rank at work: torch's trace of its next steps."""

import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from workers.ranks.profiles import STEP, PlanFigures, ProfiledStep, RankProfile
from workers.scheduling.plan import StepPlan


class StepProfiler:
    """Takes the profile of one rank's next steps. All calls but `read` on the thread that launches them; begins when it
    is made."""

    def __init__(self, rank: int, num_steps: int, device: torch.device) -> None:
        self._rank, self._num_steps = rank, num_steps
        self._plans: list[PlanFigures] = []
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    @property
    def full(self) -> bool:
        return len(self._plans) == self._num_steps

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        self._plans.append((plan.number, plan.num_tokens - plan.num_decodes, plan.num_decodes))
        with record_function(f"{STEP}{plan.number}"):
            yield

    def stop(self) -> None:
        """Waits for what the device has been given."""
        self._profile.stop()

    def read(self) -> RankProfile:
        """Once stopped; on any thread: a long trace takes seconds to write."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            steps = _steps_in(path, self._plans)
            return RankProfile(self._rank, steps, gzip.compress(path.read_bytes(), 1))


def _steps_in(path: pathlib.Path, plans: Sequence[PlanFigures]) -> tuple[ProfiledStep, ...]:
    """By a process of its own: to parse a trace of 27 MB holds the interpreter, and with it all streams of the worker, for
    0.8 s; a thousand steps of a GPU have more than ten of these, and routers give a worker up that is silent for 5 s."""
    found = subprocess.run(
        [sys.executable, "-m", "workers.ranks.profiles", str(path)],
        input=json.dumps(plans).encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=True,
    )
    return tuple(ProfiledStep(*step) for step in json.loads(found.stdout))
