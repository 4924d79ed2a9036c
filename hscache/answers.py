"""The file of answers that `hscache regenerate` fills: one row a line, and how they were made.

Takes rows as answers end; appends each by one write to `OUTPUT`, beside which
`OUTPUT.settings.json` says what fixes the answers. Hands on the keys of the rows already there, so
that a run killed at any time continues.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hscache.errors import CacheMismatchError, ConfigError, DataError, DiskFullError
from hscache.files import disk_full_named, only_writer, replace_atomically
from hscache.jsonl import read_jsonl
from hscache.prompts import Prompt
from hscache.report import format_table

logger = logging.getLogger(__name__)


@contextmanager
def open_output(path: Path, settings: dict[str, Any]) -> Iterator[BinaryIO]:
    """Open the output for appending, alone; its settings are on disk before its first row."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {path}: {error.strerror}. Give a file in a folder you may write to."
        ) from error
    with opened as output, only_writer(path, str(path)):
        if not check_settings(path, settings):
            replace_atomically(
                _settings_path(path), json.dumps(settings, indent=2).encode() + b"\n"
            )
        _drop_half_written_row(path, output)
        yield output


def check_settings(output: Path, settings: dict[str, Any]) -> bool:
    """Return whether the output has rows; raise `CacheMismatchError` if made with other settings.

    An empty one, left by a start that failed, may be filled with any.
    """
    path = _settings_path(output)
    if not output.exists() or not output.stat().st_size:
        return False
    if not path.exists():
        raise CacheMismatchError(
            f"{output} exists but {path.name} beside it does not, so it is not known how its "
            "rows were made. Choose another output."
        )
    try:
        found = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is not a JSON object: {error}. Choose another output.") from error
    fields = [name for name in {**found, **settings} if found.get(name) != settings.get(name)]
    if fields:
        rows = [(f, json.dumps(found.get(f)), json.dumps(settings.get(f))) for f in fields]
        raise CacheMismatchError(
            f"{output} was begun with other settings:\n"
            f"{format_table(['field', 'in the output', 'now'], rows)}\n"
            "Use the same settings to continue, or another output."
        )
    return True


def rows_done(output: Path, prompts: Sequence[Prompt]) -> set[str]:
    """Return the keys of answered prompts; raise `CacheMismatchError` if one has changed since."""
    if not output.exists():
        return set()
    by_key = {prompt.key: prompt for prompt in prompts}
    done: set[str] = set()
    for line_number, row in read_jsonl(output, ended_lines_only=True):
        key = str(row.get("id"))
        if key not in by_key:
            continue
        prompt = by_key[key]
        if (row.get("messages", [])[:-1], row.get("tools")) != (prompt.messages, prompt.tools):
            raise CacheMismatchError(
                f"{output}, line {line_number}: id {row['id']!r} answers another prompt than the "
                "one of that id now. Use the prompts the output was begun with, or another output."
            )
        done.add(key)
    return done


def append_row(output: BinaryIO, path: Path, row: dict[str, Any]) -> None:
    """Append one line by one unbuffered write, so that only a kill inside it can leave a piece."""
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    with disk_full_named(path):
        num_written = output.write(line)
    if num_written != len(line):
        raise DiskFullError(
            f"only {num_written} of {len(line)} bytes fitted into {path}; free some space and run "
            "the same command again to continue."
        )


def _settings_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.settings.json")


def _drop_half_written_row(path: Path, output: BinaryIO) -> None:
    """Cut what follows the last newline: a kill in the middle of a write leaves such a piece."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        logger.warning("%s: dropped a half-written last row of %d bytes", path, len(data) - whole)
        os.ftruncate(output.fileno(), whole)
