"""Checkpoints are written beside training, and finished however training ends."""

import threading

import pytest
from trainer_cache import documents, fit_config, make_cache

from hscache.errors import DiskFullError, HscacheError
from trainer import checkpoint
from trainer.checkpoint import list_checkpoints, load_drafter, read_state
from trainer.checkpoint_writer import CheckpointWriter
from trainer.fit import fit
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
