"""Rows to conversations, texts and tokens: the forms, which one wins, and what is refused."""

import functools

import pytest

from hscache.conversations import Conversation, PlainText, Tokens, parse_conversation, parse_row
from hscache.errors import DataError
from hscache.inputs import RawRow

MESSAGES = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
SHAREGPT = [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B."}]
TOKENS = {"input_ids": [5, 6], "loss_mask": [0, 1]}


def parsed(**values):
    return parse_row(RawRow(values=values, number=1, where="rows.parquet, row 1"))


def test_sharegpt_turns_become_messages():
    row = parsed(conversations=SHAREGPT)
    assert isinstance(row, Conversation)
    assert row.messages == MESSAGES
    assert parsed(conversations=MESSAGES).messages == MESSAGES
    names = ["system", "human", "gpt", "tool", "observation", "user", "assistant"]
    roles = parsed(conversations=[{"from": name, "value": "x"} for name in names]).messages
    assert [turn["role"] for turn in roles] == [
        *("system", "user", "assistant", "tool", "tool", "user", "assistant")
    ]


def test_the_system_column_of_sharegpt_is_its_first_turn():
    system = {"role": "system", "content": "Be brief."}
    assert parsed(conversations=SHAREGPT, system="Be brief.").messages == [system, *MESSAGES]
    own = parsed(conversations=[{"from": "system", "value": "x"}, *SHAREGPT], system="y").messages
    assert own == [{"role": "system", "content": "x"}, *MESSAGES]


def test_thinking_and_tool_calls_are_kept_with_arguments_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    turn = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    row = parsed(messages=[MESSAGES[0], turn], tools='[{"name": "f"}]')
    checked = {**call, "function": {"name": "f", "arguments": {"a": [1]}}}
    assert row.messages[1] == {
        **{"role": "assistant", "content": "", "reasoning_content": "hm"},
        "tool_calls": [checked],
    }
    assert row.tools == [{"name": "f"}]


@pytest.mark.parametrize("name", ["thinking", "reasoning"])
def test_thinking_has_one_name(name):
    turn = {"role": "assistant", "content": "B.", name: "hm"}
    assert parsed(messages=[turn]).messages == [{**turn, "reasoning_content": "hm"}]


def test_text_gives_way_to_the_other_forms_and_nulls_to_all():
    assert parsed(text="x") == PlainText(text="x", where="rows.parquet, row 1")
    assert isinstance(parsed(text="x", messages=MESSAGES), Conversation)
    assert isinstance(parsed(text="x", conversations=SHAREGPT), Conversation)
    assert isinstance(parsed(text="x", **TOKENS), Tokens)
    assert isinstance(parsed(text="x", messages=None, input_ids=None), PlainText)
    assert isinstance(parsed(messages=MESSAGES, input_ids=[1]), Conversation)


DEEP = functools.reduce(lambda x, _: [x], range(9999), 1)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"messages": MESSAGES, "conversations": SHAREGPT},
            "ambiguous: found messages as well as conversations",
        ),
        (
            {"messages": MESSAGES, **TOKENS},
            "ambiguous: found messages as well as input_ids and loss_mask",
        ),
        ({"prompt": "x"}, r"no messages: found keys \['prompt'\]"),
        ({"conversations": []}, r"no messages: found `conversations` \[\]"),
        (
            {"conversations": [{"from": "martian", "value": "x"}]},
            "`from` is 'martian' in message 1",
        ),
        ({"conversations": [{"from": "human"}]}, "content of a user message is not text"),
        ({"text": 3}, "`text` is not text: found 3"),
        ({"text": "\ud83d"}, "`text` holds half a surrogate pair"),
        ({"input_ids": [1, 2]}, "`input_ids` without `loss_mask`"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "found 2 `input_ids` and 1 `loss_mask`"),
        ({"input_ids": [], "loss_mask": []}, "at least one"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "`loss_mask` is 2 at position 1"),
        ({"input_ids": [1, -100], "loss_mask": [1, 1]}, "`input_ids` is -100 at position 1"),
        ({"input_ids": [1, 2**40], "loss_mask": [1, 1]}, "no token id"),
        ({"input_ids": "12", "loss_mask": [1, 1]}, "`input_ids` is not a list of whole numbers"),
        ({"input_ids": [1.5], "loss_mask": [1]}, "`input_ids` is not a list of whole numbers"),
        ({"messages": MESSAGES, "tools": "{"}, "`tools` is not JSON"),
        ({"messages": MESSAGES, "tools": '[{"a": "\\ud83d"}]'}, "a tool, .* half a surrogate pair"),
        (
            {"messages": [{**MESSAGES[0], "x": DEEP}]},
            "nested too deeply",
        ),
        ({"messages": MESSAGES, "tools": 3}, "`tools` is 3; expected a list of objects"),
        (
            {"messages": [{"role": "assistant", "content": "", "reasoning_content": 3}]},
            "the reasoning_content of a assistant message is not text: found 3",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "a tool call of message 1 has no name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "the `arguments` of a tool call of message 1 is not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "3"}]}]},
            "are 3; expected an object",
        ),
    ],
)
def test_other_rows_are_refused_by_name(values, complaint):
    with pytest.raises(DataError, match=f"rows.parquet, row 1.*{complaint}"):
        parsed(**values)


@pytest.mark.parametrize("values", [{"text": "x"}, TOKENS])
def test_a_prompt_is_a_conversation(values):
    with pytest.raises(DataError, match="row 1 has no messages: found keys"):
        parse_conversation(RawRow(values=values, number=1, where="a.arrow, row 1"))
