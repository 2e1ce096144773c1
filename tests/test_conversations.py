"""Every common layout becomes the same messages, and what cannot be used says why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.data.conversations import RowError, parse_conversation

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]


def contents(row: dict[str, Any], **settings: Any) -> list[tuple[str, str]]:
    messages = parse_conversation(row, **settings).messages
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize(
    ("row", "expected_format"),
    [
        ({"messages": CHAT}, "messages"),
        ({"conversations": CHAT}, "messages"),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}]},
            "sharegpt",
        ),
        ({"instruction": "hi", "input": "", "output": "ok"}, "alpaca"),
        ({"prompt": "hi", "response": "ok"}, "prompt_response"),
        ({"prompt": "hi", "completion": "ok"}, "prompt_response"),
        ({"question": "hi", "answer": "ok"}, "prompt_response"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "prompt_response"),
    ],
)
def test_all_layouts_give_the_same_messages(row: dict[str, Any], expected_format: str) -> None:
    expected = [("user", "hi"), ("assistant", "ok")]
    assert contents(row) == expected
    assert contents(row, input_format=expected_format) == expected


def test_plain_text_is_a_document() -> None:
    conversation = parse_conversation({"text": "some words"}, origin="a.jsonl:3")
    assert conversation.text == "some words"
    assert conversation.identity == "a.jsonl:3"
    assert conversation.messages == []
    for text in ("  ", None, 3):
        with pytest.raises(RowError, match="no text"):
            parse_conversation({"text": text})


def test_identity_and_category_are_kept() -> None:
    conversation = parse_conversation({"id": 7, "category": "maths", "messages": CHAT})
    assert (conversation.identity, conversation.category) == ("7", "maths")


@pytest.mark.parametrize(
    ("alias", "role"),
    [
        ("human", "user"),
        ("gpt", "assistant"),
        ("bot", "assistant"),
        ("model", "assistant"),
        ("Assistant", "assistant"),
        ("function", "tool"),
        ("observation", "tool"),
        ("developer", "system"),
    ],
)
def test_known_role_names_are_mapped(alias: str, role: str) -> None:
    row = {"messages": [{"from": alias, "value": "x"}, *CHAT]}
    assert contents(row)[0] == (role, "x")


@pytest.mark.parametrize("role", ["narrator", None, 3, "", ["user"]])
def test_unknown_role_rejects_the_row_and_names_the_message(role: Any) -> None:
    row = {"messages": [*CHAT, {"role": role, "content": "x"}, *CHAT]}
    with pytest.raises(RowError, match="unknown role: message 2 has role"):
        parse_conversation(row)


def test_alpaca_input_system_and_history_are_used() -> None:
    row = {
        "system": "be brief",
        "history": [["a", "b"]],
        "instruction": "Add",
        "input": "2 3",
        "output": "5",
    }
    assert contents(row) == [
        ("system", "be brief"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Add\n\n2 3"),
        ("assistant", "5"),
    ]


def test_system_field_goes_first_and_two_system_prompts_are_refused() -> None:
    assert contents({"system": "s", "messages": CHAT})[0] == ("system", "s")
    with pytest.raises(RowError, match="two system prompts"):
        parse_conversation({"system": "s", "messages": [{"role": "system", "content": "t"}, *CHAT]})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, "b"], "a\nb"),
        ([], ""),
        (None, ""),
        ("", ""),
    ],
)
def test_text_of_content_parts_and_null(content: Any, text: str) -> None:
    row = {"messages": [{"role": "user", "content": content}, CHAT[1]]}
    assert contents(row)[0] == ("user", text)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (3, "content is not text: message 0: content is a number"),
        (True, "content is not text: message 0: content is a boolean"),
        ({"text": "hi"}, "content is not text: message 0: content is an object"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "has a part of type image_url"),
        ([4], "content part is not text"),
    ],
)
def test_content_that_is_not_text_rejects_the_row(content: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse_conversation({"messages": [{"role": "user", "content": content}, CHAT[1]]})


def tool_row(arguments: Any, **row: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [CHAT[0], answer, {"role": "tool", "content": "3"}, CHAT[1]], **row}


def test_tool_arguments_as_text_and_as_object_are_equal() -> None:
    rows = [parse_conversation(tool_row(a)).messages for a in ('{"x": 1}', {"x": 1})]
    assert rows[0] == rows[1]
    assert rows[0][1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert rows[0][1]["content"] == ""
    for empty in ("", None, {}):
        message = parse_conversation(tool_row(empty)).messages[1]
        assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ['{"x": ', "[1]", [1], 3])
def test_bad_tool_arguments_reject_the_row(arguments: Any) -> None:
    with pytest.raises(RowError, match="bad tool arguments: message 1, tool add"):
        parse_conversation(tool_row(arguments))


def test_tools_as_list_text_and_null() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    as_list = parse_conversation(tool_row({}, tools=[tool])).tools
    assert as_list == [tool]
    assert parse_conversation(tool_row({}, tools=json.dumps([tool]))).tools == as_list
    # A bare description is the same tool.
    assert parse_conversation(tool_row({}, tools=[tool["function"]])).tools == as_list
    for nothing in (None, "", []):
        assert parse_conversation(tool_row({}, tools=nothing)).tools is None
    for bad in ("[{", 3, ["add"]):
        with pytest.raises(RowError, match="bad tools"):
            parse_conversation(tool_row({}, tools=bad))


def test_sharegpt_function_call_is_an_assistant_turn_with_a_tool_call() -> None:
    turns = [
        {"from": "human", "value": "1+2"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "it is 3"},
    ]
    messages = parse_conversation({"conversations": turns}).messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 1}}
    turns[1]["value"] = "add(1)"
    with pytest.raises(RowError, match="bad tool call"):
        parse_conversation({"conversations": turns})


def test_text_with_only_a_closing_think_tag_is_kept_byte_for_byte() -> None:
    row = {"messages": [CHAT[0], {"role": "assistant", "content": "steps </think> 4"}]}
    assert contents(row)[1] == ("assistant", "steps </think> 4")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "p", "turns": ["hi"]}, "prompts without answers.*draftsmith-regenerate"),
        ({"prompt": "hi"}, "prompts without answers"),
        ({"a": 1, "b": 2}, "unknown layout: fields are a, b; expected messages"),
        ({"messages": []}, "no messages"),
        ({"messages": ["hi"]}, "message 0 is a string"),
        ({"messages": CHAT[:1]}, "no assistant turn: roles are user"),
        ({"instruction": "x", "output": None}, "no assistant turn"),
    ],
)
def test_rows_that_hold_no_conversation_say_so(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        parse_conversation(row)


def test_row_of_another_layout_than_the_chosen_one_is_rejected() -> None:
    with pytest.raises(RowError, match="unknown layout.*fields are instruction, output"):
        parse_conversation({"instruction": "a", "output": "b"}, input_format="messages")
    with pytest.raises(RowError, match="unknown layout.*fields are messages"):
        parse_conversation({"messages": CHAT}, input_format="alpaca")


def test_cut_answers_are_found_by_message_row_and_list() -> None:
    turns = [*CHAT, *CHAT]
    assert parse_conversation({"messages": turns}).cut_turns == frozenset()
    assert parse_conversation({"messages": turns, "finish_reason": "length"}).cut_turns == {3}
    row = {"messages": turns, "finish_reasons": ["length", "stop"]}
    assert parse_conversation(row).cut_turns == {1}
    # Fewer reasons than answers: the last answers were generated, the first came with the prompt.
    assert parse_conversation({"messages": turns, "finish_reasons": ["length"]}).cut_turns == {3}
    with pytest.raises(RowError, match="bad finish_reasons"):
        parse_conversation({"messages": CHAT, "finish_reasons": ["stop", "stop"]})


def test_weight_of_an_answer_is_zero_or_one() -> None:
    row = {"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}
    assert parse_conversation(row).untrained_turns == {1}
    row["messages"][1]["weight"] = 0.5
    with pytest.raises(RowError, match="bad weight"):
        parse_conversation(row)
