"""Rows read by a process of their own are the same rows; it ends whenever training does."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_batches import LENGTHS, assert_same, loader, loader_of, loader_threads, read_all, run_of
from trainer_cache import coded_bits, documents, make_cache

from hscache import layout
from hscache.errors import HscacheError, ShardCorruptError
from hscache.reader import open_cache
from trainer.row_process import RowProcess
from trainer.row_reader import ReadRow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    corpus = documents(LENGTHS, held_out=(0, 1))
    return make_cache(tmp_path_factory.mktemp("rows") / "cache", corpus, bits=coded_bits)


def processes():
    """Row processes that this test process has started and that still are."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and b"trainer.row_process" in command:
            found.append(int(stat.parent.name))
    return found


def test_rows_are_those_of_a_thread(folder):
    options = {"passes": 3, "loss": {"sample_slots": True}}
    wanted = read_all(loader(folder, **options))
    found = read_all(loader(folder, **options, separate=True))
    assert len(found) == len(wanted) > 20
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)
    assert not processes()


def test_rows_kept_do_not_change_when_memory_is_used_again(tmp_path):
    """Codec none: merging is no more than another view of the memory."""
    folder = make_cache(tmp_path / "c", documents([40] * 24), bits=coded_bits, codec="none")
    source = loader(folder, separate=True, passes=2)
    with source:
        rows = [(row, row.features_SF.clone()) for row in source]
    assert len(rows) > 12
    for row, features_SF in rows:
        assert torch.equal(row.features_SF, features_SF)


def test_resuming_gives_the_rest(folder):
    whole = read_all(loader(folder))
    rest = read_all(loader(folder, start=whole[4].position, separate=True))
    assert [r.position for r in rest] == [r.position for r in whole[5:]]


def test_damage_is_raised_as_it_is_in_a_thread(tmp_path):
    folder = make_cache(tmp_path / "c", documents([40] * 12))
    source = loader(folder, separate=True)
    damaged = layout.shard_dir(folder, 2) / "exponent" / "c.0.0.0"
    (path,) = [damaged] if damaged.exists() else list(damaged.parent.glob("c*"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardCorruptError, match="exponent"), source:
        list(source)
    assert not processes()
    assert not loader_threads()


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_leaving_early_ends_the_process(folder, taken):
    source = loader(folder, passes=5, separate=True)
    with source:
        rows = iter(source)
        for _ in range(taken):
            next(rows)
    assert not processes()
    assert not loader_threads()


def test_a_killed_process_is_an_error_that_says_how(folder):
    source = loader(folder, passes=50, separate=True)

    def read_and_kill():
        for number, _ in enumerate(source):
            if number == 2:
                os.kill(processes()[-1], signal.SIGKILL)

    with pytest.raises(HscacheError, match=r"ended by signal 9.*--resume"), source:
        read_and_kill()
    assert not loader_threads()


def test_the_process_ends_when_training_is_killed(folder):
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_batches import loader\n"
        "source = loader(Path(sys.argv[1]), passes=10**6, separate=True)\n"
        "with source:\n"
        "    for row in source: print('row', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder), str(Path(__file__).parent)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as training:  # fmt: skip
        assert training.stdout.readline() == b"row\n"
        threads = Path(f"/proc/{training.pid}/task").iterdir()
        children = [c for t in threads for c in (t / "children").read_text().split()]
        assert children
        training.kill()
    while any(b"row_process" in _command(child) for child in children):
        time.sleep(0.05)


def _command(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_memory_of_a_row_waits_for_its_release(folder):
    run = run_of(folder, passes=5)
    with RowProcess(run.cache, run.row_task()) as process:
        parts = (part for part in process.parts() if isinstance(part, ReadRow))
        held = [next(parts)]
        before = {name: array.copy() for name, array in held[0].space.arrays.items()}
        for _ in range(20):
            read = next(parts)
            assert read.space.slot != held[0].space.slot
            process.release(read)
        for name, array in held[0].space.arrays.items():
            assert (array == before[name]).all()


def following(folder, cache):
    """What reads a copy of a cache that lacks its last shard; and that shard's folder."""
    shutil.copytree(folder, cache)
    shard = layout.shard_dir(cache, layout.list_shards(cache)[-1])
    shard.rename(cache.parent / "not-yet")
    task = replace(run_of(folder, passes=2).row_task(), follow=True)
    return open_cache(cache), task, shard


def test_it_waits_for_a_shard_that_is_missing(folder, tmp_path):
    cache, task, shard = following(folder, tmp_path / "cache")
    found = []
    with loader_of(cache, task, separate=True) as source:
        for step in source.steps(patience_s=0.05):
            if step is not None:
                found += step[0]
            elif len(found) > 3 and not shard.exists():
                (tmp_path / "not-yet").rename(shard)
    assert shard.exists(), "it did not wait"
    for a, b in zip(found, read_all(loader(folder, passes=2)), strict=True):
        assert_same(a, b)


def test_a_process_that_waits_for_a_shard_ends_when_training_is_gone(folder, tmp_path):
    cache, task, _ = following(folder, tmp_path / "cache")
    looks = []
    with RowProcess(cache, task) as process:

        def wanted():
            looks.append(1)  # one more look without a row
            return len(looks) < 5

        for part in process.parts(wanted):
            looks.clear()
            if isinstance(part, ReadRow):
                process.release(part)
        process._connection.close()  # as the kernel does for one that was killed
        assert process._process.wait() == 0


def test_what_it_warns_of_is_logged_here(tmp_path, caplog):
    folder = make_cache(tmp_path / "c", documents([40] * 12))
    (path,) = (layout.shard_dir(folder, 2) / "exponent").glob("c*")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    read_all(loader(folder, separate=True, on_bad_shard="skip"))
    assert "skipping documents" in caplog.text
    assert str(path) in caplog.text
