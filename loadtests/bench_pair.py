"""A prefill and a decode worker as two whole processes, each of which sees one GPU, asked over Worker.Session.

    python -m loadtests.bench_pair [--devices 1,0] [--out docs/benchmarks/handoff-pair-CARD.json]
    python -m loadtests.bench_pair --try            # a tiny model on the CPU, over gloo: that it runs, not how fast

Llama-3.1-8B shape, bf16, the same random weights on both sides, blocks of 32 tokens, chunks of --chunk tokens. Alone
means a worker of the two that computes and answers, in the same process and the same run.

answers_equal_fraction      of prompts whose tokens are those of the decode worker alone, up to a margin below MARGIN
handover_runnable_ms_*      prefill's last kernel done (by the device's clock) → runnable in decode's scheduler, a decode
                            batch of 128 at 1k of context running
handover_*_ms               its parts, p50: the tokens' way, to the step's result on the host, announced, heard by decode;
                            beside it the blocks', until they are pulled; from the later of both until it is runnable
handover_steps_p99          … → the device begins the first step with it, less a fixed 3 ms, in mean steps
ttft_added_*_ms             median TTFT of a lone prompt handed over − the same alone on the prefill worker, whose card is
                            the one that computes it either way; taken in turn. The note has the decode worker alone too
itl_p99_beside_over_alone   p99 of the gaps of 64 streams while 8k prompts are handed over one after the other, over
                            that of the same streams alone; itl_p99_aggregated_*: while decode computes them itself
launch_ms, held_ms, …        of the steps meanwhile: see loadtests.launch_times
late_*                      of a second pair, which launches late (engine.late_launch): that of what a late launch is for;
                            late_step_ratio and late_itl_ratio say what it costs, of the batch's steps and the streams' gaps
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal

import uvloop

from headrace.values import PrefillTarget, SamplingParams
from loadtests import vllm_pair
from loadtests.hand_over_times import HandOver, hand_overs, quantile, step_seconds
from loadtests.launch_times import launch_rows
from loadtests.one_rank import LLAMA_8B
from loadtests.report import Report, Row, add_arguments
from loadtests.worker_session import Heard, Session, open_session

START_SECONDS = 240.0
MARGIN = 0.02
FIXED_MS = 3.0
# who computes a prompt: decode alone, prefill alone (and answers), or prefill for decode
Where = Literal["decode", "prefill", "pair"]
PATHS: tuple[Where, ...] = ("prefill", "decode", "pair")
PHASES = ("answers", "lone", "hand_over_beside_batch", "streams")
OF_LATE_LAUNCH = ("hand_over_beside_batch", "streams")


@dataclass(frozen=True)
class Scale:
    """Sizes in tokens."""

    shape: dict[str, Any]
    engine: dict[str, Any]
    answers: tuple[int, ...] = (33, 500, 1024, 2048, 2049, 8000)
    lone: tuple[tuple[str, int, float, float], ...] = (("2k", 2048, 6.0, 2.0), ("8k", 8192, 8.0, 3.0))
    lone_rounds: int = 12
    num_streams: int = 64
    stream_tokens: int = 500
    stream_prompt: int = 256
    window: tuple[int, int] = (100, 400)
    num_long: int = 12
    long_prompt: int = 8192
    stream_rounds: int = 2
    batch: int = 128
    batch_prompt: int = 1024
    num_hand_overs: int = 150
    hand_over_prompt: int = 2048


FULL = Scale(
    LLAMA_8B,
    {
        "device": "cuda",
        "dtype": "bfloat16",
        "block_size": 32,
        "num_blocks": 14_000,
        "max_num_seqs": 192,
        "max_step_tokens": 2048,
        "max_context_tokens": 12_288,
    },
)
TINY = Scale(
    {
        **LLAMA_8B,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 2000,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    {
        "block_size": 8,
        "num_blocks": 600,
        "max_num_seqs": 24,
        "max_step_tokens": 64,
        "max_context_tokens": 1024,
    },
    answers=(5, 64, 70),
    lone=(("2k", 64, 6.0, 2.0), ("8k", 256, 8.0, 3.0)),
    lone_rounds=3,
    num_streams=8,
    stream_tokens=60,
    stream_prompt=8,
    window=(10, 50),
    num_long=2,
    long_prompt=256,
    stream_rounds=1,
    batch=8,
    batch_prompt=16,
    num_hand_overs=8,
    hand_over_prompt=64,
)


@asynccontextmanager
async def worker(
    name: str, role: str, model: pathlib.Path, engine: dict[str, Any], device: str | None
) -> AsyncIterator[tuple[str, pathlib.Path]]:
    """Its address, and where its notes are once this is left."""
    notes = model / f"{name}.notes.json"
    given = {"worker_id": name, "role": role, "model": str(model), "engine": engine, "notes": str(notes)}
    environment = {**os.environ} if device is None else {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.noted_worker", json.dumps(given)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            words = (await child.stdout.readline()).decode().split()
        if words[:1] != ["ready"]:
            raise SystemExit(f"worker {name} did not start")
        yield words[2], notes
        child.stdin.close()
        async with asyncio.timeout(60):
            await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@dataclass
class Bench:
    """One run: asks decode, with prefill or alone. Requests are named by their phase, by which notes find them."""

    scale: Scale
    report: Report
    decode: Session
    source: Session
    prefill: PrefillTarget
    late: bool = False
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    asked: int = 0

    def add(self, row: Row) -> None:
        """One of a late launch without a bound: what must hold of both is said where they are compared."""
        self.report.add(replace(row, name=f"late_{row.name}") if self.late else row)

    def compared(self, name: str, of: str, mean_ms: float) -> None:
        """A mean, which whoever launches late may make at most a hundredth longer than it was ahead."""
        ahead = next((row for row in self.report.rows if row.name == name), None)
        self.add(Row(name, mean_ms, "ms", "lower"))
        if self.late and ahead is not None:
            note = f"{mean_ms:.3f} ms launched late, {ahead.value:.3f} one step ahead"
            self.report.add(Row(f"late_{of}_ratio", mean_ms / ahead.value, "", "lower", must=1.01, aim=1.0, note=note))

    def ask(
        self, phase: str, length: int, max_tokens: int, *, where: Where, prompt: Sequence[int] = (), **how: Any
    ) -> Heard:
        self.asked += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **how})
        prompt = prompt or self.prompt(length)
        session = self.source if where == "prefill" else self.decode
        return session.ask(f"{phase}-{self.asked}", prompt, sampling, self.prefill if where == "pair" else None)

    def prompt(self, length: int) -> list[int]:
        vocabulary = int(self.scale.shape["vocab_size"])
        return [self.draw.randrange(1000, vocabulary - 100) for _ in range(length)]

    async def answers(self) -> None:
        equal, close, total = 0, [], 0
        for length in self.scale.answers:
            prompt = self.prompt(length)
            for how in ({}, {"temperature": 0.8, "seed": 7}):
                alone, pair = [
                    await self.ask("answer", length, 24, where=where, prompt=prompt, num_logprobs=2, **how).end()
                    for where in PATHS[1:]
                ]
                total += 1
                at = next(
                    (i for i, (a, b) in enumerate(zip(alone.token_ids, pair.token_ids, strict=True)) if a != b), None
                )
                if at is not None:
                    close.append(alone.margins[at])
                equal += at is None or (not how and alone.margins[at] < MARGIN)
        note = f"{total - len(close)} of {total} equal throughout" + (f", margins {close}" if close else "")
        self.add(Row("answers_equal_fraction", equal / total, "", "higher", must=1.0, note=note))

    async def lone(self) -> None:
        for label, length, must, aim in self.scale.lone:
            ttft_ms: dict[str, list[float]] = {where: [] for where in PATHS}
            for number in range(self.scale.lone_rounds + 2):
                for where in PATHS:
                    heard = await self.ask(f"lone{label}", length, 2, where=where).end()
                    if number >= 2:
                        ttft_ms[where].append(heard.ttft_seconds * 1e3)
            prefill, decode, pair = (statistics.median(ttft_ms[where]) for where in PATHS)
            note = f"{pair:.2f} ms handed over, {prefill:.2f} alone on prefill, {decode:.2f} alone on decode"
            row = Row(f"ttft_added_{label}_ms", pair - prefill, "ms", "lower", must, aim, samples=ttft_ms["pair"])
            self.add(replace(row, peer=prefill, peer_name="alone on the prefill worker", note=note))

    async def _streams(self, beside: Where | None) -> tuple[list[float], list[float]]:
        """The gaps of the streams, and the TTFT of the prompts beside them, in ms."""
        scale = self.scale
        streams = [
            self.ask("stream", scale.stream_prompt, scale.stream_tokens, where="decode")
            for _ in range(scale.num_streams)
        ]
        for heard in streams:
            await heard.reach(scale.window[0])
        ttft = []
        if beside is not None:
            for _ in range(scale.num_long):
                heard = await self.ask(f"long-{beside}", scale.long_prompt, 2, where=beside).end()
                ttft.append(heard.ttft_seconds * 1e3)
        told = min(len(heard.at) for heard in streams)
        for heard in streams:
            await heard.end()
        last = min(scale.window[1], told) if beside else scale.window[1]
        return [gap * 1e3 for heard in streams for gap in heard.gaps(scale.window[0], last)], ttft

    async def streams(self) -> None:
        besides: tuple[Where | None, ...] = (None, "pair", "decode")
        gaps: dict[Where | None, list[float]] = {beside: [] for beside in besides}
        ttft: dict[Where | None, list[float]] = {beside: [] for beside in besides}
        for number in range(self.scale.stream_rounds):
            for where in besides if number == 0 and not self.late else besides[:2]:
                found, waited = await self._streams(where)
                gaps[where] += found
                ttft[where] += waited
        alone = quantile(gaps[None], 0.99)
        self.compared("itl_mean_alone_ms", "itl", statistics.mean(gaps[None]))
        for name, beside, must, aim in (("beside", besides[1], 1.3, 1.05), ("aggregated", besides[2], None, None)):
            if not gaps[beside]:
                continue
            p50, p99 = quantile(gaps[beside], 0.5), quantile(gaps[beside], 0.99)
            note = (
                f"p99 {p99:.2f} ms, alone {alone:.2f}; p50 {p50:.2f}, alone {quantile(gaps[None], 0.5):.2f}; "
                f"{len(gaps[beside])} gaps, {len(gaps[None])} alone"
            )
            self.add(Row(f"itl_p99_{name}_over_alone", p99 / alone, "", "lower", must, aim, note=note))
            loaded = ttft[beside]
            self.add(Row(f"ttft_8k_loaded_{name}_ms", statistics.median(loaded), "ms", "lower", samples=loaded))

    async def hand_over_beside_batch(self) -> None:
        scale = self.scale
        batch = [self.ask("batch", scale.batch_prompt, 4000, where="decode") for _ in range(scale.batch)]
        for heard in batch:
            await heard.reach(1)
        for _ in range(scale.num_hand_overs):
            await self.ask("busy", scale.hand_over_prompt, 2, where="pair").end()
            await asyncio.sleep(self.draw.random() * 0.02)  # at any moment of a step
        for heard in batch:
            if heard.over.is_set():
                raise SystemExit(f"the batch did not last: {heard.error}")
            self.decode.cancel(heard)

    def hand_overs(self, notes: dict[str, pathlib.Path]) -> None:
        prefill, decode = (json.loads(notes[name].read_text(encoding="utf-8")) for name in ("p", "d"))
        found = hand_overs(prefill, decode)
        if busy := [each for name, each in found.items() if name.startswith("busy-")]:
            self._beside_batch(busy, decode)
        if idle := [each for name, each in found.items() if name.startswith("lone2k-")][2:]:
            self._idle(idle)

    def _beside_batch(self, busy: Sequence[HandOver], decode: dict[str, Any]) -> None:
        for name, each in (("p50", 0.5), ("p99", 0.99)):
            samples = [hand_over.runnable * 1e3 for hand_over in busy]
            must, aim = {"p50": (3.0, 1.5), "p99": (8.0, 4.0)}[name]
            row = Row(
                f"handover_runnable_ms_{name}", quantile(samples, each), "ms", "lower", must, aim, samples=samples
            )
            self.add(row)
        for part in HandOver.PARTS:
            samples = [getattr(hand_over, part) * 1e3 for hand_over in busy]
            note = f"p99 {quantile(samples, 0.99):.3f} ms"
            self.add(Row(f"handover_{part}_ms", quantile(samples, 0.5), "ms", "lower", samples=samples, note=note))
        step_ms = statistics.mean(step_seconds(decode, scale_batch := self.scale.batch)) * 1e3
        self.compared("handover_step_ms", "step", step_ms)
        steps = [(hand_over.begun * 1e3 - FIXED_MS) / step_ms for hand_over in busy]
        note = f"mean step of {scale_batch} rows and more {step_ms:.2f} ms; p50 {quantile(steps, 0.5):.2f}"
        self.add(Row("handover_steps_p99", quantile(steps, 0.99), "steps", "lower", 2.0, 1.0, samples=steps, note=note))
        for row in launch_rows(decode, scale_batch):
            self.add(row)

    def _idle(self, idle: Sequence[HandOver]) -> None:
        samples = [each.runnable * 1e3 for each in idle]
        parts = ", ".join(
            f"{part} {quantile([getattr(each, part) * 1e3 for each in idle], 0.5):.2f}" for part in HandOver.PARTS
        )
        row = Row("handover_idle_2k_ms", quantile(samples, 0.5), "ms", "lower", samples=samples, note=parts)
        self.add(row)


def make_model(shape: dict[str, Any]) -> pathlib.Path:
    """A checkpoint without weights or a tokenizer that anyone reads."""
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "revision").write_text("random\n", encoding="utf-8")
    return folder


async def measure(
    report: Report, scale: Scale, devices: Sequence[str | None], phases: Sequence[str], *, late: bool = False
) -> None:
    model = make_model(scale.shape)
    engine = {**scale.engine, "late_launch": late}
    began = monotonic()
    async with AsyncExitStack() as stack:
        started = await asyncio.gather(
            *(
                stack.enter_async_context(worker(name, role, model, engine, device))
                for (name, role), device in zip((("p", "prefill"), ("d", "decode")), devices, strict=True)
            )
        )
        (prefill, _), (decode, _) = started
        session, source = [await stack.enter_async_context(open_session(each, "bench")) for each in (decode, prefill)]
        bench = Bench(scale, report, session, source, PrefillTarget("p", 1, prefill), late)
        bench.add(Row("ready_s", monotonic() - began, "s", "lower", note="both workers, random weights"))
        for phase in phases:
            await getattr(bench, phase)()
    bench.hand_overs({name: notes for name, (_, notes) in zip("pd", started, strict=True)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--devices", default="1,0", help="prefill's GPU and decode's, as CUDA_VISIBLE_DEVICES names them"
    )
    parser.add_argument("--chunk", type=int, default=2048, help="the most tokens of a step, on both sides")
    parser.add_argument("--blocks", type=int, default=FULL.engine["num_blocks"], help="fewer where both use one GPU")
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=PHASES, help="default: all")
    parser.add_argument("--launch", nargs="+", choices=("ahead", "late"), default=("ahead", "late"))
    parser.add_argument("--vllm", type=pathlib.Path, help="JSON lines of vLLM's modes pd and agg on the same cards")
    parser.add_argument("--try", dest="tiny", action="store_true", help="a tiny model on the CPU")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.tiny:
        report, scale, devices = Report("pair", ("torch",)), TINY, [None, None]
    else:
        import torch

        card = torch.cuda.get_device_properties(0)
        devices = arguments.devices.split(",")
        hardware = f"{len(set(devices))} × {card.name}, {card.total_memory / 2**30:.0f} GiB"
        report, scale = Report("pair", ("torch", "triton"), hardware=hardware), FULL
        sizes = {"max_step_tokens": arguments.chunk, "num_blocks": arguments.blocks}
        scale = replace(scale, engine={**scale.engine, **sizes})
    if "ahead" in arguments.launch:
        uvloop.run(measure(report, scale, devices, arguments.phases))
    if "late" in arguments.launch:
        phases = [phase for phase in arguments.phases if phase in OF_LATE_LAUNCH]
        uvloop.run(measure(report, scale, devices, phases, late=True))
    if arguments.vllm is not None:
        lines = arguments.vllm.read_text(encoding="utf-8").splitlines()
        peers = vllm_pair.peers(json.loads(line) for line in lines if line.startswith("{"))
        report.rows = vllm_pair.beside(report.rows, peers)
    return report.close(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
