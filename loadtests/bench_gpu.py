"""The engine on one CUDA device: scheduler and runner in one process, no service, the Llama-3.1-8B shape, random weights.

    python -m loadtests.bench_gpu [--out docs/benchmarks/engine-CARD.json] [--layers 32] [--peer vllm.json]

--peer names what another engine measured on the same card just before, in rows of the same names; a row's must and aim
are multiples of its peer's.

decode_b*   output tok/s at 1k of context: (time of 129 tokens − time of 1) / 128, prompts of 1,024 tokens
prefill_*   prompt tok/s, 32,768 tokens of prompts in one go, one token drawn of each
ttft_1024   ms from the intake of one prompt of 1,024 tokens to its first token
mixed_256   output tok/s of 256 requests, 100 to 1,024 tokens in, 100 to 1,024 out
"""

import argparse
import json
import pathlib
import random
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from headrace.blocks import BlockHasher
from headrace.config import EngineConfig
from headrace.values import ParallelLayout, Request, RequestKey, SamplingParams
from loadtests.report import Report, Row, add_arguments, timed
from workers.models.checkpoint import Checkpoint
from workers.models.parallel import form
from workers.models.weights import LoadProgress, Wanted
from workers.ranks.rank import Launched, UnderWay
from workers.ranks.runner import Runner
from workers.scheduling.blocks import BlockLedger
from workers.scheduling.scheduler import Scheduler, SchedulerLimits

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
# of the peer's rate: what must be reached, and what is aimed at
GOALS = {
    "prefill_1024": (0.95, 1.02),
    "prefill_4096": (0.95, 1.02),
    "ttft_1024": (1.0, 1.1),
    "decode_b1": (1.0, 1.08),
    "decode_b32": (1.0, 1.08),
    "decode_b128": (1.0, 1.15),
    "decode_b256": (1.0, 1.12),
    "mixed_256": (1.0, 1.15),
}
MAX_CONTEXT_TOKENS, MAX_STEP_TOKENS, MAX_NUM_SEQS, BLOCK_SIZE = 8192, 8192, 256, 32
DECODE_TOKENS = 128


def random_weights(checkpoint: Checkpoint, wanted: tuple[Wanted, ...], progress: LoadProgress) -> None:
    """Small and not zero: zeros are faster than any real weight."""
    for number, weight in enumerate(wanted):
        if weight.target.dim() == 1:
            weight.target.fill_(1.0)
        else:
            weight.target.normal_(0.0, 0.02)
        progress(number + 1, len(wanted))


class OneRank:
    """An engine without a service: plan, launch, apply, one step ahead."""

    def __init__(self, num_layers: int, num_blocks: int, *, graphs: bool = True) -> None:
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": num_layers}), encoding="utf-8")
        engine = EngineConfig(
            device="cuda",
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_step_tokens=MAX_STEP_TOKENS,
            max_context_tokens=MAX_CONTEXT_TOKENS,
        )
        context = form(ParallelLayout(), 0, None, "nccl", device=torch.device("cuda", 0))
        self.runner = Runner(
            Checkpoint.open(folder), ParallelLayout(), 0, engine, context, fill=random_weights, graphs=graphs
        )
        self.scheduler = Scheduler(
            SchedulerLimits(MAX_NUM_SEQS, MAX_STEP_TOKENS, MAX_CONTEXT_TOKENS, 100_000, 10.0),
            BlockLedger(num_blocks, BLOCK_SIZE),
            lambda adapter, salt: BlockHasher(revision="r", kv_format="f", block_size=BLOCK_SIZE, cache_salt=salt),
            vocab_size=int(str(SHAPE["vocab_size"])),
        )
        self._number = 0
        self.runner.warm_up()

    def serve(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> None:
        """All of them from intake to their last token. Every prompt has a salt of its own: nothing is found in a cache."""
        for prompt, count in zip(prompts, num_tokens, strict=True):
            self._number += 1
            sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            key = RequestKey(f"r{self._number}")
            self.scheduler.submit(Request(key, tuple(prompt), sampling, cache_salt=key.request_id), 0.0)
        flights: deque[Launched] = deque()
        while True:
            while len(flights) < 2 and (plan := self.scheduler.schedule(0.0)) is not None:
                flights.append(self.runner.launch(plan))
            if not flights:
                break
            flight = flights.popleft()
            result = flight.wait() if isinstance(flight, UnderWay) else flight
            assert result is not None
            self.scheduler.apply(result, 0.0)
        self.scheduler.reset_cache()
        self.scheduler.ledger.drain_events()


def beside(row: Row, peers: dict[str, float], peer_name: str) -> Row:
    """The row with its peer's figure, where there is one."""
    peer = peers.get(row.name)
    if peer is None:
        return row
    lower = row.better == "lower"
    ratio = peer / row.value if lower else row.value / peer
    must, aim = (peer / goal if lower else peer * goal for goal in GOALS[row.name])
    return replace(row, must=must, aim=aim, peer=peer, peer_name=peer_name, ratio=ratio)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=32, help="fewer than 32 only to try the bench itself")
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--eager", action="store_true", help="every kernel launched from Python, no CUDA graphs")
    parser.add_argument("--peer", type=pathlib.Path, help='{"name": …, "rows": {"decode_b1": …, …}}')
    add_arguments(parser)
    arguments = parser.parse_args()
    card = torch.cuda.get_device_properties(0)
    report = Report("gpu", ("torch", "triton"), hardware=f"{card.name}, {card.total_memory / 2**30:.0f} GiB")
    peer: dict[str, Any] = (
        {"name": "", "rows": {}} if arguments.peer is None else json.loads(arguments.peer.read_text())
    )

    def add(row: Row) -> None:
        report.add(beside(row, peer["rows"], peer["name"]))

    began = time.perf_counter()
    engine = OneRank(arguments.layers, arguments.blocks, graphs=not arguments.eager)
    add(Row("ready_s", time.perf_counter() - began, "s", "lower", note="random weights made on the device"))
    draw = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw.randrange(1000, 120_000) for _ in range(length)] for _ in range(count)]

    def best(count: int, length: int, tokens: int, repeats: int) -> list[float]:
        inputs = [prompts(count, length) for _ in range(repeats)]
        return timed(lambda: engine.serve(inputs.pop(), [tokens] * count), repeats)

    engine.serve(prompts(4, 64), [8] * 4)
    for length in (1024, 4096):
        count = 32_768 // length
        best(count, length, 1, 1)
        samples = best(count, length, 1, 3)
        add(Row(f"prefill_{length}", count * length / min(samples), "tok/s", "higher", samples=samples))
    samples = [seconds * 1e3 for seconds in best(1, 1024, 1, 5)]
    add(Row("ttft_1024", min(samples), "ms", "lower", samples=samples))
    for batch in (1, 32, 128, 256):
        best(batch, 1024, 4, 1)
        first = min(best(batch, 1024, 1, 2))
        samples = [(whole - first) / DECODE_TOKENS for whole in best(batch, 1024, DECODE_TOKENS + 1, 2)]
        note = f"TPOT {min(samples) * 1e3:.2f} ms"
        add(Row(f"decode_b{batch}", batch / min(samples), "tok/s", "higher", samples=samples, note=note))
    lengths = [draw.randint(100, 1024) for _ in range(256)]
    outputs = [draw.randint(100, 1024) for _ in range(256)]
    mixed = [prompts(1, length)[0] for length in lengths]
    samples = timed(lambda: engine.serve(mixed, outputs), 1)
    add(Row("mixed_256", sum(outputs) / samples[0], "tok/s", "higher", samples=samples))
    return report.close(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
