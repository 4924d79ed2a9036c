"""Rows of parquet and Arrow files, read batch by batch with pyarrow alone.

Takes a file and the names of the columns that are wanted; hands on one dict a row, or tables of so
many rows in Arrow's own bytes, which are cheap to hand to another process. A struct column has
every key in every row, null where a row had none, so nulls are left out at every depth: chat
templates ask whether a key is there.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hscache.errors import DataError

_BATCH = 256
_FILE_MAGIC = b"ARROW1"
"""Begins the random-access form of an Arrow file; Hugging Face datasets write the stream form."""


def read_arrow_rows(path: Path, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .parquet or .arrow file, other columns and nulls left out.

    Raises DataError naming the file if it is damaged or has none of the columns.
    """
    for _, table in read_arrow_tables(path, columns, _BATCH):
        yield from parse_arrow_table(table, path)


def read_arrow_tables(
    path: Path, columns: Collection[str], num_rows: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (number of rows, Arrow stream) of `num_rows` rows each, the last one of what is left.

    Raises DataError as `read_arrow_rows` does.
    """
    try:
        parts: list[pa.RecordBatch] = []
        missing = num_rows
        for batch in _batches(path, columns):
            while len(batch):
                parts.append(batch.slice(0, missing))
                batch = batch.slice(missing)
                missing -= len(parts[-1])
                if not missing:
                    yield num_rows, _to_stream(parts)
                    parts, missing = [], num_rows
        if parts:
            yield num_rows - missing, _to_stream(parts)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def parse_arrow_table(table: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one stream of `read_arrow_tables`; raise DataError naming `path`."""
    try:
        for batch in pa.ipc.open_stream(table):
            for row in batch.to_pylist():
                yield _as_json(row)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _to_stream(batches: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def count_arrow_rows(path: Path) -> int:
    """Return the number of rows; of a parquet file only the footer is read."""
    try:
        if path.suffix == ".parquet":
            return int(pq.read_metadata(path).num_rows)
        return sum(len(batch) for batch in _open_arrow(path))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _batches(path: Path, columns: Collection[str]) -> Iterator[pa.RecordBatch]:
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            wanted = _choose(path, file.schema_arrow.names, columns)
            yield from file.iter_batches(batch_size=_BATCH, columns=wanted)
        return
    for batch in _open_arrow(path):
        yield batch.select(_choose(path, batch.schema.names, columns))


def _open_arrow(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source:
        magic = source.read(len(_FILE_MAGIC))
        source.seek(0)
        if magic == _FILE_MAGIC:
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        else:
            yield from pa.ipc.open_stream(source)


def _choose(path: Path, found: list[str], columns: Collection[str]) -> list[str]:
    chosen = [name for name in found if name in columns]
    if not chosen:
        raise DataError(
            f"{path} has no column to read: found {found}, expected `messages`, `conversations`, "
            "`text`, or `input_ids` with `loss_mask`. Rename the column."
        )
    return chosen


def _as_json(value: Any) -> Any:
    """Leave out nulls, and write as text what JSON has no kind for: times, bytes, decimals."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        # Ids and masks, which are long, stay as they are.
        return value if value and isinstance(value[0], int) else [_as_json(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _unreadable(path: Path, error: Exception) -> DataError:
    kind = "parquet" if path.suffix == ".parquet" else "Arrow"
    reason = " ".join(str(error).split())[:300]
    return DataError(
        f"{path} cannot be read as {kind}: {reason}. The file is damaged or cut; fetch or write it "
        "again."
    )
