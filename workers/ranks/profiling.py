"""Takes the profile of a rank at work: torch's trace of its next steps."""

import gzip
import json
import pathlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from workers.ranks.profiles import STEP, RankProfile, steps_of
from workers.scheduling.plan import StepPlan


class StepProfiler:
    """Takes the profile of one rank's next steps. All calls but `read` on the thread that launches them; begins when it
    is made."""

    def __init__(self, rank: int, num_steps: int, device: torch.device) -> None:
        self._rank, self._num_steps = rank, num_steps
        self._plans: list[tuple[int, int, int]] = []
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
            text = path.read_bytes()
        events = json.loads(text)["traceEvents"]
        return RankProfile(self._rank, steps_of(events, self._plans), gzip.compress(text, 1))
