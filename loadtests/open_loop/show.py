"""What a bench shows in a terminal: how far it is, a line a rate, what would be sent."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from headrace.goodput import percentiles
from headrace.traces import Prompts
from loadtests.open_loop.answers import Outcome
from loadtests.open_loop.loop import Progress
from loadtests.open_loop.measures import Figure
from loadtests.open_loop.plan import VOCAB_SIZE, Traffic
from loadtests.open_loop.sweep import Point

TABLE_WIDTH = 170  # a table in a file or a pipe is not cut
SHOW_SECONDS = 0.25
REPEAT_SECONDS = 10.0
NUM_SHOWN = 8


class Showing:
    """Shows one run at a time, from a thread of its own that only reads: drawing takes no time from the loop's timers,
    but for the interpreter's lock."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def __call__(self, traffic: Traffic, progress: Progress) -> Iterator[None]:
        ended = threading.Event()
        show = self._bar if self._console.is_terminal else self._lines
        shower = threading.Thread(target=show, args=(traffic, progress, ended), daemon=True)
        shower.start()
        try:
            yield
        finally:
            ended.set()
            shower.join()

    def _bar(self, traffic: Traffic, progress: Progress, ended: threading.Event) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[how]}"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=self._console, auto_refresh=False, transient=True) as bar:
            task = bar.add_task(f"{traffic.rate:g}/s", total=len(traffic.rows), how="")
            while not ended.wait(SHOW_SECONDS):
                bar.update(task, completed=progress.num_sent, how=_how(progress), refresh=True)

    def _lines(self, traffic: Traffic, progress: Progress, ended: threading.Event) -> None:
        began = time.monotonic()
        while not ended.wait(REPEAT_SECONDS):
            self._console.print(
                f"{time.monotonic() - began:6.1f} s  {traffic.rate:g}/s: {progress.num_sent} of {len(traffic.rows)} "
                f"sent, {_how(progress)}",
                highlight=False,
            )


def _how(progress: Progress) -> str:
    ended = ", ".join(
        f"{number} {str(outcome).replace('_', ' ')}" for outcome, number in progress.outcomes.items() if number
    )
    return f"{progress.num_in_flight} in flight{', ' if ended else ''}{ended}"


def table(points: Sequence[Point]) -> Table:
    """A row a rate."""
    found = Table(show_edge=False, pad_edge=False)
    names = ("req/s", "sent", "not ok", "TTFT ms p50", "p90", "p99", "TPOT ms p50", "p99", "ITL ms p99", "E2E s p90")
    for name in (*names, "tok/s", "good/s", "SLO met"):
        found.add_column(name, justify="right", no_wrap=True)
    for point in points:
        one = point.summary
        missing = one.num_requests - one.outcomes[Outcome.FINISHED]
        found.add_row(
            f"{point.rate:.3g}{' !' if one.strains else ''}",
            str(one.num_requests),
            str(missing),
            *(shown(one.ttft_seconds.get(key), 1e3) for key in ("p50", "p90", "p99")),
            *(shown(one.tpot_seconds.get(key), 1e3) for key in ("p50", "p99")),
            shown(one.itl_seconds.get("p99"), 1e3),
            shown(one.e2e_seconds.get("p90")),
            f"{one.tokens_per_second:.4g}",
            shown(one.goodput_per_second),
            shown(one.attainment, 100, "%"),
        )
    return found


def shown(figure: Figure | None, scale: float = 1.0, unit: str = "") -> str:
    if figure is None:
        return "–"
    value = f"{_number(figure.value * scale)}{unit}"
    if figure.low is None or figure.high is None:
        return value
    return f"{value} ±{_number((figure.high - figure.low) / 2 * scale)}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def notes(points: Sequence[Point]) -> list[str]:
    """What to know before a figure is believed."""
    found = []
    for point in points:
        one = point.summary
        found += [f"at {point.rate:g}/s figures are the load generator's, too: {said}" for said in one.strains]
        found += [
            f"at {point.rate:g}/s {number} of {one.num_requests} requests: {error}"
            for error, number in one.errors.items()
        ]
        if one.num_cut_short:
            found.append(
                f"at {point.rate:g}/s {one.num_cut_short} of {one.num_requests} answers were shorter than asked: the "
                "server ends them by itself (it must take ignore_eos), and had less to do than the trace says"
            )
        if point.num_removed:
            found.append(
                f"at {point.rate:g}/s {point.num_removed} requests were too long for the context, and left out"
            )
    return found


def dry(traffic: Traffic) -> list[str]:
    """What would be sent at one rate."""
    rows = traffic.rows
    lengths = percentiles([float(row.input_tokens) for row in rows])
    outputs = percentiles([float(row.output_tokens) for row in rows])
    seen: set[tuple[int, ...]] = set()
    num_shared = 0
    for row in rows:
        num_shared += bool(row.prefix_ids) and row.prefix_ids[:1] in seen
        seen.add(row.prefix_ids[:1])
    lines = [
        f"{traffic.rate:g} requests a second: {len(rows)} requests within {traffic.seconds:.1f} s, "
        f"{sum(row.input_tokens for row in rows):,} prompt tokens, {sum(row.output_tokens for row in rows):,} to generate",
        f"  prompt tokens {_lengths(lengths)}; output tokens {_lengths(outputs)}; "
        f"{num_shared} prompts begin as an earlier one",
    ]
    prompts = Prompts(VOCAB_SIZE)
    for row in rows[:NUM_SHOWN]:
        first = " ".join(str(token) for token in prompts.of(row)[9:15])
        lines.append(f"  {row.seconds:9.3f} s  {row.input_tokens:6} → {row.output_tokens:5} tokens  {first} …")
    if len(rows) > NUM_SHOWN:
        lines.append(f"  … and {len(rows) - NUM_SHOWN} more, the last at {traffic.seconds:.3f} s")
    return lines


def _lengths(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in found.items())
