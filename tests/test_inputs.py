"""Files, folders and patterns to raw rows, in every packing, and what is said of damaged ones."""

import gzip
import json
from datetime import datetime
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import conversation, write_jsonl

from hscache.errors import DataError
from hscache.inputs import find_files
from hscache.jsonl import read_jsonl

ROWS = [conversation(f"{i}?", f"answer {i}\u2028é") for i in range(700)]


def write_arrow(path, rows, *, stream=True):
    table = pa.Table.from_pylist(rows)
    opener = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opener(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    return path


def save_to_disk(folder, *parts):
    """The layout of Hugging Face `Dataset.save_to_disk`; parts are named against their order."""
    folder.mkdir(parents=True)
    names = [f"data-{len(parts) - i:05d}-of-{len(parts):05d}.arrow" for i in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        write_arrow(folder / name, rows)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def zstd_of(data, frames=1):
    size = max(1, -(-len(data) // frames))
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(zstandard.compress(part) for part in parts)


def lines_of(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_as(kind, folder, rows):
    path = folder / f"rows{kind}"
    if kind == ".jsonl":
        path.write_bytes(lines_of(rows))
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines_of(rows)))
    elif kind == ".jsonl.zst":
        path.write_bytes(zstd_of(lines_of(rows), frames=3))
    elif kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
    elif kind == ".arrow":
        write_arrow(path, rows)
    elif kind == "file.arrow":
        write_arrow(path, rows, stream=False)
    else:
        save_to_disk(path, rows[:500], rows[500:])
    return path


def values_of(*names):
    return [row.values for file in find_files(names) for row in file.read_rows()]


KINDS = [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", "file.arrow", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    path = write_as(kind, tmp_path, ROWS)
    assert values_of(path) == ROWS
    assert sum(file.count_rows() for file in find_files([path])) == len(ROWS)
    [*_, last] = [row for file in find_files([path]) for row in file.read_rows()]
    assert str(path) in last.where


def test_rows_are_named_by_line_or_row(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b"\n" + lines_of(ROWS[:2]))
    table = write_as(".parquet", tmp_path, ROWS[:2])
    found = [row.where for file in find_files([lines, table]) for row in file.read_rows()]
    assert found == [f"{lines}, line 2", f"{lines}, line 3", f"{table}, row 1", f"{table}, row 2"]
    assert [file.count_rows() for file in find_files([lines, table])] == [2, 2]


def test_nulls_of_struct_columns_are_left_out_and_other_columns_unread(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "x"}], "score": 1},
        {"messages": [{"role": "assistant", "content": "y", "reasoning_content": "z"}], "score": 2},
    ]
    path = write_as(".parquet", tmp_path, rows)
    assert values_of(path) == [{"messages": row["messages"]} for row in rows]


def test_what_json_has_no_kind_for_is_text(tmp_path):
    turn = {"role": "user", "content": "x", "at": datetime(2026, 12, 1), "cost": [Decimal("1.50")]}
    path = write_as(".parquet", tmp_path, [{"messages": [turn], "input_ids": [1, 2]}])
    [row] = values_of(path)
    assert row["messages"] == [{**turn, "at": "2026-12-01 00:00:00", "cost": ["1.50"]}]
    assert row["input_ids"] == [1, 2]


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_a_table_without_a_known_column_is_refused(tmp_path, kind):
    path = write_as(kind, tmp_path, [{"prompt": "x"}])
    with pytest.raises(DataError, match=r"no column to read: found \['prompt'\], expected"):
        values_of(path)


def test_folders_and_patterns_stand_for_their_files_in_order(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ROWS[2:3])
    save_to_disk(tmp_path / "c", ROWS[3:4], ROWS[4:5])
    (tmp_path / "a").mkdir()
    write_as(".jsonl.zst", tmp_path / "a", ROWS[1:2])
    write_as(".jsonl", tmp_path / "a", ROWS[0:1])
    (tmp_path / "README.md").touch()
    (tmp_path / ".hidden.jsonl").touch()
    assert values_of(tmp_path) == ROWS[:5]
    assert values_of(tmp_path / "?", tmp_path / "*.jsonl") == [*ROWS[:2], *ROWS[3:5], ROWS[2]]
    assert values_of(tmp_path / "**" / "*.jsonl") == [ROWS[0], ROWS[2]]
    assert values_of(tmp_path / "a" / "**") == ROWS[:2]


def test_a_name_with_brackets_is_a_name_before_it_is_a_pattern(tmp_path):
    path = write_jsonl(tmp_path / "a[1].jsonl", ROWS[:1])
    assert values_of(path) == ROWS[:1]


def damaged(tmp_path, case):
    packed = tmp_path / "rows.jsonl.zst"
    if case == "cut zst":
        packed.write_bytes(zstd_of(lines_of(ROWS))[:-20])
    elif case == "zst cut between frames' bytes":
        packed.write_bytes(zstd_of(lines_of(ROWS[:9]), frames=2)[:-1])
    elif case == "no zst":
        packed.write_bytes(lines_of(ROWS[:1]))
    elif case == "garbage behind zst":
        packed.write_bytes(zstd_of(lines_of(ROWS[:1])) + b"garbage")
    else:
        packed = write_as(case.split()[-1], tmp_path, ROWS)
        data = bytearray(packed.read_bytes())
        if case.startswith("cut"):
            data = data[: len(data) // 2]
        elif case.startswith("flipped"):
            data[200:3000] = bytes(2800)
        packed.write_bytes(data)
    return packed


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        ("cut zst", "UTF-8 JSONL: the file ends inside a zstandard frame"),
        ("zst cut between frames' bytes", "UTF-8 JSONL: the file ends inside"),
        ("no zst", "cannot be read as UTF-8 JSONL: .*zst"),
        ("garbage behind zst", "cannot be read as UTF-8 JSONL"),
        ("cut .jsonl.gz", "cannot be read as UTF-8 JSONL"),
        ("cut .parquet", "cannot be read as parquet"),
        ("flipped .parquet", "cannot be read as parquet"),
        ("cut .arrow", "cannot be read as Arrow"),
        ("cut file.arrow", "cannot be read as Arrow"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, case, complaint):
    path = damaged(tmp_path, case)
    with pytest.raises(DataError, match=f"{path.name} .*{complaint}") as refused:
        values_of(path)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("none.jsonl", "none.jsonl does not exist"),
        ("*.parquet", r"the pattern .*\*.parquet matches nothing .*\.jsonl\.zst"),
        ("table.csv", r"table.csv is of an unknown kind: expected a name ending in \.jsonl"),
        ("*.csv", "table.csv is of an unknown kind"),
        ("bare", "bare is a folder without rows"),
        ("splits", r"several splits: found \['test', 'train'\].*splits/test"),
        ("escaping", "names the file '../x.arrow'; expected plain names"),
        ("absolute", "names the file '/x.arrow'"),
        ("missing", "data-1.arrow does not exist, but state.json lists it"),
        ("odd", "state.json does not list the files"),
        ("indexed", "selection of rows"),
    ],
)
def test_what_stands_for_no_rows_is_refused(tmp_path, name, complaint):
    (tmp_path / "table.csv").touch()
    for folder in ("bare", "escaping", "absolute", "missing", "odd", "indexed"):
        (tmp_path / folder).mkdir()
    save_to_disk(tmp_path / "splits" / "train", ROWS[:1])
    save_to_disk(tmp_path / "splits" / "test", ROWS[:1])
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    states = {
        "escaping": {"_data_files": [{"filename": "../x.arrow"}]},
        "absolute": {"_data_files": [{"filename": "/x.arrow"}]},
        "missing": {"_data_files": [{"filename": "data-1.arrow"}]},
        "odd": [],
        "indexed": {"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]},
    }
    for folder, state in states.items():
        (tmp_path / folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=complaint):
        find_files([tmp_path / name])


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_file_without_rows_is_refused(tmp_path, kind):
    [file] = find_files([write_as(kind, tmp_path, [])])
    with pytest.raises(DataError, match="has no rows"):
        file.count_rows()


def test_an_unfinished_last_line_is_left_out_on_request(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a":')
    assert list(read_jsonl(path, ended_lines_only=True)) == [(1, {"a": 1})]
