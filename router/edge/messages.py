"""Chat messages and tools as OpenAI clients send them, checked and brought to the form that chat templates read. Pure.

The same conversation gives the same prompt however it was written: text in a list of parts equals the text itself,
`developer` is the older `system`, and arguments of a tool call are an object even where they came as JSON text.
"""

from collections.abc import Mapping
from typing import Any

from headrace.errors import InvalidRequest
from router.edge.json_input import parse_json
from router.text.templates import RESERVED_KWARGS

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_TOOLS = 128

_invalid = InvalidRequest.out_of_range


def check_messages(value: Any) -> list[dict[str, Any]]:
    """InvalidRequest names the message by its index."""
    if not isinstance(value, list) or not value:
        raise _invalid("messages", value, "a list of at least 1 message")
    return [_message(f"messages[{position}]", message) for position, message in enumerate(value)]


def check_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools for the template; None when there are none."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise _invalid("tools", value, f"a list of at most {MAX_TOOLS} tools")
    for position, tool in enumerate(value):
        field = f"tools[{position}]"
        match tool:
            case {"type": "function", "function": {"name": str()}}:
                pass
            case _:
                raise _invalid(field, tool, 'an object with type "function" and a named function')
    return value


def check_template_kwargs(value: Any) -> dict[str, Any] | None:
    """Values for the template's own variables; they cannot stand in for the messages or the template."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _invalid("chat_template_kwargs", value, "an object")
    reserved = sorted((RESERVED_KWARGS | {"chat_template"}) & value.keys())
    if reserved:
        raise _invalid("chat_template_kwargs", reserved, "an object without messages, tools, documents, chat_template")
    return value


def _message(field: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(field, message, "an object")
    role = message.get("role")
    if role not in ROLES:
        raise _invalid(f"{field}.role", role, f"one of {', '.join(ROLES)}")
    checked = {**message, "role": "system" if role == "developer" else role}
    if message.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(f"{field}.tool_calls", message["tool_calls"])
    elif message.get("content") is None and not message.get("function_call"):
        raise _invalid(f"{field}.content", None, "a string or a list of text parts")
    if message.get("content") is not None:
        checked["content"] = _content(f"{field}.content", message["content"])
    return checked


def _content(field: str, content: Any) -> str:
    """One text, the parts' own joined by line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(field, content, "a string or a list of text parts")
    return "\n".join(_part(f"{field}[{position}]", part) for position, part in enumerate(content))


def _part(field: str, part: Any) -> str:
    match part:
        case str():
            return part
        case {"type": "text" | "input_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)} if kind not in ("text", "input_text", "refusal"):
            raise _invalid(f"{field}.type", kind, '"text": this model reads text alone')
        case _:
            raise _invalid(field, part, "an object with type and text")


def _tool_calls(field: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _invalid(field, calls, "a list of tool calls")
    return [_tool_call(f"{field}[{position}]", call) for position, call in enumerate(calls)]


def _tool_call(field: str, call: Any) -> dict[str, Any]:
    match call:
        case {"function": {"name": str()} as function}:
            arguments = _arguments(f"{field}.function.arguments", function.get("arguments"))
            return {"type": "function", **call, "function": {**function, "arguments": arguments}}
        case _:
            raise _invalid(field, call, "an object with a named function")


def _arguments(field: str, arguments: Any) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        arguments = parse_json(field, arguments, field)
    if not isinstance(arguments, dict):
        raise _invalid(field, arguments, "an object, or one as JSON text")
    return arguments
