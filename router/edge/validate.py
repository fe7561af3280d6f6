"""The one place that turns what a client sent into a Job. Pure: seeds are drawn by what it is given.

Every value that cannot be served raises InvalidRequest, which names the field as the client knows it, the value and
what is allowed, before anything is dispatched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import LimitsConfig
from headrace.errors import Amount, ContextLengthExceeded, InvalidRequest
from headrace.tracing import MAX_TRACEPARENT_CHARACTERS, TraceContext
from headrace.values import MAX_LOGIT_BIAS, MAX_SAMPLES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, SamplingParams
from router.decisions.tenants import EVERYONE, MAX_PRIORITY, Tenancy, Tenant
from router.jobs import Job, Served
from router.text.served import ServedModel

ID_HEADER = "x-request-id"  # gRPC: a field of the request
TIMEOUT_HEADER, CLASS_HEADER = "x-headrace-timeout", "x-headrace-class"  # gRPC: metadata; a call has its own deadline
CONVERSATION_HEADER, REVISION_HEADER = (
    "x-headrace-conversation",
    "x-headrace-revision",
)  # to us; and back, with a canary
TRACE_HEADER = "traceresponse"  # W3C: the span that the answer is of
MAX_SALT_CHARACTERS = 256
MAX_CONVERSATION_CHARACTERS = 256
MAX_ID_CHARACTERS = 128
MAX_SECONDS = 86_400
SEEDS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Parameters as a client sent them, of any type; None where it was silent."""

    max_tokens: Any = None
    min_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    seed: Any = None
    ignore_eos: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    logprobs: Any = None
    n: Any = None
    best_of: Any = None
    priority: Any = None
    cache_salt: Any = None
    service_class: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What comes beside a request: the router's id for it, who asks, time left, the trace it belongs to, and the class that
    a header names, which the request's own word overrules. `trace`: its own span, where it is traced. `conversation`: the
    client's own name for what it belongs to. `served`: as Job has it."""

    request_id: str
    tenant: Tenant = EVERYONE
    seconds_left: float | None = None
    traceparent: str = ""
    service_class: str | None = None
    arrived_at: float | None = None
    trace: TraceContext | None = None
    conversation: str = ""
    served: Served | None = None


