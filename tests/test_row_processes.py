"""Rows read by several processes are those of one reader, in the same order, with the same ends."""

from dataclasses import replace

import pytest
import torch
from test_batches import LENGTHS, assert_same, run_of
from test_row_process import processes
from trainer_cache import coded_bits, documents, fit_config, make_cache

from hscache import layout
from trainer.batches import Loader
from trainer.row_processes import threads_of_processes
from trainer.run_plan import plan_run
from trainer.schedule import Share

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    corpus = documents(LENGTHS, held_out=(0, 1))
    return make_cache(tmp_path_factory.mktemp("rows") / "cache", corpus, bits=coded_bits)


def steps_of(run, task, *, separate):
    loader = Loader(run.cache, task, device=CPU, dtype=torch.bfloat16, separate=separate)
    with loader:
        steps = list(loader.steps())
    assert not processes()
    return steps


def assert_same_steps(found, wanted):
    assert len(found) == len(wanted) > 3
    for (rows, end), (wanted_rows, wanted_end) in zip(found, wanted, strict=True):
        assert replace(end, skipped=()) == replace(wanted_end, skipped=())
        assert sorted(end.skipped) == sorted(wanted_end.skipped)
        for a, b in zip(rows, wanted_rows, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("rank", [None, 1])
def test_steps_of_three_processes_are_those_of_one_thread(folder, rank):
    run = run_of(folder, passes=3, global_batch_rows=4)
    task = replace(run.row_task(), threads=3)
    if rank is not None:
        share = Share(rank=rank, num_ranks=2, rows_per_step=4)
        task = replace(task, share=share)
    wanted = steps_of(run, task, separate=False)
    assert_same_steps(steps_of(run, task, separate=True), wanted)
    task = replace(task, start=wanted[2][1].position)
    assert_same_steps(steps_of(run, task, separate=True), wanted[3:])


def test_what_any_process_skips_is_told_at_the_end_of_its_step(tmp_path):
    folder = make_cache(tmp_path / "c", documents([40] * 24), bits=coded_bits)
    for shard in (0, 2):
        (path,) = (layout.shard_dir(folder, shard) / "exponent").glob("c*")
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    run = run_of(folder, passes=2, global_batch_rows=2, on_bad_shard="skip")
    task = replace(run.row_task(), threads=3)
    wanted = steps_of(run, task, separate=False)
    assert sum(len(end.skipped) for _, end in wanted) > 2
    assert_same_steps(steps_of(run, task, separate=True), wanted)


@pytest.mark.parametrize("separate", [False, True])
def test_what_leaks_between_caches_is_said_once_however_many_processes_open_them(
    tmp_path, caplog, separate
):
    for name, held_out in (("a", (0, 1)), ("b", (1, 2, 3))):
        corpus = documents([20] * 20, seed=1, held_out=held_out)
        make_cache(tmp_path / name, corpus, bits=coded_bits)
    run = plan_run(fit_config((tmp_path / "a", tmp_path / "b"), tmp_path / "run", passes=1))
    assert steps_of(run, replace(run.row_task(), threads=2), separate=separate)
    assert caplog.text.count("are held out in another") == 1


@pytest.mark.parametrize(
    ("threads", "row_mb", "expected"),
    [
        (8, 50, [1] * 8),  # 8,192 tokens x 5 x 576
        (8, 210, [4, 4]),  # 4,096 tokens x 5 x 5120
        (7, 140, [3, 2, 2]),
        (8, 1700, [8]),
        (1, 1, [1]),
    ],
)
def test_large_rows_have_fewer_processes_with_more_threads(threads, row_mb, expected):
    assert threads_of_processes(threads, row_mb * 10**6) == expected
