"""The same GPUs as one aggregated pool and as a prefill and a decode pool, under the same open-loop traffic.

    python -m loadtests.disagg --traces azure=FILE.csv mooncake=FILE.jsonl --gpus 4 --out disagg-CARD.json
    python -m loadtests.disagg --traces azure=FILE.csv --deployments 2U:512 2U:2048 1P1D --rates 8 16
    python -m loadtests.disagg --try                # a tiny model on the CPU: that it runs, not how fast

Llama-3.1-8B shape, bf16, random weights. `2U:512`: two workers that do both, chunks of at most 512 tokens; `1P1D`: one of
each. Without --deployments: every split of the GPUs, and one pool in every chunk budget from 128 to 8,192. Without --rates:
rising ones around the trace's knee, until every SLO has lost goodput twice. Lengths and the shape of arrivals are the
trace's, its rate is scaled; every prompt is computed (no prefix is shared); prompts beyond the served context are left out
and counted. Placed on the worker with the least to do, by prompt tokens that wait and, where decoding, by requests that
run; `1P1D+tight/256`: by production's placement, which knows the targets of that SLO (none: `1P1D+`), decode in chunks
of at most 256. Every run is kept in --state and not made again, so that a call may end by --seconds and another go on;
SLOs are judged afterwards, from all runs there are.

goodput_TRACE_SLO_ratio     best goodput per GPU of two pools over the tuned single pool's (loadtests.judged has the SLOs)
crossover_TRACE_ms          the largest TPOT target at which two pools are better by a twentieth, with the tight TTFT
"""

import argparse
import asyncio
import importlib.util
import json
import pathlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any

import uvloop

from headrace.deployments import Deployment
from headrace.generators import at_rate
from headrace.traces import Prompts, TraceRow, read, within
from headrace.values import PrefillTarget
from loadtests.bench_pair import FULL, TINY, make_model, worker
from loadtests.disagg_plan import deployments_of, is_spent, named_deployment, rates_of
from loadtests.disagg_pools import Place, PlacedPools, Pools
from loadtests.judged import SLOS, TIGHT_TTFT_SECONDS, Point, by_tpot, crossover_ms, slo_of, verdicts
from loadtests.open_loop.answers import Answer, Outcome, asks
from loadtests.open_loop.loop import run
from loadtests.open_loop.strain import strains
from loadtests.report import Report, Row, add_arguments, cpu
from loadtests.worker_session import open_session
from router.decisions.tenants import Targets

WARMUP_FRACTION = 0.2


