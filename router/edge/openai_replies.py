"""Pieces to the answers of the OpenAI API, whole and in chunks. Pure; a reply is owned by the request it answers."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.values import TokenLogprobs, Usage
from router.jobs import Piece
from router.stages import RequestTimeline
from router.text.vocabulary import Text

Json = dict[str, Any]
LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class Choice:
    """What has come of one choice."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    started: bool = False
    text_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all parts of an answer repeat."""

    id: str
    created: int
    model: str
    fingerprint: str

    def of(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class Reply:
    """One answer, for a request of one job or (completions) of several, each with `n` choices.

    `add` takes every piece, and says in which choice it fell; `whole` and `usage` read what was added.
    """

    whole_kind = chunk_kind = ""

    def __init__(self, head: Head, text: Text, n: int, num_jobs: int = 1, *, with_logprobs: bool = False) -> None:
        self._head = head
        self._text = text
        self._n = n
        self._with_logprobs = with_logprobs
        self._choices = [Choice(index) for index in range(num_jobs * n)]
        self._usages: list[Usage] = []
        self._timelines: list[RequestTimeline] = []
        self._num_tokens = 0
        self._cached_tokens = [0] * num_jobs

    def add(self, job: int, piece: Piece, *, keep: bool) -> Choice:
        """`keep`: for a whole answer. A stream keeps no text."""
        choice = self._choices[job * self._n + piece.index]
        choice.finish = piece.finish
        self._num_tokens += len(piece.token_ids)
        self._cached_tokens[job] = piece.cached_tokens
        if keep:
            choice.texts.append(piece.text)
            choice.logprobs.extend(piece.logprobs)
        if piece.usage is not None:
            self._usages.append(piece.usage)
        if piece.timeline is not None:
            self._timelines.append(piece.timeline)
        return choice

    def chunks(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        """The chunks that a piece makes: none where it brings nothing that a client would see."""
        raise NotImplementedError

    def whole(self) -> Json:
        return self._head.of(self.whole_kind, [self._whole_choice(choice) for choice in self._choices]) | {
            "usage": self.usage()
        }

    def usage_chunk(self) -> Json:
        """The last chunk of a stream that was asked for it."""
        return self._head.of(self.chunk_kind, []) | {"usage": self.usage()}

    def usage(self) -> Json:
        """As the workers counted; jobs of one request together."""
        return _usage(
            sum(usage.prompt_tokens for usage in self._usages),
            sum(usage.completion_tokens for usage in self._usages),
            sum(usage.cached_tokens for usage in self._usages),
        )

    def usage_so_far(self, num_prompt_tokens: int) -> Json:
        """Of several jobs those count as cached that have said something."""
        return _usage(num_prompt_tokens, self._num_tokens, sum(self._cached_tokens))

    def timeline(self) -> Json:
        """The `headrace` field, where it was asked for: one timeline for each job."""
        return {"timeline": [_timeline(timeline) for timeline in self._timelines]}

    def _whole_choice(self, choice: Choice) -> Json:
        raise NotImplementedError

    def _token(self, token_id: int) -> str:
        return self._text.token_bytes(token_id).decode(errors="replace")


class ChatReply(Reply):
    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def chunks(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        if not choice.started:
            choice.started = True
            yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})
        if piece.text or piece.logprobs:
            yield self._chunk(choice, {"content": piece.text}, self._logprobs(piece.logprobs))
        if piece.finish is not None:
            yield self._chunk(choice, {}, finish=piece.finish)

    def _chunk(self, choice: Choice, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        return self._head.of(
            self.chunk_kind,
            [{"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}],
        )

    def _whole_choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish,
        }

    def _logprobs(self, logprobs: "tuple[TokenLogprobs, ...] | list[TokenLogprobs]") -> Json | None:
        if not self._with_logprobs:
            return None
        content = [
            self._entry(at.token_id, at.logprob) | {"top_logprobs": [self._entry(*top) for top in at.top]}
            for at in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        raw = self._text.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}


class CompletionReply(Reply):
    """`echoes` holds the prompt's text of each job when it is to be repeated before the answer."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self,
        head: Head,
        text: Text,
        n: int,
        num_jobs: int = 1,
        *,
        with_logprobs: bool = False,
        echoes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(head, text, n, num_jobs, with_logprobs=with_logprobs)
        self._echoes = echoes

    def chunks(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        text = piece.text
        if not choice.started:
            choice.started = True
            text = self._echo(choice) + text
        if text or piece.logprobs or piece.finish is not None:
            yield self._head.of(
                self.chunk_kind,
                [
                    {
                        "index": choice.index,
                        "text": text,
                        "logprobs": self._logprobs(choice, piece.logprobs),
                        "finish_reason": piece.finish,
                    }
                ],
            )

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index // self._n] if self._echoes else ""

    def _whole_choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "text": self._echo(choice) + "".join(choice.texts),
            "logprobs": self._logprobs(choice, choice.logprobs),
            "finish_reason": choice.finish,
        }

    def _logprobs(self, choice: Choice, logprobs: "tuple[TokenLogprobs, ...] | list[TokenLogprobs]") -> Json | None:
        if not self._with_logprobs:
            return None
        tokens = [self._token(at.token_id) for at in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(choice.text_offset)
            choice.text_offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(at.logprob, LOWEST_LOGPROB) for at in logprobs],
            "top_logprobs": [
                {self._token(token_id): max(value, LOWEST_LOGPROB) for token_id, value in at.top} for at in logprobs
            ],
            "text_offset": offsets,
        }


def _usage(prompt: int, completion: int, cached: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _timeline(timeline: RequestTimeline) -> Json:
    return {
        "router_queue_seconds": timeline.router_queue_seconds,
        "decode_worker": timeline.decode_worker,
        "attempts": timeline.attempts,
        "ttft_stages": dict(timeline.ttft_stages),
        **asdict(timeline.worker),
    }
