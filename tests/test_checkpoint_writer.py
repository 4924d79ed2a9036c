"""Checkpoints are written beside training, and finished however training ends."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from trainer_cache import documents, fit_config, make_cache

from hscache.errors import DiskFullError, HscacheError
from trainer import checkpoint
from trainer.checkpoint import read_state
from trainer.checkpoint_writer import (
    CheckpointWriter,
    cancel_moments,
    gather_moments,
    write_moments,
)
from trainer.drafter_folder import load_drafter
from trainer.fit import fit
from trainer.ranks import Ranks
from trainer.run_folder import list_checkpoints
from trainer.run_plan import plan_run
from trainer.run_state import save_training, start_training
from trainer.training import Training


def test_a_job_runs_beside_and_is_finished_when_the_context_ends():
    go, done = threading.Event(), threading.Event()

    def job():
        go.wait(10)
        done.set()

    with CheckpointWriter() as writer:
        writer.start(job)
        writer.check()
        assert not done.is_set()
        go.set()
    assert done.is_set()


def fail():
    raise DiskFullError("disk full")


def test_what_a_job_raises_comes_with_the_next_call():
    for call in (CheckpointWriter.finish, lambda writer: writer.start(print)):
        with CheckpointWriter() as writer:
            writer.start(fail)
            with pytest.raises(DiskFullError):
                call(writer)
    with pytest.raises(DiskFullError), CheckpointWriter() as writer:
        writer.start(fail)


def fail_twice():
    with CheckpointWriter() as writer:
        writer.start(fail)
        raise ValueError("first")


def test_the_error_that_ended_training_is_not_replaced(caplog):
    with pytest.raises(ValueError, match="first"):
        fail_twice()
    assert "the last checkpoint was not written: disk full" in caplog.text


def test_training_goes_on_while_a_checkpoint_is_written_and_an_error_finishes_it(
    tmp_path, monkeypatch
):
    """The first checkpoint waits for two more steps; then the run fails."""
    folder = make_cache(tmp_path / "cache", documents([30] * 12))
    config = fit_config(folder, tmp_path / "run", checkpoint_every=2, passes=3)
    stepped, write, update = threading.Event(), checkpoint.write_tensors, Training.update

    def late(*arguments, **settings):
        assert stepped.wait(30)
        return write(*arguments, **settings)

    def counted(self, rows, end=None):
        if self.step == 3:
            stepped.set()
            raise HscacheError("a test says so")
        update(self, rows, end)

    monkeypatch.setattr(checkpoint, "write_tensors", late)
    monkeypatch.setattr(Training, "update", counted)
    with pytest.raises(HscacheError, match="a test says so"):
        fit(config)
    (found,) = list_checkpoints(config.run_dir)
    assert read_state(found).step == 2
    load_drafter(found)
    assert not list(config.run_dir.glob(".tmp-*"))


def snapshot_of_nothing():
    return checkpoint.Snapshot(masters={}, moments={}, outer_momenta={})


@pytest.fixture
def pair():
    """Two ranks that can leave each other words."""
    store = dist.HashStore()
    return [Ranks(rank, 2, store=store, timeout_s=30) for rank in range(2)]


def test_no_rank_waits_for_a_checkpoint_that_rank_0_cannot_write(pair, tmp_path):
    cancel_moments(pair[0], 7, DiskFullError("disk full"))
    with pytest.raises(HscacheError, match="rank 0 could not write the checkpoint: disk full"):
        write_moments(tmp_path, snapshot_of_nothing(), pair[1], 7, threading.Event())


def test_a_run_folder_that_another_node_cannot_see_is_named(pair, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"

    def write():
        with contextlib.suppress(HscacheError):
            write_moments(there, snapshot_of_nothing(), pair[1], 7, threading.Event())

    other = threading.Thread(target=write)
    other.start()
    with pytest.raises(HscacheError, match=r"cannot be seen from rank 1.*--sync.mode ddp"):
        gather_moments(here / ".tmp-x", pair[0], 7, threading.Event())
    other.join()
    assert not there.exists()


def test_rank_0_tells_the_others_when_the_disk_is_full(pair, tmp_path, monkeypatch):
    folder = make_cache(tmp_path / "cache", documents([30] * 12))
    run = plan_run(fit_config(folder, tmp_path / "run"))
    training = start_training(run, torch.device("cpu"), pair[0])
    monkeypatch.setattr("trainer.run_state.write_checkpoint", lambda *a, **k: fail())
    with pytest.raises(DiskFullError), CheckpointWriter() as writer:
        save_training(run, training, writer)
    with pytest.raises(HscacheError, match="rank 0 could not write the checkpoint: disk full"):
        write_moments(tmp_path, snapshot_of_nothing(), pair[1], 0, threading.Event())
