"""Requests that the scheduler's tests make, and the model that never ends by itself."""

from typing import Any

from headrace.values import Request, RequestKey, SamplingParams
from tests.plan_checker import CheckedWorker, FakeModel
from workers.scheduling.scheduler import ChunkDone

NO_EOS = FakeModel(eos_token_ids=frozenset())


def request(
    name: str,
    num_prompt: int = 6,
    max_tokens: int = 4,
    *,
    n: int = 1,
    first: int = 1,
    priority: int = 0,
    seconds_left: float | None = None,
    **sampling: Any,
) -> Request:
    """Prompts with different `first` tokens share nothing."""
    return Request(
        RequestKey(name),
        (first, *(1 + at % 30 for at in range(1, num_prompt))),
        SamplingParams(max_tokens=max_tokens, **sampling),
        n=n,
        priority=priority,
        seconds_left=seconds_left,
    )


def prefilled(worker: CheckedWorker, ticket: Request, held_blocks: int = 0, now: float = 0.0) -> list[ChunkDone]:
    worker.scheduler.ticket(ticket, held_blocks, now)
    return [chunk for events in worker.run(now) for chunk in events.chunks]
