"""The bodies of the OpenAI API, as far as they are served.

A field that is null is absent. A field that nobody knows is refused, because a misspelled `max_tokens` that is ignored
costs more than an error; what OpenAI clients commonly send and what changes nothing here is dropped (IGNORED), and what
would change the answer is accepted at its default alone (ONLY_DEFAULT).
"""

import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.errors import InvalidRequest
from headrace.values import MAX_LOGPROBS
from router.edge.json_input import parse_json
from router.edge.validate import Asked

IGNORED = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
    }
)
ONLY_DEFAULT: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "bad_words": ([],),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """InvalidRequest for anything that is not a JSON object of known fields of the right types."""
        data = parse_json("the body", raw)
        if not isinstance(data, dict):
            raise InvalidRequest(f"the body must be a JSON object, got {_JSON_NAMES[type(data)]}")
        return cls.build(data)

    @classmethod
    def build(cls, data: Mapping[str, Any]) -> Self:
        fields = {name: value for name, value in data.items() if value is not None and name not in IGNORED}
        for name in ONLY_DEFAULT.keys() & fields.keys():
            value = fields.pop(name)
            if value not in ONLY_DEFAULT[name]:
                allowed = " or ".join(json.dumps(default) for default in ONLY_DEFAULT[name])
                raise InvalidRequest.out_of_range(name, value, f"absent or {allowed}: nothing else is served")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _translate(error) from error


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Extension(_Body):
    """`headrace` in a body: what only this server gives. `timeline`: where the request's time went, with its usage."""

    timeline: bool = False


class _Sampled(_Body):
    """What both endpoints share. Ranges are checked in `router.edge.validate`, and so are types where Any stands here."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    headrace: Extension = Extension()
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
    n: Any = None
    best_of: Any = None
    priority: Any = None
    cache_salt: Any = None
    service_class: Any = None
    reasoning_effort: Any = None

    def _asked(self, **changes: Any) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is for streams: stream must be true", field="stream_options")
        return Asked(**{name: getattr(self, name) for name in _SHARED} | changes)


_SHARED = tuple(name for name in Asked.__dataclass_fields__ if name != "logprobs")


class CompletionBody(_Sampled):
    prompt: Any = None
    echo: bool = False
    logprobs: Any = None

    def asked(self) -> Asked:
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo must be false with logprobs: a prompt's own are not served", field="echo")
        return self._asked(logprobs=self.logprobs)


class ChatBody(_Sampled):
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    chat_template_kwargs: Any = None
    max_completion_tokens: Any = None
    logprobs: bool = False
    top_logprobs: Any = None

    def asked(self) -> Asked:
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest.out_of_range("tool_choice", self.tool_choice, '"none" or "auto"')
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest.out_of_range("max_completion_tokens", both[1], f"equal to max_tokens ({both[0]})")
        max_tokens = both[0] if both[1] is None else both[1]
        return self._asked(logprobs=self._num_logprobs(), max_tokens=max_tokens)

    def template_tools(self) -> Any:
        return None if self.tool_choice == "none" else self.tools

    def template_kwargs(self) -> Any:
        """What the client gives its model's template: the effort too, which some read, where it gives no other."""
        effort, given = self.reasoning_effort, self.chat_template_kwargs
        if effort is None or not isinstance(given, dict | None):
            return given
        if not isinstance(effort, str):
            raise InvalidRequest.out_of_range("reasoning_effort", effort, "a string")
        return {"reasoning_effort": effort, **(given or {})}

    def _num_logprobs(self) -> int | None:
        top = self.top_logprobs
        if top is None or (top == 0 and not self.logprobs):
            return 0 if self.logprobs else None
        if type(top) is not int or not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequest.out_of_range("top_logprobs", top, f"an integer from 0 to {MAX_LOGPROBS}")
        if not self.logprobs:
            raise InvalidRequest("logprobs must be true for top_logprobs", field="logprobs")
        return top


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def _translate(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])[:80]
    if not field:  # a name that is no text has no place
        return InvalidRequest(f"the name of a parameter must be Unicode text, got {str(first['input'])[:80]!r}")
    match first["type"]:
        case "missing":
            return InvalidRequest(f"{field} is required", field=field)
        case "extra_forbidden":
            return InvalidRequest(f"{field} is not a parameter of this endpoint", field=field)
        case _:
            allowed = str(first["msg"]).removeprefix("Input should be ")
            return InvalidRequest.out_of_range(field, first["input"], allowed)
