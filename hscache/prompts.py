"""Prompts to be answered: conversations that end in a user turn.

Takes in files (or folders, or patterns) of rows with `messages` or ShareGPT's `conversations` and
an optional `id`; hands on checked prompts with unique keys. Every complaint names file and row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from hscache.conversations import Conversation, parse_conversation
from hscache.errors import DataError
from hscache.inputs import find_files
from hscache.jsonl import is_unicode


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation whose next turn is the target's."""

    id: str | int
    """The row's `id`, or its 1-based line (or row) number."""
    messages: list[dict[str, Any]]
    """Ends in a user (or tool) turn."""
    tools: list[dict[str, Any]] | None = None
    """Descriptions of the tools the target is offered."""

    @property
    def key(self) -> str:
        """The id as text: 7 and "7" are one id."""
        return str(self.id)


def read_prompts(paths: Sequence[str | Path]) -> list[Prompt]:
    """Read all prompts, in order.

    Assistant turns at the end of a row are dropped, so finished conversations may serve as prompts;
    earlier assistant turns stay as they are and only the last answer is generated. Rows without an
    id take their line number, which needs a single file. Blank lines are skipped.
    Raises `DataError` for unreadable files, malformed rows and ids that occur twice.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    files = find_files(paths)
    for file in files:
        file.count_rows()  # complains of a file without any
        for row in file.read_rows():
            row_id = row.values.get("id")
            if row_id is None and len(files) > 1:
                raise DataError(
                    f"{row.where}: no `id`. Line numbers serve as ids only with a single prompts "
                    f"file, {len(files)} were given; give every row an id, or run the files one "
                    "by one."
                )
            row_id = row.number if row_id is None else row_id
            if not isinstance(row_id, str | int) or isinstance(row_id, bool):
                raise DataError(f"{row.where}: `id` is {row_id!r}; expected text or an integer.")
            if not is_unicode(str(row_id)):
                raise DataError(f"{row.where}: `id` holds half a surrogate pair. Mend the row.")
            conversation = parse_conversation(row)
            prompt = Prompt(
                id=row_id, messages=_messages_to_answer(conversation), tools=conversation.tools
            )
            if prompt.key in places:
                raise DataError(
                    f"{row.where}: id {row_id!r} was already used by {places[prompt.key]}. Ids "
                    "name the rows of the output and must be unique."
                )
            places[prompt.key] = row.where
            prompts.append(prompt)
    return prompts


def _messages_to_answer(conversation: Conversation) -> list[dict[str, Any]]:
    messages = conversation.messages
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end or messages[end - 1]["role"] not in ("user", "tool"):
        roles = ", ".join(message["role"] for message in messages[-4:])
        raise DataError(
            f"{conversation.where}: no user turn to answer; the last roles are: {roles}. A prompt "
            "ends in a user turn, or in the answer to one; mend or delete the row."
        )
    return messages[:end]


def prompt_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Return the ids of the conversation up to the answer; `DataError` if the template refuses."""
    try:
        return tokenizer.apply_chat_template(
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except (TemplateError, TypeError, RecursionError) as error:
        raise DataError(
            f"row {prompt.id!r}: the target's chat template refuses these messages: {error} "
            "Mend the row or take it out."
        ) from error
