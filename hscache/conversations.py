"""What a row means: a conversation in one form, a plain text, or ids with a loss mask.

Takes raw rows of `inputs`; hands on checked `Conversation`s (also those of ShareGPT), `PlainText`s
and `Tokens` to `documents`, and conversations to `prompts`, so that both refuse the same rows in
the same words.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hscache.errors import DataError
from hscache.inputs import RawRow
from hscache.jsonl import is_unicode

_SHOWN = 120
"""Longest piece of a row that is quoted in a message."""

SHAREGPT_ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Names of ShareGPT's `from` and the roles that chat templates know."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns of a conversation, as a chat template takes them."""

    messages: list[dict[str, Any]]
    """`role` and `content` are texts; an assistant turn may have `reasoning_content` and
    `tool_calls`, whose arguments are objects"""
    tools: list[dict[str, Any]] | None = None
    """descriptions of the tools the assistant was offered"""
    truncated: bool = False
    """the last answer was cut by a token limit: its end is not the model's"""
    where: str
    """file and row, for messages"""


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """Text without turns, all of it supervised."""

    text: str
    where: str


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Ids and mask the user made: `ids_T` int64, `loss_mask_T` uint8, of equal length."""

    ids_T: npt.NDArray[np.int64]
    loss_mask_T: npt.NDArray[np.uint8]
    where: str


def parse_row(row: RawRow) -> Conversation | PlainText | Tokens:
    """Return what a row holds; null columns count as missing.

    `text` gives way to the other forms, whose rendering it usually is; two of the others are
    refused, because they may disagree. Raises DataError naming file and row.
    """
    values = {key: value for key, value in row.values.items() if value is not None}
    tokens = ["input_ids and loss_mask"] if {"input_ids", "loss_mask"} <= values.keys() else []
    forms = [key for key in ("messages", "conversations") if key in values] + tokens
    if len(forms) > 1:
        raise DataError(
            f"{row.where} is ambiguous: found {' as well as '.join(forms)}, expected one of them. "
            "Delete the columns that are not to be used."
        )
    if tokens:
        return _parse_tokens(values, row.where)
    if not forms and isinstance(values.get("text"), str):
        if not is_unicode(values["text"]):
            raise _half_pair(row.where, "`text`")
        return PlainText(text=values["text"], where=row.where)
    if not forms and "text" in values:
        raise DataError(
            f"{row.where}: `text` is not text: found {str(values['text'])[:_SHOWN]}. Mend or "
            "delete the row."
        )
    if not forms and "input_ids" in values:
        raise DataError(
            f"{row.where}: `input_ids` without `loss_mask`: what is supervised would be a guess. "
            "Add a list of 0 and 1 as long as the ids."
        )
    return parse_conversation(row)


def parse_conversation(row: RawRow) -> Conversation:
    """Return the conversation in `messages` or ShareGPT's `conversations`, checked.

    Raises DataError naming file and row, also if the row holds no conversation.
    """
    values, where = row.values, row.where
    name = "messages"
    if values.get("messages") is None and values.get("conversations") is not None:
        name = "conversations"
    turns = values.get(name)
    if not isinstance(turns, list) or not turns:
        found = f"keys {sorted(values)}" if turns is None else f"`{name}` {turns!r}"
        raise DataError(
            f"{where} has no messages: found {found[:_SHOWN]}, expected a list of turns in "
            "`messages` (or ShareGPT's `conversations`). Mend or delete the row."
        )
    if name == "conversations":
        turns = [_from_sharegpt(turn, index, where) for index, turn in enumerate(turns)]
        system = values.get("system")
        if isinstance(system, str) and system and turns[0].get("role") != "system":
            turns = [{"role": "system", "content": system}, *turns]
    conversation = Conversation(
        messages=[_check_message(turn, index, where) for index, turn in enumerate(turns)],
        tools=_parse_tools(values.get("tools"), where),
        truncated=values.get("finish_reason") == "length",
        where=where,
    )
    _require_writable([conversation.messages, conversation.tools], where)
    return conversation


def _require_writable(parts: Any, where: str) -> None:
    """Refuse what is in no message's text, but in tools, calls or other keys, and is no JSON."""
    try:
        text = json.dumps(parts, ensure_ascii=False)
    except RecursionError as error:
        raise DataError(
            f"{where}: its messages or tools are nested too deeply. Mend or delete the row."
        ) from error
    if not is_unicode(text):
        raise _half_pair(where, "a tool, a tool call or a key of a message")


