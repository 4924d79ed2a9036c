"""Inputs of a run: names of files, folders and patterns become files, and files become raw rows.

Takes what a user lists in `data.train` or `prompts`; hands on `InputFile`s in a fixed order and
their rows with the place each came from, for messages; or packets of unparsed rows, which another
process parses. What a row means is `conversations`' business.
"""

import glob
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hscache.arrow_rows import (
    count_arrow_rows,
    parse_arrow_table,
    read_arrow_rows,
    read_arrow_tables,
)
from hscache.errors import DataError
from hscache.jsonl import count_jsonl, parse_line, read_jsonl, read_lines

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")

COLUMNS = (
    *("messages", "conversations", "text", "input_ids", "loss_mask"),
    *("tools", "system", "finish_reason", "id"),
)
"""Columns that are read; the others of a parquet or Arrow file are never unpacked."""

_DATASET = "state.json"
"""In a folder made by Hugging Face `save_to_disk`: the names of its Arrow files, in order."""
_SPLITS = "dataset_dict.json"
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.arrow")


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file of rows, of a kind its name tells."""

    path: Path

    @property
    def has_lines(self) -> bool:
        """Whether rows are lines, counted with the blank ones."""
        return self.path.suffix not in (".parquet", ".arrow")

    def count_rows(self) -> int:
        """Return the number of rows; raise DataError if there are none or the file is damaged."""
        count = count_jsonl(self.path) if self.has_lines else count_arrow_rows(self.path)
        if not count:
            raise DataError(f"{self.path} has no rows; expected rows with `messages` (see README).")
        return count

    def read_rows(self) -> Iterator["RawRow"]:
        """Yield the rows in order; raise DataError naming file and row."""
        if self.has_lines:
            for number, values in read_jsonl(self.path):
                yield RawRow(values=values, number=number, where=f"{self.path}, line {number}")
            return
        for number, values in enumerate(read_arrow_rows(self.path, COLUMNS), start=1):
            yield RawRow(values=values, number=number, where=f"{self.path}, row {number}")

    def read_packets(self, num_rows: int) -> Iterator["Packet"]:
        """Yield the rows in order and unparsed, `num_rows` at a time; raise DataError on damage."""
        if self.has_lines:
            lines = read_lines(self.path)
            while some := list(itertools.islice(lines, num_rows)):
                numbers, raw = zip(*some, strict=True)
                yield Packet(path=self.path, numbers=numbers, lines=raw)
            return
        first = 1
        for count, table in read_arrow_tables(self.path, COLUMNS, num_rows):
            numbers = tuple(range(first, first + count))
            yield Packet(path=self.path, numbers=numbers, table=table)
            first += count


@dataclass(frozen=True, kw_only=True)
class RawRow:
    """One row as it was read."""

    values: dict[str, Any]
    number: int
    """1-based line of a JSONL file, or row of another"""
    where: str
    """file and line, or row, for messages"""


@dataclass(frozen=True, kw_only=True)
class Packet:
    """Neighbouring rows of one file, not yet parsed, or some of them."""

    path: Path
    numbers: tuple[int, ...]
    """`RawRow.number` of all"""
    lines: tuple[bytes, ...] | None = None
    """of a JSONL file: one for each number"""
    table: bytes = b""
    """of another: all rows as an Arrow stream"""
    chosen: tuple[int, ...] | None = None
    """positions of the rows that are wanted, ascending; None means all"""

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the rows that `parse` yields, the first row of the packet being 0."""
        return range(len(self.numbers)) if self.chosen is None else self.chosen

    def parse(self) -> Iterator[RawRow]:
        """Yield the rows that are wanted; raise DataError naming file and row."""
        if self.lines is not None:
            for i in self.positions:
                values = parse_line(self.lines[i], self.path, self.numbers[i])
                where = f"{self.path}, line {self.numbers[i]}"
                yield RawRow(values=values, number=self.numbers[i], where=where)
            return
        rows = list(parse_arrow_table(self.table, self.path))
        for i in self.positions:
            where = f"{self.path}, row {self.numbers[i]}"
            yield RawRow(values=rows[i], number=self.numbers[i], where=where)


def find_files(names: Sequence[str | Path]) -> list[InputFile]:
    """Return the files that names of files, folders and glob patterns stand for, in their order.

    A folder stands for the files in it and below with a known suffix, sorted by name; one made by
    `save_to_disk` for its Arrow files in the order of the dataset. Raises DataError for a name that
    stands for nothing, or for a file of an unknown kind.
    """
    return [InputFile(path=path) for name in names for path in _expand(str(name))]


def _expand(name: str) -> list[Path]:
    if not glob.has_magic(name) or Path(name).exists():
        return _files_of(Path(name))
    matches = sorted(glob.glob(name, recursive=True))
    if not matches:
        raise DataError(
            f"the pattern {name} matches nothing (looked from {Path.cwd()}). Expected files "
            f"ending in {', '.join(SUFFIXES)}, or folders of them."
        )
    # Once each: `**` matches folders as well as what is in them.
    return list(dict.fromkeys(path for match in matches for path in _files_of(Path(match))))


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = _files_in(path)
        if not files:
            raise DataError(
                f"{path} is a folder without rows: expected files in it ending in "
                f"{', '.join(SUFFIXES)}."
            )
        return files
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a file of rows, a folder or a pattern.")
    if not _is_known(path):
        raise DataError(
            f"{path} is of an unknown kind: expected a name ending in {', '.join(SUFFIXES)}. "
            "Rename the file if it holds one of these, or convert it."
        )
    return [path]


def _files_in(folder: Path) -> list[Path]:
    if (folder / _SPLITS).is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / _DATASET).is_file())
        raise DataError(
            f"{folder} is a dataset of several splits: found {splits}. Name the split to read, "
            f"such as {folder / (splits[0] if splits else 'train')}."
        )
    if (folder / _DATASET).is_file():
        return _files_of_dataset(folder)
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            files += _files_in(entry)
        elif _is_known(entry):
            files.append(entry)
    return files


def _files_of_dataset(folder: Path) -> list[Path]:
    state_file = folder / _DATASET
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{state_file} does not list the files of a dataset: {error!r}. Expected a folder made "
            "by `Dataset.save_to_disk`; save it again."
        ) from error
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} was saved with a selection of rows beside its files "
            "(`_indices_data_files`), which is not read. Save `dataset.flatten_indices()`."
        )
    for name in names:
        # A name from a file is not to lead out of the folder.
        if not isinstance(name, str) or not _SAFE_NAME.fullmatch(name):
            raise DataError(
                f"{state_file} names the file {str(name)[:120]!r}; expected plain names such as "
                "data-00000-of-00001.arrow. Save the dataset again."
            )
        if not (folder / name).is_file():
            raise DataError(
                f"{folder / name} does not exist, but {_DATASET} lists it. Fetch the folder whole."
            )
    return [folder / name for name in names]


def _is_known(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)