class JobMaker:
    """Makes Jobs within the configured limits. `draw_seed` gives 0 ≤ seed < 2⁶⁴. `reach` gives the longest context that
    a worker serves just now, None when there is none: less than the checkpoint names where its attention is windowed,
    more where its rotation is stretched."""

    def __init__(
        self,
        limits: LimitsConfig,
        draw_seed: Callable[[], int],
        reach: Callable[[], int | None] = lambda: None,
        tenancy: Tenancy | None = None,
    ) -> None:
        self._tenancy = tenancy or Tenancy()
        self._limits = limits
        self._draw_seed = draw_seed
        self._reach = reach

    def max_context_tokens(self, model: ServedModel) -> int:
        """What prompt and answer may have together: the workers' word, else the checkpoint's."""
        return self._reach() or model.max_context_tokens

    def make(
        self,
        model: ServedModel,
        prompt_token_ids: Sequence[int],
        asked: Asked,
        envelope: Envelope,
        *,
        continues: bool = False,
    ) -> Job:
        """A Job, or InvalidRequest. `continues` as in Job."""
        self.check_room(model, len(prompt_token_ids))
        prompt = check_token_ids("prompt", prompt_token_ids, model.vocab_size)
        max_tokens = self._max_tokens(model, len(prompt), asked.max_tokens)
        given = {name: _number(name, getattr(asked, name)) for name in _NUMBERS if getattr(asked, name) is not None}
        if given.get("top_k") == -1:  # as other servers say off
            given["top_k"] = 0
        sampling = SamplingParams(
            max_tokens=max_tokens,
            logit_bias=_logit_bias(asked.logit_bias),
            seed=self._seed(asked.seed),
            ignore_eos=_flag("ignore_eos", asked.ignore_eos),
            stop_token_ids=_stop_token_ids(asked.stop_token_ids),
            num_logprobs=asked.logprobs,
            **given,
        )
        sampling.check_vocabulary(model.vocab_size)
        n = _integer("n", 1 if asked.n is None else asked.n, 1, MAX_SAMPLES)
        if asked.best_of is not None and asked.best_of != n:
            raise InvalidRequest.out_of_range("best_of", asked.best_of, f"absent or equal to n ({n})")
        tenant = envelope.tenant
        service_class, targets = self._tenancy.class_for(tenant, _class_name(asked, envelope))
        return Job(
            request_id=envelope.request_id,
            model=model.name,
            prompt_token_ids=prompt,
            sampling=sampling,
            n=n,
            stop=_stops(asked.stop),
            priority=_priority(asked.priority, tenant),
            cache_salt=tenant.salt(_salt(asked.cache_salt)),
            seconds_left=envelope.seconds_left,
            traceparent=envelope.trace.traceparent if envelope.trace is not None else _passed_on(envelope.traceparent),
            continues=continues,
            tenant=tenant.name,
            service_class=service_class,
            targets=targets,
            repeatable=sampling.temperature == 0 or asked.seed is not None,
            arrived_at=envelope.arrived_at,
            trace=envelope.trace,
            conversation=f"{tenant.name}\0{envelope.conversation}" if envelope.conversation else "",
            served=envelope.served,
        )

    def check_room(self, model: ServedModel, num_prompt_tokens: int) -> None:
        """Before its ids are looked at: a prompt that is far too long must not cost the time that it takes to check it."""
        limit = self.max_context_tokens(model)
        if num_prompt_tokens >= limit:
            raise ContextLengthExceeded(
                f"{_too_long(limit)}, with room for an answer, got {num_prompt_tokens} tokens",
                field="prompt",
                limit=limit,
                actual=num_prompt_tokens,
            )

    def _max_tokens(self, model: ServedModel, num_prompt_tokens: int, asked: Any) -> int:
        """What was asked for, when prompt and answer fit the context; else the room there is, up to the default."""
        limit = self.max_context_tokens(model)
        room = limit - num_prompt_tokens
        if asked is not None:
            asked = _integer("max_tokens", asked, 1, None)
            if asked > room:
                raise ContextLengthExceeded(
                    f"{_too_long(limit)}, max_tokens among them, got {num_prompt_tokens} prompt tokens and max_tokens "
                    f"{asked}: {num_prompt_tokens + asked} tokens",
                    field="max_tokens",
                    limit=limit,
                    actual=num_prompt_tokens + asked,
                )
            return int(asked)
        return min(room, self._limits.default_max_tokens)

    def _seed(self, asked: Any) -> int:
        if asked is None:
            return self._draw_seed()
        return _integer("seed", asked, -(SEEDS // 2), SEEDS - 1) % SEEDS


def _too_long(limit: int) -> str:
    """In two phrases of other servers, by which agents know that they must make their conversation shorter: some look for
    the one, some for the other, few for the error's code."""
    return f"prompt is too long: this model's maximum context length is {limit} tokens"


def _passed_on(traceparent: str) -> str:
    return traceparent if len(traceparent) <= MAX_TRACEPARENT_CHARACTERS else ""


_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


def check_seconds(field: str, value: str) -> float:
    """A header's time limit."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequest.out_of_range(field, value, f"a number of seconds above 0 and at most {MAX_SECONDS}")
    return seconds


def check_conversation(value: str) -> str:
    if len(value) > MAX_CONVERSATION_CHARACTERS:
        allowed = f"at most {MAX_CONVERSATION_CHARACTERS} characters"
        raise InvalidRequest.out_of_range(CONVERSATION_HEADER, Amount(f"{len(value)} characters"), allowed)
    return value


def check_client_id(client_id: str, field: str = "request_id") -> str:
    """A client's own id of a request, as it may stand in ids, headers and logs. `field`: where the client put it."""
    if len(client_id) > MAX_ID_CHARACTERS or not (client_id.isascii() and client_id.isprintable()) or " " in client_id:
        raise InvalidRequest.out_of_range(
            field, client_id, f"at most {MAX_ID_CHARACTERS} printable ASCII characters without spaces"
        )
    return client_id


def check_token_ids(field: str, token_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """A prompt as token ids, each in the vocabulary."""
    allowed = f"token ids from 0 to {vocab_size - 1}"
    if not token_ids:
        raise InvalidRequest.out_of_range(field, Amount("no tokens"), "at least 1 token")
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest.out_of_range(f"{field}[{position}]", token_id, allowed)
    return tuple(token_ids)


def check_text(field: str, text: str) -> str:
    """Text that can be encoded: half of a surrogate pair is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest.out_of_range(field, text[error.start], "Unicode text without lone surrogates") from error
    return text


def _integer(field: str, value: Any, low: int, high: int | None) -> int:
    if type(value) is not int or value < low or (high is not None and value > high):
        allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise InvalidRequest.out_of_range(field, value, allowed)
    return value


def _number(field: str, value: Any) -> Any:
    """A number; its range, and whether it must be whole, is checked where SamplingParams is built."""
    if type(value) not in (int, float) or abs(value) > SEEDS:
        raise InvalidRequest.out_of_range(field, value, "a finite number")
    return value


def _flag(field: str, value: Any) -> bool:
    if value is None or type(value) is bool:
        return bool(value)
    raise InvalidRequest.out_of_range(field, value, "true or false")


def _priority(value: Any, tenant: Tenant) -> int:
    default = min(0, tenant.max_priority)
    return _integer("priority", default if value is None else value, -MAX_PRIORITY, tenant.max_priority)


def _class_name(asked: Asked, envelope: Envelope) -> str | None:
    value = envelope.service_class if asked.service_class is None else asked.service_class
    if value is not None and not isinstance(value, str):
        raise InvalidRequest.out_of_range("service_class", value, "a string")
    return value


def _salt(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_SALT_CHARACTERS:
        raise InvalidRequest.out_of_range("cache_salt", value, f"a string of at most {MAX_SALT_CHARACTERS} characters")
    if "\0" in value:  # which parts the domains of tenants
        raise InvalidRequest.out_of_range("cache_salt", value, "a string without NUL characters")
    return check_text("cache_salt", value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, Sequence):
        raise InvalidRequest.out_of_range("stop", value, "a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        given, allowed = Amount(f"{len(stops)} strings"), f"at most {MAX_STOP_STRINGS} strings"
        raise InvalidRequest.out_of_range("stop", given, allowed)
    for position, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest.out_of_range(
                f"stop[{position}]", stop, f"a string of 1 to {MAX_STOP_CHARACTERS} characters"
            )
        check_text(f"stop[{position}]", stop)
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidRequest.out_of_range("stop_token_ids", value, "a list of token ids")
    return tuple(value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """JSON's keys are strings, protobuf's are integers; both name token ids."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InvalidRequest.out_of_range("logit_bias", value, "an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        given, allowed = Amount(f"{len(value)} entries"), f"at most {MAX_LOGIT_BIAS} entries"
        raise InvalidRequest.out_of_range("logit_bias", given, allowed)
    return tuple((_bias_token(key), _number(f"logit_bias[{key}]", bias)) for key, bias in value.items())


def _bias_token(key: Any) -> int:
    if type(key) is int:
        return key
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
        return int(key)
    raise InvalidRequest.out_of_range("logit_bias", key, "an object whose keys are token ids")
