"""Rows to files of tokens: by one process or several, in one go or after a kill, the same bits."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import byte_tokenizer, conversation, write_jsonl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hscache import token_files
from hscache.config import DataConfig
from hscache.conversations import parse_row
from hscache.documents import load_corpus, tokens_key
from hscache.errors import DataError, HscacheError
from hscache.inputs import find_files
from hscache.render import render
from hscache.token_files import choose_workers
from hscache.tokenize_rows import tokenize

ROOT = Path(__file__).parents[1]
TOKENIZER = byte_tokenizer()


def rows_of(numbers):
    """Rows of few kinds, so that copies meet; some are dropped, cut, or of another form."""
    rows = []
    for n in numbers:
        row = conversation(f"{n % 7}?", "x" * (n % 11))
        if n % 13 == 1:
            row["finish_reason"] = "length"
        if n % 17 == 2:
            row = {"messages": row["messages"][:1]}
        rows.append(row)
    return rows


def save(folder, train, more, held_out):
    """Three files of two kinds; return settings that name them."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows_of(more)), folder / "b.parquet", row_group_size=5)
    return {
        "train": (
            str(write_jsonl(folder / "a.jsonl", rows_of(train))),
            str(folder / "b.parquet"),
        ),
        "held_out": (str(write_jsonl(folder / "c.jsonl", rows_of(held_out))),),
        "min_supervised_share": 0.0,
    }


def one_by_one(data, seed):
    """The documents as a loop over rows gives them: (row, held out, ids, mask), and the drops."""
    train = [row for file in find_files(data.train) for row in file.read_rows()]
    rows = train + [row for file in find_files(data.held_out) for row in file.read_rows()]
    sample = set(range(len(rows)))
    if data.max_documents is not None and data.max_documents < len(train):
        drawn = np.random.default_rng(seed).permutation(len(train))[: data.max_documents]
        sample = {*drawn.tolist(), *range(len(train), len(rows))}
    found = []
    for number, row in enumerate(rows):
        if number not in sample:
            continue
        [(ids_T, mask_T)] = tokenize([render(parse_row(row), TOKENIZER)], TOKENIZER)
        if len(ids_T) > data.max_tokens and data.over_long == "drop":
            continue
        ids, mask = ids_T.tolist()[: data.max_tokens], mask_T.tolist()[: data.max_tokens]
        if [1, 1] in [mask[i : i + 2] for i in range(len(mask))]:
            found.append((number, number >= len(train), ids, mask))
    held_out = {(*ids, *mask) for _, held, ids, mask in found if held}
    return [d for d in found if d[1] or (*d[2], *d[3]) not in held_out]


def listed(corpus):
    return [
        (d.source_row, d.held_out, d.ids_T.tolist(), d.loss_mask_T.tolist())
        for d in corpus.documents
    ]


numbers = st.lists(st.integers(0, 200), min_size=1, max_size=25)


@given(
    train=numbers,
    more=numbers,
    held_out=numbers,
    range_rows=st.integers(1, 9),
    over_long=st.sampled_from(["drop", "truncate"]),
    max_documents=st.none() | st.integers(1, 40),
    lost=st.sets(st.integers(0, 20)),
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_documents_are_those_of_a_loop_over_rows_however_they_are_cut_and_resumed(
    tmp_path_factory, train, more, held_out, range_rows, over_long, max_documents, lost
):
    folder = tmp_path_factory.mktemp("rows")
    data = DataConfig(
        **save(folder, train, more, held_out),
        max_tokens=30,
        over_long=over_long,
        max_documents=max_documents,
    )
    expected = one_by_one(data, seed=5)
    work = folder / "work"
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "RANGE_ROWS", range_rows)
        if not any(not held for _, held, _, _ in expected):
            with pytest.raises(DataError, match="no document is left to train on"):
                load_corpus(data, TOKENIZER, 5, work)
            return
        corpus = load_corpus(data, TOKENIZER, 5, work)
        assert listed(corpus) == expected
        # As if killed before some ranges were finished.
        parts = sorted(work.glob("*.npz"))
        for i in lost & set(range(len(parts))):
            parts[i].unlink()
        kept = {p: p.stat().st_mtime_ns for p in parts if p.exists()}
        again = load_corpus(data, TOKENIZER, 5, work)
        assert {p: p.stat().st_mtime_ns for p in kept} == kept
    assert (listed(again), again.report) == (expected, corpus.report)


