"""Chat templates: messages to the one string that a model was trained on, as transformers renders it.

A template is code that came with the checkpoint, and what it renders came from a client: it runs in jinja2's immutable
sandbox, sees plain JSON values alone, and is bounded in steps, memory and time (`budget`).
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from headrace.errors import CheckpointError, InvalidRequest
from router.text.budget import Budget, OverBudget, characters_of, within
from router.text.sandbox import BoundedEnvironment

DEFAULT = "default"
WITH_TOOLS = "tool_use"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED_KWARGS = frozenset({"messages", "tools", "documents"})
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

_REFUSALS = (
    jinja2.TemplateError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)

Message = Mapping[str, Any]


class ChatTemplates:
    """The named templates of one checkpoint, compiled once. Immutable; `now` feeds `strftime_now` in the templates."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = _environment(now)
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.compile_bounded(source, Budget.full(len(source)))
            except (jinja2.TemplateError, OverBudget, RecursionError, MemoryError, ValueError) as error:
                raise CheckpointError(f"chat template {name!r} does not compile: {error}", template=name) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, with the header of the assistant's turn at its end (unless `kwargs` says otherwise).

        InvalidRequest when the template refuses the messages or would cost too much, or the checkpoint has no template.
        """
        try:
            return self._render(messages, tools, kwargs, Budget.full(characters_of((messages, tools, kwargs))))
        except OverBudget as error:
            raise InvalidRequest(
                f"messages: the model's chat template cannot render them within bounds: {error}", field="messages"
            ) from error

    def render_briefly(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str | None:
        """As render(), but gives up after some milliseconds; None then. What an event loop may call."""
        try:
            return self._render(messages, tools, kwargs, Budget.brief())
        except OverBudget:
            return None

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
        budget: Budget,
    ) -> str:
        values = {"add_generation_prompt": True, **self._special_tokens, **(kwargs or {})}
        values.update(tools=tools, documents=None)
        template, plain = self._choose(tools), [_plain(message) for message in messages]
        try:
            with within(budget):
                return template.render({**values, "messages": plain})
        except _REFUSALS as error:
            raise _refused(error, plain) from error

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        name = WITH_TOOLS if tools is not None and WITH_TOOLS in self._templates else DEFAULT
        if name not in self._templates:
            raise InvalidRequest("messages: this model has no chat template; send a prompt instead", field="messages")
        return self._templates[name]


def _refused(error: BaseException, messages: Sequence[Message]) -> InvalidRequest:
    """What a client can do about it where it is that a template which knows no tools wants text of each message."""
    silent = next((at for at, message in enumerate(messages) if "content" not in message), None)
    field, why = "messages", str(error)
    if isinstance(error, jinja2.UndefinedError) and silent is not None:
        field = f"messages[{silent}].content"
        why = f'{field} is absent; it reads the text of each message: send "" with one that only calls tools'
    return InvalidRequest(f"messages: the model's chat template refuses them: {why}", field=field)


def load_templates(folder: pathlib.Path, now: Callable[[], datetime] = datetime.now) -> ChatTemplates:
    """The templates of a checkpoint folder: its .jinja files, else those in tokenizer_config.json; there may be none."""
    config = _read_json(folder / "tokenizer_config.json")
    tokens = {**_read_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    special = {name: _content(tokens[name]) for name in SPECIAL_TOKEN_NAMES if tokens.get(name) is not None}
    return ChatTemplates(_template_files(folder) or _template_field(config.get("chat_template")), special, now)


def _template_files(folder: pathlib.Path) -> dict[str, str]:
    files = {DEFAULT: folder / "chat_template.jinja"}
    files.update({file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))})
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}


def _template_field(field: object) -> dict[str, str]:
    match field:
        case None:
            return {}
        case str():
            return {DEFAULT: field}
        case list() if all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in field):
            return {entry["name"]: entry["template"] for entry in field}
        case _:
            raise CheckpointError(
                "tokenizer_config.json: chat_template must be a string or a list of {name, template}",
                file="tokenizer_config.json",
                field="chat_template",
            )


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}", file=file) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(content).__name__}", file=file)
    return content


def _content(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _plain(message: Message) -> dict[str, Any]:
    """A message without its null fields, which many templates render as "None", and with its reasoning under the
    names that templates read."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


class _Generation(Extension):
    """`{% generation %}` marks the assistant's own text for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment(now: Callable[[], datetime]) -> BoundedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    environment.bound()
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
