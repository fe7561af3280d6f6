"""Messages and tools: what is refused names the message by index; one conversation has one form."""

from typing import Any

import pytest

from headrace.errors import InvalidRequest
from router.edge.messages import check_messages, check_template_kwargs, check_tools

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_case_51_null_content_with_tool_calls_is_served_and_arguments_become_an_object() -> None:
    (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_case_51_the_list_form_of_a_text_is_the_text() -> None:
    parts = [{"type": "text", "text": "hi"}]
    assert check_messages([{"role": "user", "content": parts}]) == check_messages([USER])
    two = check_messages([{"role": "user", "content": [*parts, {"type": "text", "text": "there"}]}])
    assert two[0]["content"] == "hi\nthere"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": ""}, USER],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER],
        [USER, {"role": "assistant", "content": "hello"}],
        [{"role": "tool", "content": "3", "tool_call_id": "c"}],
    ],
)
def test_case_51_odd_but_meaningful_conversations_pass_unchanged(messages: list[dict[str, Any]]) -> None:
    assert check_messages(messages) == messages


def test_developer_is_system() -> None:
    assert check_messages([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "messages must be a list of at least 1 message, got None"),
        ([], "messages must be a list of at least 1 message, got []"),
        ("hi", "messages must be a list of at least 1 message, got 'hi'"),
        ([USER, 5], "messages[1] must be an object, got 5"),
        (
            [USER, {"content": "x"}],
            "messages[1].role must be one of system, developer, user, assistant, tool, function, got None",
        ),
        ([{"role": "wizard", "content": "x"}], "messages[0].role must be one of"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role must be one of"),
        (
            [USER, {"role": "user", "content": None}],
            "messages[1].content must be a string or a list of text parts, got None",
        ),
        ([{"role": "assistant", "content": None}], "messages[0].content must be a string"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string or a list of text parts, got 5"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1].type must be \"text\": this model reads text alone, got 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0] must be an object with type and text",
        ),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls must be a list of tool calls, got 5"),
        (
            [{"role": "assistant", "tool_calls": [{}]}],
            "messages[0].tool_calls[0] must be an object with a named function",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            "messages[0].tool_calls[0].function.arguments must be an object, or one as JSON text, got []",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments must be JSON: ",
        ),
    ],
)
def test_case_51_what_is_refused_is_named_by_its_index(messages: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_messages(messages)
    assert caught.value.message.startswith(said)


def test_tools_are_functions_with_names() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert check_tools([tool]) == [tool]
    assert check_tools([]) is None
    with pytest.raises(InvalidRequest, match=r"tools\[1\] must be an object with type"):
        check_tools([tool, {"type": "function", "function": {}}])
    with pytest.raises(InvalidRequest, match="tools must be a list of at most 128"):
        check_tools([tool] * 129)


def test_template_kwargs_cannot_stand_in_for_the_conversation() -> None:
    assert check_template_kwargs({"enable_thinking": False}) == {"enable_thinking": False}
    with pytest.raises(InvalidRequest, match="chat_template_kwargs must be an object without messages"):
        check_template_kwargs({"messages": []})
    with pytest.raises(InvalidRequest, match="chat_template_kwargs must be an object, got 5"):
        check_template_kwargs(5)