@pytest.fixture
def children():
    """Processes of ours: others that this process started before are none of them."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


def test_several_processes_give_the_same_files(tmp_path, monkeypatch, children):
    workers = 3
    monkeypatch.setattr(token_files, "RANGE_ROWS", 8)
    inputs = save(tmp_path / "rows", range(90), range(40, 100), range(5))
    found = {}
    for number in (1, workers):
        folder = tmp_path / f"work{number}"
        folder.mkdir()
        data = DataConfig(**inputs, workers=number, held_out_fraction=0.2)
        corpus = load_corpus(data, TOKENIZER, 0, folder)
        parts = {path.name: path.read_bytes() for path in folder.iterdir()}
        found[number] = parts, listed(corpus), corpus.report
    assert len(found[1][0]) == 12 + 8 + 1
    assert found[workers] == found[1]
    assert not children()


def test_the_first_bad_row_is_named_whichever_process_met_one_first(
    tmp_path, monkeypatch, children
):
    monkeypatch.setattr(token_files, "RANGE_ROWS", 8)
    rows = rows_of([n * 17 for n in range(60)])
    rows[9]["messages"][0]["content"] = "many words " * 20_000  # its range takes long
    rows[14] = {"input_ids": [999, 999], "loss_mask": [1, 1]}  # so it is seen late, but is first
    rows[30] = {"txt": "seen early"}
    data = DataConfig(train=(str(write_jsonl(tmp_path / "a.jsonl", rows)),), workers=2)
    folder = tmp_path / "work"
    folder.mkdir()
    with pytest.raises(DataError, match=r"a\.jsonl, line 15: `input_ids` holds 999"):
        load_corpus(data, TOKENIZER, 0, folder)
    assert not children()
    assert (folder / f"{0:012d}.npz").exists()


def test_a_killed_process_is_reported(tmp_path, monkeypatch, children):
    monkeypatch.setattr(token_files, "RANGE_ROWS", 8)
    data = DataConfig(
        train=(str(write_jsonl(tmp_path / "a.jsonl", rows_of(range(60)))),), workers=2
    )

    def kill_one():
        while not (found := children()):
            time.sleep(0.01)
        os.kill(found.pop().pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    with pytest.raises(HscacheError, match=r"one of 2 processes that tokenise ended .* memory"):
        load_corpus(data, TOKENIZER, 0, tmp_path)
    thread.join()
    assert not children()


SCRIPT = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from conftest import byte_tokenizer
from hscache import documents, signals, token_files
from hscache.config import DataConfig
if __name__ == "__main__":
    token_files.RANGE_ROWS = 16
    data = DataConfig(train=(sys.argv[1],), workers=2)
    with signals.raise_on_stop():
        documents.load_corpus(data, byte_tokenizer(), 0, Path(sys.argv[2]))
"""


def children_of(pid):
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_leaves_no_process_and_goes_on_where_it_was(tmp_path, monkeypatch, how):
    path = write_jsonl(tmp_path / "a.jsonl", rows_of(range(3000)))
    script, folder = tmp_path / "script.py", tmp_path / "work"
    script.write_text(SCRIPT)
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), str(path), str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    while not list(folder.glob("0*.npz")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    children = children_of(process.pid)
    assert len(children) >= 2
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.kill()
    output, _ = process.communicate()
    if how == signal.SIGINT:
        assert output.splitlines()[-1].endswith("stopped by SIGINT; what was published stays.")
        assert output.count("Traceback") == 1  # of the main process, which here has no cli
    while any(map(runs, children)):
        time.sleep(0.01)
    kept = {p: p.stat().st_mtime_ns for p in folder.glob("0*.npz")}
    assert 0 < len(kept) < 188
    monkeypatch.setattr(token_files, "RANGE_ROWS", 16)
    data = DataConfig(train=(str(path),), workers=0)
    resumed = load_corpus(data, TOKENIZER, 0, folder)
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    straight = load_corpus(data, TOKENIZER, 0)
    assert resumed.report == straight.report
    assert listed(resumed) == listed(straight)


def test_a_small_corpus_is_done_here_and_a_number_is_obeyed(tmp_path):
    files = find_files([write_jsonl(tmp_path / "a.jsonl", rows_of(range(50)))])
    for workers, expected in ((None, 0), (0, 0), (1, 0), (2, 2), (5, 5)):
        data = DataConfig(train=("a.jsonl",), workers=workers)
        assert choose_workers(data, files, TOKENIZER) == expected


def test_a_large_corpus_takes_a_process_for_each_16_mb_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    data = DataConfig(train=("a.jsonl",))
    for name, size_mb, expected in (
        *(("a.jsonl", 31, 0), ("a.jsonl", 33, 2), ("a.jsonl", 900, 4)),
        *(("a.jsonl.gz", 7, 0), ("a.jsonl.gz", 13, 3), ("a.parquet", 13, 3)),
    ):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size_mb * 1_000_000)
        assert choose_workers(data, find_files([tmp_path / name]), TOKENIZER) == expected


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", rows_of(range(20)))
    folder = tmp_path / "work"
    folder.mkdir()
    tokenize_files = token_files.tokenize_files

    def append_and_tokenize(*args):
        with path.open("a") as file:
            file.write("\n")
        tokenize_files(*args)

    monkeypatch.setattr("hscache.documents.tokenize_files", append_and_tokenize)
    with pytest.raises(DataError, match=r"a\.jsonl was changed while it was read"):
        load_corpus(DataConfig(train=(str(path),)), TOKENIZER, 0, folder)
    assert not folder.exists()


def test_damaged_tokens_are_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", rows_of(range(20)))
    folder = tmp_path / "work"
    folder.mkdir()
    load_corpus(DataConfig(train=(str(path),)), TOKENIZER, 0, folder)
    [part] = folder.glob("*.npz")
    data = bytearray(part.read_bytes())
    data[len(data) // 3] ^= 1
    part.write_bytes(data)
    with pytest.raises(HscacheError, match=f"{part} is damaged"):
        load_corpus(DataConfig(train=(str(path),)), TOKENIZER, 0, folder)


def test_the_key_sees_what_decides_the_tokens_and_nothing_else(tmp_path):
    path, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file in (path, copy):
        write_jsonl(file, rows_of(range(20)))
    other = write_jsonl(tmp_path / "other.jsonl", rows_of(range(21)))
    tagged = byte_tokenizer()
    tagged.chat_template += "{# a comment #}"

    def key(train=path, tokenizer=TOKENIZER, seed=0, **settings):
        return tokens_key(DataConfig(train=(str(train),), **settings), tokenizer, seed)

    same = [key(), key(copy), key(seed=1), key(workers=7), key(min_supervised_share=0.5)]
    assert len(set(same)) == 1
    others = [
        *(key(other), key(tokenizer=tagged), key(max_tokens=7), key(over_long="drop")),
        *(key(answers="last"), key(max_documents=5), key(max_documents=5, seed=1)),
        *(key(held_out=(str(path),)), key(held_out=(str(other),))),
    ]
    assert len({*same, *others}) == 1 + len(others)
