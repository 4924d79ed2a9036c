"""Rows of JSONL files: one object a line, whose `messages` are the turns of a conversation.

Takes the path of a file (plain or .gz); hands on checked objects with their line numbers, to
`documents` and `prompts` alike, so that both refuse the same rows in the same words.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hscache.errors import DataError

_SHOWN = 120
"""Longest piece of a row that is quoted in a message."""


def read_conversations(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (1-based line number, row) of a file whose rows have `messages` of texts.

    Raises DataError naming file and line, also for a file without rows.
    """
    empty = True
    for number, row in read_jsonl(path):
        _check_messages(row, f"{path}, line {number}")
        empty = False
        yield number, row
    if empty:
        raise DataError(f"{path} has no rows; expected one JSON object with `messages` a line.")


def read_jsonl(
    path: str | Path, *, ended_lines_only: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (1-based line number, object) of a file, blank lines left out.

    `ended_lines_only` also leaves out a last line without a newline, which a writer may not have
    finished. Raises DataError naming file and line.
    """
    file_path = Path(path)
    if not file_path.exists():
        raise DataError(f"{path} does not exist; expected a JSONL file (or .jsonl.gz).")
    if file_path.is_dir():
        raise DataError(f"{path} is a folder; expected a JSONL file (or .jsonl.gz).")
    try:
        with gzip.open(file_path) if file_path.suffix == ".gz" else file_path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and (line.endswith(b"\n") or not ended_lines_only):
                    yield number, _parse(line.decode("utf-8-sig"), f"{path}, line {number}")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read as UTF-8 JSONL: {error}. "
            "Expected text, or gzip if the name ends in .gz."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise DataError(
            f"{where} is not JSON: {reason}{column}. "
            "Expected one object a line; mend or delete the line."
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where} has no messages: found {type(row).__name__}, expected an object with the "
            "key `messages`. Mend or delete the line."
        )
    return row


def _check_messages(row: dict[str, Any], where: str) -> None:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        found = f"keys {sorted(row)}" if "messages" not in row else f"`messages` {messages!r}"
        raise DataError(
            f"{where} has no messages: found {found[:_SHOWN]}, expected a list of turns in "
            "`messages`. Mend or delete the row."
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: every message needs a `role` and `content`, both texts; found "
                f"{str(message)[:_SHOWN]} as message {index + 1}."
            )
        content, of = message.get("content"), f"the content of a {message['role']} message"
        if not isinstance(content, str):
            raise DataError(
                f"{where}: {of} is not text: found {str(content)[:_SHOWN]} in message {index + 1}. "
                "Content parts, images and tool calls are not supported; write text, or delete "
                "the row."
            )
        if not _is_unicode(content + message["role"]):
            raise DataError(
                f"{where}: {of} holds half a surrogate pair, which is no text. Mend or delete the "
                "row."
            )


def _is_unicode(text: str) -> bool:
    """Tell text from what JSON's lone `\\ud83d` escapes give, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
