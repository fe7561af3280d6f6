"""An answer as the client of a router sees it: text as it comes, then the whole, measured; and how to show it."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headrace.client import AsyncClient, Part, Path
from headrace.clock import Clock, SystemClock
from headrace.errors import InternalError

__all__ = ["Answer", "AsyncClient", "Options", "Path", "measured", "summary", "timeline"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request of one sample. `ttft_seconds` and `seconds` are the client's own measure, from the send on."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_seconds: float
    seconds: float
    path: Path

    @property
    def tpot_seconds(self) -> float:
        """Time per output token after the first; 0 when there was one."""
        return (self.seconds - self.ttft_seconds) / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line may say about sampling; None leaves it to the router."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}


async def measured(parts: AsyncGenerator[Part, None], clock: Clock | None = None) -> AsyncIterator[str | Answer]:
    """Each new piece of text, and the whole answer at the end. Leaving early cancels the request."""
    clock = clock or SystemClock()
    sent = clock.now()
    first: float | None = None
    text, finish = "", ""
    async with aclosing(parts):
        async for part in parts:
            if first is None and part.token_ids:
                first = clock.now()
            if part.text:
                text += part.text
                yield part.text
            finish = part.finish_reason or finish
            if part.usage is not None and part.path is not None:
                now, usage = clock.now(), part.usage
                counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
                yield Answer(text, finish, *counts, (now if first is None else first) - sent, now - sent, part.path)
                return
    raise InternalError("the answer ended without its usage")


def timeline(answer: Answer) -> list[tuple[str, str]]:
    """Where the request's time went, line by line: what, and how long and where."""
    path = answer.path
    cached = f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached"
    lines = [
        (
            "queue",
            f"{_ms(path.router_queue_seconds)} in the router, {_ms(path.worker_queue_seconds)} at the workers",
        ),
        (
            "prefill",
            f"{_ms(path.prefill_seconds)} on {path.prefill_worker or f'{path.decode_worker} (alone)'}, {cached}",
        ),
    ]
    if path.prefill_worker:
        blocks = "1 block" if path.blocks_moved == 1 else f"{path.blocks_moved} blocks"
        moved = f"{blocks}, {path.bytes_moved / 2**20:.2f} MiB moved"
        lines.append(("hand-off", f"{moved}; {_ms(path.transfer_exposed_seconds)} not hidden behind the prefill"))
    lines.append(("decode", f"{_ms(path.decode_seconds)} on {path.decode_worker}, {answer.completion_tokens} tokens"))
    lines.append(
        (
            "client",
            f"TTFT {_ms(answer.ttft_seconds)}, TPOT {_ms(answer.tpot_seconds)}, "
            f"{answer.tokens_per_second:.1f} tokens/s, finish {answer.finish_reason}",
        )
    )
    if path.num_preemptions or path.attempts > 1:
        lines.append(("trouble", f"{path.attempts} attempts, {path.num_preemptions} preemptions"))
    return lines


def summary(answer: Answer) -> str:
    """The same on one line, for under an answer in a chat."""
    prefilled = answer.path.prefill_worker or f"{answer.path.decode_worker} (alone)"
    return (
        f"TTFT {_ms(answer.ttft_seconds)} · {answer.tokens_per_second:.1f} tokens/s · prefilled by {prefilled} · "
        f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
