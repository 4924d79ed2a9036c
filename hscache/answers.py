"""The file of answers that `hscache regenerate` fills: one row a line, how they were made, and the
tally of a run.

Takes rows as answers end; appends each by one write to `OUTPUT`, beside which
`OUTPUT.settings.json` says what fixes the answers. Hands on the keys of the rows already there, so
that a run killed at any time continues.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hscache.errors import (
    CacheMismatchError,
    ConfigError,
    DataError,
    DiskFullError,
    StoppedBySignal,
)
from hscache.files import disk_full_named, only_writer, replace_atomically
from hscache.jsonl import read_jsonl
from hscache.prompts import Prompt
from hscache.report import format_seconds, format_table

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Tally:
    """What a run did so far; every row that was read and finished with is counted once."""

    num_already_done: int
    """Rows whose answer was in the output before."""
    num_stopped: int = 0
    """Answers that ended by themselves."""
    num_cut: int = 0
    """Answers cut at `max_new_tokens`."""
    num_too_long: int = 0
    """Rows left out: prompt and answer would not fit into the target's context."""
    refused_ids: list[str | int] = field(default_factory=list)
    """Rows that a server would not answer."""
    given_up_ids: list[str | int] = field(default_factory=list)
    """Rows without an answer after all attempts."""
    num_new_tokens: int = 0
    """Generated tokens, stop tokens included."""
    num_prompt_tokens: int | None = None
    """Tokens of the answered prompts, if they were counted."""
    num_without_usage: int = 0
    """Answers whose tokens the server did not count."""
    num_retries: int = 0
    """Requests made again."""
    wall_s: float = 0.0
    """Seconds of decoding, without loading the model."""

    @property
    def num_answered(self) -> int:
        """Answers of this run."""
        return self.num_stopped + self.num_cut

    @property
    def num_failed(self) -> int:
        """Rows that should have an answer and have none."""
        return len(self.refused_ids) + len(self.given_up_ids)

    @property
    def num_rows(self) -> int:
        """Rows finished with."""
        return self.num_already_done + self.num_answered + self.num_too_long + self.num_failed

    def count(self, finish_reason: str) -> None:
        """Count one answer."""
        if finish_reason == "length":
            self.num_cut += 1
        else:
            self.num_stopped += 1

    def table(self) -> str:
        """Return the end table."""
        rate = f"{self.num_new_tokens / max(self.wall_s, 1e-9):.0f} tokens/s"
        if self.num_without_usage:
            rate = f"{rate}; {self.num_without_usage:,} answers were not counted by the server"
        rows: list[tuple[str, int | None, str]] = [
            ("rows in", self.num_rows, ""),
            ("already answered", self.num_already_done, "skipped"),
            ("too long", self.num_too_long, "left out: prompt + max_new_tokens exceed the context"),
            ("refused by the server", len(self.refused_ids) or None, "no answer"),
            ("given up", len(self.given_up_ids) or None, "no answer after all attempts"),
            ("answered", self.num_answered, f"in {format_seconds(self.wall_s)}"),
            ("  ended by a stop token", self.num_stopped, ""),
            ("  cut at max_new_tokens", self.num_cut, "marked: not supervised past the cut"),
            ("prompt tokens", self.num_prompt_tokens, ""),
            ("new tokens", self.num_new_tokens, rate),
            ("requests made again", self.num_retries or None, ""),
        ]
        shown = [row for row in rows if row[1] is not None]
        return format_table(["regenerate", "count", ""], shown)


@contextmanager
def open_output(path: Path, settings: dict[str, Any]) -> Iterator[BinaryIO]:
    """Open the output for appending, alone; its settings are on disk before its first row.

    Raises ConfigError when it cannot be written, and what `check_settings` does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {path}: {error.strerror}. Give a file in a folder you may write to."
        ) from error
    with opened as output, only_writer(path, str(path)):
        if not check_settings(path, settings):
            _write_settings(_settings_path(path), settings)
        _drop_half_written_row(path, output)
        yield output


def _write_settings(path: Path, settings: dict[str, Any]) -> None:
    try:
        replace_atomically(path, json.dumps(settings, indent=2).encode() + b"\n")
    except DiskFullError:
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}, which says how the rows beside it are made: {error.strerror}. "
            "Give a file in a folder you may write to."
        ) from error


def check_settings(output: Path, settings: dict[str, Any]) -> bool:
    """Return whether the output has rows; raise `CacheMismatchError` if made with other settings.

    An empty one, left by a start that failed, may be filled with any. Raises DataError when the
    record of its settings cannot be read.
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


def answered_row(
    prompt: Prompt,
    message: dict[str, Any],
    *,
    finish_reason: str,
    temperature: float,
    **counted: int | None,
) -> dict[str, Any]:
    """Return a row of the output: the conversation with its answer, and how the answer ended."""
    return {
        "id": prompt.id,
        "messages": [*prompt.messages, message],
        **({"tools": prompt.tools} if prompt.tools else {}),
        "finish_reason": finish_reason,
        "temperature": temperature,
        **counted,
    }


def append_row(output: BinaryIO, path: Path, row: dict[str, Any]) -> None:
    """Append one line by one unbuffered write, so that only a kill inside it can leave a piece.

    Raises DiskFullError.
    """
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    with disk_full_named(path):
        num_written = output.write(line)
    if num_written != len(line):
        os.ftruncate(output.fileno(), os.fstat(output.fileno()).st_size - num_written)
        raise DiskFullError(
            f"only {num_written} of {len(line)} bytes fitted into {path}; free some space and run "
            "the same command again to continue."
        )


def stopped(signum: int, tally: Tally, output: Path) -> StoppedBySignal:
    """Return the error that ends a run after a signal."""
    return StoppedBySignal(
        f"stopped by signal {signum} after {tally.num_answered} answers, all of them in "
        f"{output}; run the same command again to continue.",
        signum=signum,
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