def _parse_tokens(values: dict[str, Any], where: str) -> Tokens:
    columns = {}
    for name in ("input_ids", "loss_mask"):
        column = values[name]
        if not isinstance(column, list) or not all(isinstance(item, int) for item in column):
            raise DataError(
                f"{where}: `{name}` is not a list of whole numbers: found {str(column)[:_SHOWN]}."
            )
        columns[name] = column
    ids, mask = columns["input_ids"], columns["loss_mask"]
    if len(ids) != len(mask) or not ids:
        raise DataError(
            f"{where}: found {len(ids)} `input_ids` and {len(mask)} `loss_mask`, expected as many "
            "of each, and at least one."
        )
    wrong = next((i for i, value in enumerate(mask) if value not in (0, 1)), None)
    if wrong is not None:
        raise DataError(
            f"{where}: `loss_mask` is {mask[wrong]} at position {wrong}, expected 0 or 1."
        )
    limit = np.iinfo(np.int32).max
    wrong = next((i for i, value in enumerate(ids) if not 0 <= value <= limit), None)
    if wrong is not None:
        raise DataError(
            f"{where}: `input_ids` is {ids[wrong]} at position {wrong}, which is no token id. "
            "Padding such as -100 is to be left out."
        )
    return Tokens(ids_T=np.array(ids, np.int64), loss_mask_T=np.array(mask, np.uint8), where=where)


def _from_sharegpt(turn: Any, index: int, where: str) -> Any:
    """Rename `from` and `value`; a turn with `role` and `content` stays as it is."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise DataError(
            f"{where}: `from` is {str(turn['from'])[:_SHOWN]!r} in message {index + 1}; expected "
            f"one of {', '.join(SHAREGPT_ROLES)}. Rename it, or delete the row."
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": role, "content": turn.get("value"), **rest}


def _check_message(message: Any, index: int, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(
            f"{where}: every message needs a `role` and `content`, both texts; found "
            f"{str(message)[:_SHOWN]} as message {index + 1}."
        )
    message = {key: value for key, value in message.items() if value is not None}
    for other in ("thinking", "reasoning"):  # what other servers and templates call it
        if other in message:
            message.setdefault("reasoning_content", message[other])
    calls = message.pop("tool_calls", None) or []
    if calls:
        message["tool_calls"] = _check_calls(calls, index, where)
    if calls or message.get("reasoning_content"):
        message.setdefault("content", "")
    for name in ("content", "reasoning_content"):
        text, of = message.get(name), f"the {name} of a {message['role']} message"
        if name not in message and name != "content":
            continue
        if not isinstance(text, str):
            raise DataError(
                f"{where}: {of} is not text: found {str(text)[:_SHOWN]} in message {index + 1}. "
                "Content parts and images are not supported; write text, or delete the row."
            )
        if not is_unicode(text + message["role"]):
            raise _half_pair(where, of)
    return message


def _check_calls(calls: Any, index: int, where: str) -> list[dict[str, Any]]:
    """Return tool calls with arguments as objects, which templates print; OpenAI's are JSON."""
    of = f"a tool call of message {index + 1}"
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}: {of} has no name: found {str(call)[:_SHOWN]}, expected an object with "
                "`function`: {`name`, `arguments`}. Mend or delete the row."
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _from_json(arguments, f"{where}: the `arguments` of {of}")
        if not isinstance(arguments, dict):
            raise DataError(
                f"{where}: the `arguments` of {of} are {str(arguments)[:_SHOWN]}; expected an "
                "object, or its JSON. Mend or delete the row."
            )
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _parse_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):  # ShareGPT's way
        tools = _from_json(tools, f"{where}: `tools`") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{where}: `tools` is {str(tools)[:_SHOWN]}; expected a list of objects, or its JSON."
        )
    return tools


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON: {error}. Found {text[:_SHOWN]!r}.") from error


def _half_pair(where: str, of: str) -> DataError:
    return DataError(
        f"{where}: {of} holds half a surrogate pair, which is no text. Mend or delete the row."
    )
