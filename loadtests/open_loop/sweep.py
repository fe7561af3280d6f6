"""Rates one after the other, kept in a folder as they end: an interrupted sweep goes on where it was.

FOLDER/plan.json        what all rates share; a folder of another plan is refused and left as it is
FOLDER/rate-2.5.json    a rate that is through, with every request's times
FOLDER/result.json      all rates, the knee, what it ran on
FOLDER/report.html      the same to read, the plots inside; curve.png beside it (needs the `plots` extra)
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from headrace.clock import Clock
from headrace.errors import ConfigError
from headrace.traces import Prompts
from loadtests.open_loop import knee
from loadtests.open_loop.answers import Answer, Run, asks
from loadtests.open_loop.client import Client
from loadtests.open_loop.loop import Progress, run
from loadtests.open_loop.measures import Summary, summarise
from loadtests.open_loop.plan import VOCAB_SIZE, Plan, Source, Traffic

COLUMNS = ("due", "lateness", "ttft", "tpot", "e2e", "tokens", "outcome")


@dataclass(frozen=True, slots=True)
class Point:
    """One rate that is through. `requests`: COLUMNS of each, in seconds; what is missing is None."""

    rate: float
    num_removed: int
    warmup_seconds: float
    summary: Summary
    requests: Sequence[Sequence[Any]]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "columns": COLUMNS}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Point":
        summary = Summary.from_json(data["summary"])
        return cls(data["rate"], data["num_removed"], data["warmup_seconds"], summary, data["requests"])

    @property
    def on_curve(self) -> knee.Point:
        mean = self.summary.e2e_seconds.get("mean")
        return knee.Point(self.rate, self.summary.finished_per_second, mean.value if mean else 0.0)


class Folder:
    """Owns a sweep's files."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def kept_plan(self) -> dict[str, Any] | None:
        """What an earlier run left; None where there was none. ConfigError when the folder is somebody else's."""
        try:
            kept = json.loads((self.path / "plan.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise ConfigError(f"out: {self.path} exists and holds no sweep: name another folder") from None
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"out: {self.path / 'plan.json'}: {error}") from error
        return dict(kept)

    def open(self, plan: Plan) -> None:
        """Writes nothing when the folder holds another plan's points."""
        kept = self.kept_plan()
        if kept is None:
            self._write("plan.json", plan.identity)
            return
        differing = [key for key, value in plan.identity.items() if kept.get(key) != value]
        if differing:
            key = differing[0]
            raise ConfigError(
                f"out: {self.path} holds a sweep of another plan: {key} was {kept.get(key)!r}, now "
                f"{plan.identity[key]!r}; name another folder"
            )

    def point(self, rate: float) -> Point | None:
        path = self.path / _name(rate)
        try:
            return Point.from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"out: {path} is not a point of a sweep ({error!r}): remove it to run it again"
            ) from error

    def keep(self, point: Point) -> None:
        self._write(_name(point.rate), point.as_json())

    def keep_result(self, result: dict[str, Any]) -> None:
        self._write("result.json", result)

    def _write(self, name: str, data: dict[str, Any]) -> None:
        """Whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        half = self.path / f".{name}.half"
        half.write_text(json.dumps(data, indent=None if "requests" in data else 1) + "\n", encoding="utf-8")
        os.replace(half, self.path / name)


Showing = Callable[[Traffic, Progress], AbstractContextManager[None]]


async def sweep(
    plan: Plan, source: Source, client: Client, folder: Folder | None, showing: Showing, clock: Clock | None = None
) -> list[Point]:
    points: list[Point] = []
    for rate in source.rates:
        point = folder.point(rate) if folder is not None else None
        if point is None:
            traffic, progress = source.at(rate), Progress()
            with showing(traffic, progress):
                sent = asks(traffic.rows, Prompts(VOCAB_SIZE))
                found = await run(sent, client, timeout_seconds=plan.timeout, progress=progress, clock=clock)
            point = measured(plan, traffic, found)
            if folder is not None:
                folder.keep(point)
        points.append(point)
    return points


def measured(plan: Plan, traffic: Traffic, found: Run) -> Point:
    warmup = plan.warmup_seconds(traffic.seconds)
    summary = summarise(found, plan.slo, warmup, plan.seed)
    return Point(traffic.rate, traffic.num_removed, warmup, summary, [_row(answer) for answer in found.answers])


def result(plan: Plan, points: Sequence[Point], environment: dict[str, Any]) -> dict[str, Any]:
    """What result.json holds: of each rate its summary."""
    found = knee.knee([point.on_curve for point in points])
    return {
        **environment,
        "plan": {**plan.identity, "rates": [point.rate for point in points]},
        "knee": {"kind": type(found).__name__, **asdict(found), "said": knee.said(found)},
        "points": [
            {"rate": point.rate, "num_removed": point.num_removed, **point.summary.as_json()} for point in points
        ],
    }


def _name(rate: float) -> str:
    return f"rate-{rate:.6g}.json"


def _row(answer: Answer) -> list[Any]:
    times = (answer.due, answer.sent - answer.due, answer.ttft_seconds, answer.tpot_seconds, answer.e2e_seconds)
    return [
        *(None if value is None else round(value, 6) for value in times),
        answer.num_tokens,
        str(answer.outcome),
    ]