def judged(answer: Answer) -> tuple[float, float | None, float | None] | None:
    if answer.outcome is not Outcome.FINISHED or answer.ttft_seconds is None:
        return None
    gaps = sorted(after - before for before, after in pairwise(answer.times))
    p99 = gaps[max(-(-len(gaps) * 99 // 100) - 1, 0)] if gaps else None
    return answer.ttft_seconds, answer.tpot_seconds, p99


@asynccontextmanager
async def deployed(
    deployment: Deployment, shape: dict[str, Any], engine: dict[str, Any], *, on_gpus: bool
) -> AsyncIterator[Pools]:
    model = make_model(shape)
    async with AsyncExitStack() as stack:
        started = await asyncio.gather(
            *(
                stack.enter_async_context(
                    worker(
                        f"{role}{number}",
                        role,
                        model,
                        {**engine, "max_step_tokens": deployment.step_tokens(role)},
                        str(number) if on_gpus else None,
                    )
                )
                for number, role in enumerate(deployment.roles)
            )
        )
        places = []
        for number, (role, (address, _)) in enumerate(zip(deployment.roles, started, strict=True)):
            session = await stack.enter_async_context(open_session(address, "bench"))
            await session.greeted()
            places.append(Place(session, PrefillTarget(f"{role}{number}", 1, address)))
        pools = PlacedPools if deployment.placed else Pools
        yield pools(
            places[: deployment.num_prefill], places[deployment.num_prefill :], int(engine["max_context_tokens"])
        )


@dataclass
class Bench:
    """Owns the file of points."""

    state: pathlib.Path
    traces: dict[str, tuple[list[TraceRow], int]]
    shape: dict[str, Any]
    engine: dict[str, Any]
    seconds: float
    on_gpus: bool
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.points = kept(self.state)

    def missing(self, deployment: Deployment, rates: Sequence[float] | None) -> list[tuple[str, float]]:
        known = {point.key for point in self.points}
        return [
            (name, rate)
            for name, (rows, _) in self.traces.items()
            if rates is not None or not is_spent(self.points, name, deployment)
            for rate in rates or rates_of(rows, deployment.num_gpus)
            if (name, deployment.name, deployment.chunk, rate) not in known
        ]

    async def measure(self, deployment: Deployment, rates: Sequence[float] | None, deadline: float) -> None:
        """All that is missing of a deployment and can be over in time. One that fails begins anew with the next call."""
        missing = self.missing(deployment, rates)
        if not missing or monotonic() > deadline:
            return
        async with deployed(deployment, self.shape, self.engine, on_gpus=self.on_gpus) as pools:
            await self._warm_up(pools)
            for name, rate in missing:
                if monotonic() > deadline:
                    return
                if rates is None and is_spent(self.points, name, deployment):
                    continue
                await self._point(pools, deployment, name, rate)

    async def _warm_up(self, pools: Pools) -> None:
        rows = [TraceRow(number, 0.0, 64, 4) for number in range(4)]
        await run(asks(rows, Prompts(int(self.shape["vocab_size"]))), pools)

    async def _point(self, pools: Pools, deployment: Deployment, name: str, rate: float) -> None:
        rows, too_long = self.traces[name]
        if isinstance(pools, PlacedPools) and deployment.targets:
            slo, _ = slo_of(deployment.targets, name)
            pools.targets = Targets(slo.ttft_seconds, slo.tpot_seconds)
        chosen = at_rate(rows, round(rate * self.seconds), rate)
        heard = await run(asks(chosen, Prompts(int(self.shape["vocab_size"]))), pools)
        warm_up = heard.seconds * WARMUP_FRACTION
        point = Point(
            name,
            deployment.name,
            deployment.chunk,
            deployment.num_gpus,
            rate,
            heard.seconds - warm_up,
            too_long,
            tuple(judged(answer) for answer in heard.answers if answer.due >= warm_up),
            tuple(strains(heard.effort)),
        )
        self.points.append(point)
        with self.state.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(point)) + "\n")
        done = [answer for answer in point.answers if answer is not None]
        tpots = sorted(answer[1] * 1e3 for answer in done if answer[1] is not None)
        ttfts = sorted(answer[0] * 1e3 for answer in done)
        middle = f"TTFT p50 {ttfts[len(ttfts) // 2]:.0f} ms, TPOT p50 {tpots[len(tpots) // 2]:.1f} ms" if tpots else ""
        print(
            f"  {name} {deployment.name}:{deployment.chunk} at {rate:g}/s: {len(done)} of {len(point.answers)}, {middle}"
            f" {' '.join(point.strains)}",
            flush=True,
        )


def kept(state: pathlib.Path) -> list[Point]:
    lines = state.read_text(encoding="utf-8").splitlines() if state.exists() else []
    return [Point.from_json(json.loads(line)) for line in lines]


def report_of(points: Sequence[Point], hardware: str) -> Report:
    report = Report("disagg", ("torch", "triton"), hardware=hardware)
    for verdict in verdicts(points):
        if verdict.ratio is None and not verdict.split:
            continue
        note = (
            f"per GPU: two pools {verdict.split:.2f} requests/s ({verdict.split_by}), "
            f"one pool {verdict.aggregated:.2f} ({verdict.aggregated_by or 'none met it'})"
        )
        name = f"goodput_{verdict.trace}_{verdict.slo}_ratio"
        ratio = float("inf") if verdict.ratio is None else verdict.ratio
        report.add(Row(name, min(ratio, 99.0), "", "higher", note=note, peer=verdict.aggregated, peer_name="one pool"))
    for trace in sorted({point.trace for point in points}):
        crossover = crossover_ms(by_tpot(points, trace, TIGHT_TTFT_SECONDS.get(trace, SLOS["tight"][0])))
        note = "nowhere on this traffic" if crossover is None else ""
        report.add(Row(f"crossover_{trace}_ms", float(crossover or 0), "ms", "higher", note=note))
        left_out = max(point.num_too_long for point in points if point.trace == trace)
        report.add(
            Row(f"left_out_{trace}", float(left_out), "requests", "lower", note="longer than the served context")
        )
    return report


def draw(points: Sequence[Point], path: pathlib.Path) -> None:
    """Best goodput per GPU over the TPOT target, a panel a trace."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    traces = sorted({point.trace for point in points})
    figure, axes = plt.subplots(1, len(traces), figsize=(6 * len(traces), 4), squeeze=False)
    for axis, trace in zip(axes[0], traces, strict=True):
        ttft = TIGHT_TTFT_SECONDS.get(trace, SLOS["tight"][0])
        curve = by_tpot(points, trace, ttft)
        tpots = [each[0] for each in curve]
        axis.step(tpots, [each[1] for each in curve], where="post", label="one pool, tuned")
        axis.step(tpots, [each[2] for each in curve], where="post", label="prefill and decode pools, best split")
        if (crossover := crossover_ms(curve)) is not None:
            axis.axvline(crossover, linestyle=":", color="grey", label=f"crossover {crossover} ms")
        axis.set_title(f"{trace}, TTFT ≤ {ttft:g} s")
        axis.set_xlabel("TPOT target, ms")
        axis.set_ylabel("goodput, requests/s per GPU")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


async def measure(
    bench: Bench, deployments: Sequence[Deployment], rates: Sequence[float] | None, seconds: float
) -> None:
    deadline = monotonic() + seconds
    for deployment in deployments:
        await bench.measure(deployment, rates, deadline)
    left = sum(len(bench.missing(deployment, rates)) for deployment in deployments)
    print(
        f"  at most {left} runs are left: the same command goes on" if left else "  nothing is left to run", flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--traces", nargs="+", metavar="NAME=FILE", help="such as azure=FILE.csv mooncake=FILE.jsonl")
    parser.add_argument("--gpus", type=int, default=2, help="that the deployments share, where none are named")
    parser.add_argument("--deployments", nargs="+", type=named_deployment, metavar="2U:512|1P1D|1P1D+tight/256:2048")
    parser.add_argument("--rates", nargs="+", type=float, help="requests a second, all GPUs")
    parser.add_argument("--run-seconds", type=float, default=20.0, help="of traffic, each run")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no run begins later")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--state", type=pathlib.Path, default=pathlib.Path("disagg-points.jsonl"))
    parser.add_argument("--judge", metavar="HARDWARE", help="run nothing: judge what --state has, measured there")
    parser.add_argument("--try", dest="tiny", action="store_true", help="a tiny model on the CPU")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.judge:
        return judge(kept(arguments.state), arguments.judge, arguments)
    scale = TINY if arguments.tiny else FULL
    context = 256 if arguments.tiny else arguments.context
    engine = {**scale.engine, "max_context_tokens": context}
    if not arguments.tiny:
        engine |= {"max_num_seqs": 256}
    if arguments.tiny:
        traffic = {"tiny": ([TraceRow(i, i / 4, 20 + 37 * i % 150, 3 + i % 9) for i in range(400)], 0)}
        deployments = arguments.deployments or [Deployment.parse(each) for each in ("2U:32", "2U:64", "1P1D")]
        rates, seconds, hardware = arguments.rates or [4.0, 8.0], 3.0, cpu()
    else:
        import torch

        named = dict(each.split("=", 1) for each in arguments.traces)
        traffic = {name: within(read(pathlib.Path(path)), context) for name, path in named.items()}
        deployments = arguments.deployments or deployments_of(arguments.gpus)
        rates, seconds = arguments.rates, arguments.run_seconds
        most = max(deployment.num_gpus for deployment in deployments)
        hardware = f"{most} × {torch.cuda.get_device_properties(0).name}"
    bench = Bench(arguments.state, traffic, scale.shape, engine, seconds, not arguments.tiny)
    uvloop.run(measure(bench, deployments, rates, arguments.seconds))
    return judge(bench.points, hardware, arguments)


def judge(points: Sequence[Point], hardware: str, arguments: argparse.Namespace) -> int:
    report = report_of(points, hardware)
    if arguments.out is not None and importlib.util.find_spec("matplotlib") is None:
        print("  no curves: matplotlib is not installed here; --judge draws them from --state elsewhere", flush=True)
    elif arguments.out is not None:
        draw(points, arguments.out.with_suffix(".png"))
    return report.close(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
