"""What is run on a GPU host, in which order, and for how long at most: as values. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BENCHMARKS, CARDS = Path("docs/benchmarks"), Path("cluster/simulation/cards")
PYTEST = ("-m", "pytest", "-c", "/dev/null", "--rootdir=.", "-p", "no:cacheprovider", "-q")
ENGINE = ("--parts", "engine,serving,idle,attention,start")


@dataclass(frozen=True, slots=True)
class Part:
    """`arguments` are Python's. Not begun with less than `usual` seconds left; ended after `most`."""

    name: str
    usual: float
    most: float
    arguments: tuple[str, ...]
    out: Path | None = None
    devices: str = ""  # that it sees; "": all
    done_when: str = ""  # what it says once nothing of it is left
    peer: str = ""  # arguments that name what another engine's bench said, where it was run


@dataclass(frozen=True, slots=True)
class Host:
    """What a day is planned for. `traces`: by name, a file that the host has."""

    card: str
    num_gpus: int
    traces: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Knee:
    """Around the rate at which so many GPUs keep an SLO no longer: rates (all GPUs together), and what to try there, from
    the likeliest on, both pools and one."""

    rates: Sequence[float]
    deployments: Sequence[str]


def plan(host: Host) -> list[Part]:
    """In the order of their worth; what the host lacks is left out."""
    known = {part.name: part for part in _parts(host)}
    order = next(names for least, names in ORDER.items() if host.num_gpus >= least)
    return [known[name] for name in order if name in known]


def _parts(host: Host) -> list[Part]:
    def bench(name: str, file: str, usual: float, most: float, *more: str, devices: str = "", peer: str = "") -> Part:
        out = BENCHMARKS / f"{file}-{host.card}.json"
        arguments = ("-m", f"loadtests.{name}", *more, "--out", str(out))
        return Part(file, usual, most, arguments, out, devices, peer=peer)

    def test(path: str, usual: float) -> Part:
        return Part(path, usual, 3 * usual, (*PYTEST, f"tests/{path}.py"))

    parts = [
        test("gpu/test_kernels", 60),
        test("gpu/test_engine", 100),
        test("gpu/test_ahead", 40),
        test("gpu/test_deterministic", 70),
        test("gpu/test_profile", 40),
        test("gpu/test_link", 20),
        test("gpu/test_pair", 30),
        test("gpu/test_sums", 60),
        test("gpu/test_parallel", 110),
        test("contract/test_kv_link", 40),
        test("contract/test_kv_link_peers", 80),
        bench("bench_kernels", "kernels", 40, 150, devices="0"),
        bench("bench_gpu", "engine", 240, 450, *ENGINE, devices="0", peer="--peer"),
        bench("bench_gpu", "steps", 80, 240, "--parts", "steps", *_cost(host.card), devices="0"),
        bench("bench_handoff", "handoff", 30, 120, "--source-device", "1", devices="0"),
        bench("bench_link", "link", 80, 300, "--scheme", "nccl", "--sweep", devices="0"),
        bench("bench_pair", "handoff-pair", 120, 300, peer="--vllm"),
        bench("bench_reshard", "handoff-reshard", 40, 150),
        bench("bench_parallel", "parallel", 70, 200),
    ]
    return parts + [_disagg(host, trace, knees) for trace, knees in KNEES.items() if _can_split(host, trace)]


def _can_split(host: Host, trace: str) -> bool:
    return trace in host.traces and host.num_gpus >= 2


def _cost(card: str) -> tuple[str, ...]:
    path = CARDS / f"{card}.json"
    return ("--cost", str(path)) if path.exists() else ()


def _disagg(host: Host, trace: str, knees: Mapping[int, Knee]) -> Part:
    gpus = max(number for number in knees if number <= host.num_gpus)
    knee = knees[gpus]
    file = f"disagg-{trace}-{host.card}" + ("x4" if gpus == 4 else "")
    out = BENCHMARKS / f"{file}.json"
    arguments = (
        "-m",
        "loadtests.disagg",
        *("--traces", f"{trace}={host.traces[trace]}", "--gpus", str(gpus), "--run-seconds", "16"),
        *("--deployments", *knee.deployments, "--rates", *(f"{rate:g}" for rate in knee.rates)),
        *("--seconds", "260", "--state", str(out.with_suffix(".jsonl")), "--out", str(out)),
    )
    return Part(f"disagg-{trace}", 150, 320, arguments, out, done_when="nothing is left to run")


# By number of GPUs: settings that were the best of two pools or of one at some SLO by the planner's model, which has
# production's placement for both (docs/benchmarks/disagg-candidates-h200.json).
KNEES: Mapping[str, Mapping[int, Knee]] = {
    "mooncake": {
        2: Knee((4, 7, 8), ("1P1D+code", "2U+:256", "2U+:512", "1P1D+tight", "1P1D+tight/256", "2U+:1024")),
        4: Knee(
            (10, 12, 16),
            (
                "3P1D+tight/256",
                "4U+:256",
                "4U+:512",
                "3P1D+code/256",
                "4U:1024",
                "4U+:1024",
                "3P1D+code",
                "2P2D+tight/256",
            ),
        ),
    },
    "azure": {
        2: Knee((38, 42), ("1P1D+tight/256", "2U+:256", "1P1D+chat", "2U:2048", "2U:512")),
        4: Knee((76, 84), ("2P2D+tight/256", "4U+:256", "2P2D+chat", "4U+:2048", "4U:512")),
    },
}

PEER, PAIR_PEER = "peer", "pair-peer"  # another engine's own benches, just before ours
_ONE = (
    *("steps", "gpu/test_kernels", "kernels", "gpu/test_engine", PEER, "engine", "gpu/test_deterministic"),
    *("gpu/test_ahead", "gpu/test_profile", "gpu/test_link", "contract/test_kv_link", "contract/test_kv_link_peers"),
    *("gpu/test_sums", "gpu/test_pair", "gpu/test_parallel"),
)
_TWO = (
    *("contract/test_kv_link", "contract/test_kv_link_peers", "link", "gpu/test_sums", "gpu/test_kernels", "kernels"),
    *(PAIR_PEER, "handoff-pair", "disagg-mooncake", "gpu/test_engine", PEER, "engine", "gpu/test_pair"),
    *("gpu/test_parallel", "gpu/test_deterministic", "handoff", "gpu/test_link", "gpu/test_profile", "gpu/test_ahead"),
    *("parallel", "steps", "disagg-azure"),
)
ORDER: Mapping[int, Sequence[str]] = {
    4: ("disagg-mooncake", "handoff-reshard", *(each for each in _TWO if each != "disagg-mooncake")),
    3: ("handoff-reshard", *_TWO),
    2: _TWO,
    1: _ONE,
}


def rows_of_peer(said: Mapping[str, float]) -> dict[str, float]:
    """By the names of our own rows, from the names that vLLM's bench prints: decode_b1_tok_s, mixed256_out_tok_s."""
    names = {f"{row}_tok_s": row for row in ("prefill_1024", "prefill_4096")}
    names |= {f"decode_b{batch}_tok_s": f"decode_b{batch}" for batch in (1, 32, 128, 256)}
    names |= {"ttft_1024_ms": "ttft_1024", "mixed256_out_tok_s": "mixed_256"}
    return {ours: said[theirs] for theirs, ours in names.items() if theirs in said}
