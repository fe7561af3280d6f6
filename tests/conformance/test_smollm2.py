"""The small real model against transformers: the same greedy tokens, up to where two of them are as good as equal."""

import json
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch
from tokenizers import Tokenizer

from headrace.config import EngineConfig
from tests.model_steps import Steps, alone

pytestmark = [pytest.mark.torch, pytest.mark.model]

MARGIN = 1e-3
COUNT = 24
ENGINE = EngineConfig(num_blocks=24, max_num_seqs=2, max_context_tokens=512)
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about a water mill.",
    "List the first 12 primes, and say why 1 is not one of them.",
)
EOS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rendered(question: str) -> str:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(smollm2: pathlib.Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def steps(smollm2: pathlib.Path) -> Steps:
    return Steps.of(smollm2, alone(), ENGINE)


def ours(steps: Steps, ids: list[int]) -> list[int]:
    blocks = range(24)
    drawn = list((steps.prompt(0, ids, blocks, chunks=(20,)) or pytest.fail("no result")).token_ids)
    while len(drawn) < COUNT and drawn[-1] != EOS:
        drawn += (steps.decode((0,), len(ids) + len(drawn) - 1, (blocks,)) or pytest.fail("no result")).token_ids
    return drawn


@pytest.mark.timeout(300)
def test_greedy_tokens_are_those_of_transformers(
    smollm2: pathlib.Path, steps: Steps, tokenizer: Tokenizer, record_property: Callable[[str, object], None]
) -> None:
    """transformers is shown our answer once, whole, and says at every position what it would have drawn."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ties = {}
    for question in QUESTIONS:
        ids = tokenizer.encode(rendered(question)).ids
        drawn = ours(steps, ids)
        with torch.inference_mode():
            logits = model(torch.tensor([ids + drawn[:-1]])).logits[0, len(ids) - 1 :]
        top = logits.topk(2)
        margins = (top.values[:, 0] - top.values[:, 1]).tolist()
        same = [token == best for token, best in zip(drawn, top.indices[:, 0].tolist(), strict=True)]
        tie = next((i for i, margin in enumerate(margins) if margin < MARGIN), len(drawn))
        assert all(same[:tie]), f"{question}: differs at {same.index(False)}, before any margin below {MARGIN}"
        ties[question] = tie if tie < len(drawn) else None
    record_property("first_position_with_margin_below_1e-3", json.dumps(ties))
    print("first position whose top-2 margin is below 1e-3:", ties)


def test_it_knows_the_capital_of_france(steps: Steps, tokenizer: Tokenizer) -> None:
    drawn = ours(steps, tokenizer.encode(rendered(QUESTIONS[0])).ids)
    assert tokenizer.decode(drawn) == "The capital of France is Paris."
    assert drawn[-1] == EOS


def test_the_chat_template_renders_what_is_asked_here(smollm2: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == rendered(QUESTIONS[0])
