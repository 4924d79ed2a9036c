"""Lines of JSONL files, plain, gzip or zstandard: one JSON object each.

Takes the path of a file, whose last suffix (.gz, .zst) says how it is packed; hands on objects with
their line numbers. A file that ends inside a packed stream is damaged, not short.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import zstandard

from hscache.errors import DataError

_CHUNK = 1 << 17
_LARGEST_WINDOW = 1 << 31
"""`zstd --long=31`; the library's own limit is 128 MiB."""


def read_jsonl(
    path: str | Path, *, ended_lines_only: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (1-based line number, object) of a file, blank lines left out.

    `ended_lines_only` also leaves out a last line without a newline, which a writer may not have
    finished. Raises DataError naming file and line.
    """
    for number, line in read_lines(Path(path)):
        if line.endswith(b"\n") or not ended_lines_only:
            yield number, parse_line(line, path, number)


def count_jsonl(path: Path) -> int:
    """Return how many objects `read_jsonl` would yield; lines are not parsed."""
    return sum(1 for _ in read_lines(path))


def parse_line(line: bytes, path: str | Path, number: int) -> dict[str, Any]:
    """Return the object on a line of `read_lines`; raise DataError naming file and line."""
    return _parse(_decode(line, path), f"{path}, line {number}")


def is_unicode(text: str) -> bool:
    """Tell text from what JSON's lone `\\ud83d` escapes give, which can be neither written nor read
    by a tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (1-based line number, line) of a file as it was unpacked, blank lines left out.

    Raises DataError naming the file if it cannot be read to its end.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a JSONL file (also .gz, .zst).")
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a JSONL file (also .gz, .zst).")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines: Iterable[bytes] = _zstd_lines(file) if path.suffix == ".zst" else file
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise _unreadable(path, error) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _zstd_lines(file: gzip.GzipFile | BufferedReader) -> Iterator[bytes]:
    """Unpack line by line; `zstandard`'s own streams take a file cut inside a frame for whole."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    frame = unpacker.decompressobj()
    inside = False
    rest: list[bytes] = []
    while packed := file.read(_CHUNK):
        while packed:
            chunk = frame.decompress(packed)
            inside, packed = not frame.eof, frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = unpacker.decompressobj()
            *whole, tail = chunk.split(b"\n")
            for line in whole:
                yield b"".join([*rest, line, b"\n"])
                rest.clear()
            rest.append(tail)
    if inside:
        raise EOFError("the file ends inside a zstandard frame")
    yield b"".join(rest)


def _decode(line: bytes, path: str | Path) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read as UTF-8 JSONL: {error}. "
        "Expected text, gzip if the name ends in .gz, zstandard if it ends in .zst."
    )


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
