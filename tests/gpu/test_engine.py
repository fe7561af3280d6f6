"""The runner on a CUDA device in bfloat16 against the same weights on a CPU in float32: prompts whole, in chunks and
behind a cached prefix, then decode steps, which replay graphs. Greedy ids are the CPU's up to its margins. Steps one
ahead draw what steps of their own do; a launch waits for nothing on the device, and no step takes memory that the one
before did not."""

import pathlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import EngineConfig
from headrace.values import ParallelLayout, SamplingParams
from tests.model_steps import DECODES, Steps, decodes, prompts, random_ids
from tests.tiny import make_checkpoint, make_variant
from workers.models.parallel import form
from workers.ranks.rank_runner import Launched, UnderWay
from workers.scheduling.plan import RowStart, RowWork, StepPlan, StepResult

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

# those whose head dimension is a power of two, as the kernels want
NAMES = (
    "llama",
    "llama-mha-tied",
    "llama-mqa",
    "llama-biased",
    "llama-llama3-rope",
    "mistral-wide-heads",
    "qwen2-yarn",
)
LIMIT = 2e-2
MARGIN = 0.1  # of a row's standard deviation: below, rounding may decide which token is best


def steps_on(
    device: str, dtype: str, folder: pathlib.Path, *, graphs: bool = True, max_step_tokens: int = 256
) -> Steps:
    engine = EngineConfig.model_validate(
        {
            "device": device,
            "dtype": dtype,
            "num_blocks": 64,
            "block_size": 16,
            "max_num_seqs": 8,
            "max_step_tokens": max_step_tokens,
        }
    )
    return Steps.of(folder, form(ParallelLayout(), 0, None, device=torch.device(device)), engine, graphs=graphs)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_cpus(name: str, tmp_path: pathlib.Path) -> None:
    folder = make_variant(tmp_path, name)
    weights = {key: value.to(torch.bfloat16) for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = steps_on("cuda", "bfloat16", folder), steps_on("cpu", "float32", folder)
    prompts(ours)
    prompts(theirs)
    begun = tuple(int(ours.logits[at][0].argmax()) for at in (0, 3, 4))
    drawn = decodes(ours)
    decodes(theirs, [begun, *drawn[:-1]])
    assert len(ours.logits) == len(theirs.logits) == 5 + DECODES
    for found, expected in zip((logits.float().cpu() for logits in ours.logits), theirs.logits, strict=True):
        distance = float((found - expected).norm() / expected.norm())
        print(f"{name}: {distance:.2e}")
        assert distance < LIMIT
    for token_ids, expected in zip(drawn, theirs.logits[5:], strict=True):
        chosen = expected[range(3), list(token_ids)]
        assert ((expected.amax(-1) - chosen) < MARGIN * expected.std(-1)).all()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_long_prompts_equal_the_cpus(tmp_path: pathlib.Path, graphs: bool) -> None:
    """Alone and whole, which takes the library's kernel; in chunks; behind a cached prefix; and what decodes after it."""
    folder = make_checkpoint(tmp_path / "llama", max_position_embeddings=1024, head_dim=64)
    both = [
        steps_on(*on, folder, graphs=graphs, max_step_tokens=1024) for on in (("cuda", "bfloat16"), ("cpu", "float32"))
    ]
    ids = random_ids(700, 5)
    for steps in both:
        steps.prompt(0, ids, range(44))
        steps.plan(RowWork(0, 700, 1, (9,)), num_decodes=1)
        steps.prompt(1, [*ids[:512], *random_ids(30, 6)], [*range(32), 50, 51], cached=512)
        steps.plan(ends=(0,))
        steps.prompt(0, ids, range(44), chunks=(512, 100))
    ours, theirs = ([logits.float().cpu() for logits in steps.logits] for steps in both)
    assert len(ours) == len(theirs) == 6
    for found, expected in zip(ours, theirs, strict=True):
        assert float((found - expected).norm() / expected.norm()) < LIMIT


SHARED = {"max_tokens": 1000, "ignore_eos": True}
SAMPLING = (
    SamplingParams(**SHARED, temperature=0.0),
    SamplingParams(**SHARED, temperature=0.9, seed=5, top_p=0.9, top_k=30, min_p=0.01),
    SamplingParams(**SHARED, temperature=1.0, seed=7, presence_penalty=0.5, repetition_penalty=1.2, num_logprobs=3),
    SamplingParams(**SHARED, temperature=0.7, seed=9, logit_bias=((4, 2.0),), min_tokens=900, stop_token_ids=(8,)),
)
ROOM = 11  # blocks of each row


def begun(folder: pathlib.Path, *, graphs: bool = True) -> Steps:
    """Four rows, one a way to sample, that hold a prompt of 20 tokens each."""
    steps = steps_on("cuda", "bfloat16", folder, graphs=graphs)
    for row, sampling in enumerate(SAMPLING):
        steps.prompt(row, random_ids(20, row), range(ROOM * row, ROOM * row + 2), sampling=sampling)
    return steps


def next_step(steps: Steps, position: int) -> StepPlan:
    steps.number += 1
    new = [(ROOM * row + position // steps.size,) if position % steps.size == 0 else () for row in range(4)]
    work = tuple(RowWork(row, position, 1, None, new[row]) for row in range(4))
    return StepPlan(steps.number, work, num_decodes=4)


def awaited(launched: Launched) -> StepResult:
    assert isinstance(launched, UnderWay)
    result = launched.wait()
    assert result is not None
    return result


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_launch_waits_for_nothing_and_draws_what_a_step_of_its_own_draws(tmp_path: pathlib.Path) -> None:
    folder = make_variant(tmp_path, "llama")
    ahead, plain = begun(folder), begun(folder)
    expected = [awaited(plain.runner.launch(next_step(plain, position))) for position in range(20, 60)]
    flights: deque[Launched] = deque()
    found = []
    for position in range(20, 60):
        plan = next_step(ahead, position)
        # the first of its kind captures its graph and compiles its kernels
        with synchronising_is_an_error() if position > 20 else nullcontext():
            flights.append(ahead.runner.launch(plan))
        if len(flights) == 2:
            found.append(awaited(flights.popleft()))
    found.append(awaited(flights.popleft()))
    assert found == expected
    assert all(result.logprobs[2] is not None and len(result.logprobs[2].top) == 3 for result in found)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_prompt_beside_decodes_is_launched_without_waiting(tmp_path: pathlib.Path, graphs: bool) -> None:
    """With all that begins with it: penalties, bias, a sequence that resumes."""
    steps = begun(make_variant(tmp_path, "llama"), graphs=graphs)
    ids = tuple(random_ids(20, 9))
    for position, mode in ((20, nullcontext()), (21, synchronising_is_an_error())):
        plan = next_step(steps, position)
        starts = tuple(RowStart(4 + row, ids, ids[:1], sampling) for row, sampling in enumerate(SAMPLING[:3]))
        prompts = tuple(
            RowWork(4 + row, 0, 20, ids, (ROOM * row + 9, ROOM * row + 10), num_samples=1 + row) for row in range(3)
        )
        plan = replace(plan, work=plan.work + prompts, starts=starts)
        with mode:
            launched = steps.runner.launch(plan)
        assert len(awaited(launched).token_ids) == 4 + 1 + 2 + 3
        steps.plan(ends=(4, 5, 6))


def test_steps_take_no_more_memory_than_the_first(tmp_path: pathlib.Path) -> None:
    """The first ones are launched behind a sleeping device: of pinned buffers they hold as many at once as any can."""
    steps = begun(make_variant(tmp_path, "llama"))
    for position in range(20, 40):
        torch.cuda._sleep(20_000_000)
        awaited(steps.runner.launch(next_step(steps, position)))
    steps.logits.clear()
    before = held_memory()
    for position in range(40, 140):
        awaited(steps.runner.launch(next_step(steps, position)))
        steps.logits.clear()
    assert held_memory() == before


def held_memory() -> tuple[int, ...]:
    """What was asked of the driver since the start, on the device and pinned on the host; and bytes in use now."""
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    return device["num_device_alloc"], device["allocated_bytes.all.current"], host["num_host_alloc"]
