"""Looks at held-out documents: when they come, that training never notices, what is kept."""

import contextlib
import itertools
import shutil

import pytest
import torch
from safetensors.torch import load_file
from trainer_cache import documents, fit_config, make_cache, metrics_of, random_bits

import trainer.watch
from hscache import files
from hscache.errors import HscacheError, StoppedBySignal
from trainer.checkpoint import read_state
from trainer.drafter_folder import load_drafter
from trainer.estimate import estimate_acceptance
from trainer.fit import fit, run
from trainer.frozen import load_frozen
from trainer.metrics import is_evaluation
from trainer.run_folder import best_checkpoint, list_checkpoints, resolve_checkpoint
from trainer.run_plan import plan_run

CORPUS = documents([30] * 20, held_out=(0, 1, 2, 3))
EVERY = {"eval_every_tokens": 200, "eval_documents": 3}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("watch") / "cache", CORPUS)


def lines_of(run_dir, *, timed=False):
    """metrics.jsonl without what a clock says."""
    clocked = ("perf/", "eval/seconds")
    return [
        {k: v for k, v in line.items() if timed or not k.startswith(clocked)}
        for line in metrics_of(run_dir)
    ]


def evaluations(run_dir):
    return [line for line in lines_of(run_dir) if is_evaluation(line)]


@pytest.fixture
def scored(monkeypatch):
    """Let the looks of a run find these acceptance lengths."""
    real = trainer.watch.metrics_of

    def use(*values):
        left = itertools.chain(values, itertools.repeat(1.0))
        monkeypatch.setattr(
            "trainer.watch.metrics_of",
            lambda figures: {**real(figures), "eval/sequential": next(left)},
        )

    return use


def test_looks_come_every_so_many_tokens_at_checkpoints_and_at_the_end(cache, tmp_path):
    fit(fit_config(cache, tmp_path / "run", checkpoint_every=7, **EVERY))
    trained = [line for line in lines_of(tmp_path / "run") if not is_evaluation(line)]
    expected, mark = [], 0
    for line in trained:
        if line["train/tokens"] // 200 > mark or line["step"] % 7 == 0 or line is trained[-1]:
            expected.append(line["step"])
        mark = line["train/tokens"] // 200
    looks = evaluations(tmp_path / "run")
    assert [line["step"] for line in looks] == expected
    assert len(looks) > 3
    tokens = {line["step"]: line["train/tokens"] for line in trained}
    assert all(line["eval/tokens"] == tokens[line["step"]] for line in looks)


def test_a_line_holds_what_trainer_eval_would_find(cache, tmp_path):
    config = fit_config(cache, tmp_path / "run", **EVERY, drafter={"block_size": 5})
    checkpoint = fit(config)
    last = evaluations(tmp_path / "run")[-1]
    planned = plan_run(config)
    frozen = load_frozen(planned.cache).to(torch.device("cpu"), torch.float32)
    found = estimate_acceptance(
        load_drafter(checkpoint), frozen, planned.held_out, device=torch.device("cpu"),
        dtype=torch.float32,
    )  # fmt: skip
    assert last["eval/sequential"] == found.sequential
    assert last["eval/dense"] == found.dense
    assert last["eval/per_document_mean"] == found.per_document_mean
    assert set(last) == {
        "step", "eval/tokens", "eval/loss", "eval/sequential", "eval/dense",
        "eval/per_document_mean", "eval/accuracy", "eval/accuracy_slot_01",
        "eval/accuracy_slot_02", "eval/accuracy_slot_03", "eval/accuracy_slot_04",
        "eval/documents", "eval/anchors",
    }  # fmt: skip
    assert (last["eval/documents"], last["eval/anchors"]) == (3, 3 * 26)


@pytest.mark.parametrize(
    ("dtype", "loss"),
    [("float32", {"sample_slots": True}), ("bfloat16", {"weighting": "dpace", "gamma": None})],
)
def test_training_never_notices(cache, tmp_path, dtype, loss):
    settings = {"dtype": dtype, "loss": loss, "checkpoint_every": 5}
    without = fit(fit_config(cache, tmp_path / "a", **settings))
    with_looks = fit(fit_config(cache, tmp_path / "b", **settings, **EVERY))
    assert without.name == with_looks.name
    for name in ("training.safetensors", "model.safetensors"):
        a, b = load_file(without / name), load_file(with_looks / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert read_state(without) == read_state(with_looks)
    steps = [line for line in lines_of(tmp_path / "b") if not is_evaluation(line)]
    assert steps == lines_of(tmp_path / "a")
    assert evaluations(tmp_path / "b")


def test_metrics_of_a_killed_run_go_on_as_if_it_had_never_stopped(cache, tmp_path):
    """Lines from after the checkpoint are there, as kill -9 leaves them; log lines are rarer."""
    settings = {
        "checkpoint_every": 3, "keep_checkpoints": 99, "log_every": 2, "eval_documents": 3,
        "eval_every_tokens": 650,  # once in the whole run
    }  # fmt: skip
    last = fit(fit_config(cache, tmp_path / "straight", **settings))
    for checkpoint in list_checkpoints(tmp_path / "straight")[:-1]:
        run_dir = tmp_path / checkpoint.name
        shutil.copytree(tmp_path / "straight", run_dir, symlinks=True)
        step = read_state(checkpoint).step
        for later in list_checkpoints(run_dir):
            if read_state(later).step > step:
                shutil.rmtree(later)
        resumed = fit(fit_config(cache, run_dir, resume=True, **settings))
        assert lines_of(run_dir) == lines_of(tmp_path / "straight")
        assert (resumed / "model.safetensors").read_bytes() == (
            last / "model.safetensors"
        ).read_bytes()


def test_resuming_a_finished_run_looks_at_nothing_again(cache, tmp_path, capsys):
    config = {"checkpoint_every": 7, **EVERY}
    fit(fit_config(cache, tmp_path / "run", **config))
    before = lines_of(tmp_path / "run")
    first = capsys.readouterr().out.rpartition("trained")[2]
    fit(fit_config(cache, tmp_path / "run", resume=True, **config))
    assert lines_of(tmp_path / "run") == before
    again = capsys.readouterr().out.rpartition("trained")[2]
    for name in ("held out", "accuracy by slot"):
        [line] = [line for line in first.splitlines() if line.startswith(name)]
        assert line in again


def test_stop_by_signal_saves_without_a_look_that_was_not_due(cache, tmp_path, monkeypatch):
    asked = itertools.count()
    stop = contextlib.nullcontext(lambda: 15 if next(asked) > 8 else None)
    monkeypatch.setattr("trainer.loop.stop_requested", lambda *same: stop)
    settings = {"eval_every_tokens": 10**9, "eval_documents": 3}
    with pytest.raises(StoppedBySignal):
        fit(fit_config(cache, tmp_path / "run", **settings))
    assert len(list_checkpoints(tmp_path / "run")) == 1
    assert evaluations(tmp_path / "run") == []
    assert best_checkpoint(tmp_path / "run") is None


def test_the_best_checkpoint_outlives_newer_ones(cache, tmp_path, scored, capsys):
    scored(1.5, 2.5, 2.0, 2.25)
    settings = {"checkpoint_every": 2, "keep_checkpoints": 1, "eval_every_tokens": 10**9}
    last = fit(fit_config(cache, tmp_path / "run", **settings))
    kept = [path.name for path in list_checkpoints(tmp_path / "run")]
    assert kept == ["checkpoint-4", last.name]
    assert best_checkpoint(tmp_path / "run").name == "checkpoint-4"
    best = resolve_checkpoint(tmp_path / "run" / "best")
    assert (best / "model.safetensors").read_bytes() == (
        tmp_path / "run/checkpoint-4/model.safetensors"
    ).read_bytes()
    assert resolve_checkpoint(tmp_path / "run") == last
    assert "checkpoint-4 (2.500)" in capsys.readouterr().out


def test_an_equal_score_does_not_replace_the_best(cache, tmp_path, scored):
    scored(1.5, 2.5, 2.5, 2.5)
    settings = {"checkpoint_every": 2, "keep_checkpoints": 1, "eval_every_tokens": 10**9}
    fit(fit_config(cache, tmp_path / "run", **settings))
    assert best_checkpoint(tmp_path / "run").name == "checkpoint-4"


def test_best_is_remembered_over_a_resume_and_not_kept_unless_asked(cache, tmp_path, scored):
    scored(1.5, 2.5, 2.0)
    settings = {"checkpoint_every": 2, "keep_checkpoints": 2, "eval_every_tokens": 10**9}
    run_dir = tmp_path / "run"
    fit(fit_config(cache, run_dir, **settings))
    newest = list_checkpoints(run_dir)[-1]
    shutil.rmtree(newest)  # as if killed before it was written
    (run_dir / f"{files.TEMPORARY_PREFIX}best").symlink_to("checkpoint-2")
    scored(2.4)
    fit(fit_config(cache, run_dir, resume=True, **settings))
    assert best_checkpoint(run_dir).name == "checkpoint-4"
    assert not list(run_dir.glob(f"{files.TEMPORARY_PREFIX}*"))
    fit(fit_config(cache, tmp_path / "no", keep_best=False, **settings))
    assert best_checkpoint(tmp_path / "no") is None
    assert len(list_checkpoints(tmp_path / "no")) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("damage", ["lost", "edited", "of other documents"])
def test_the_best_is_looked_at_again_when_its_line_is_gone(
    cache, tmp_path, scored, caplog, damage, dtype
):
    """Else it would be replaced, and deleted, by whatever comes next."""
    scored(1.5, 2.5, 2.0)
    settings = {"checkpoint_every": 2, "keep_checkpoints": 2, "eval_every_tokens": 10**9}
    settings |= {"dtype": dtype}
    run_dir = tmp_path / "run"
    fit(fit_config(cache, run_dir, **settings))
    shutil.rmtree(list_checkpoints(run_dir)[-1])
    if damage == "lost":
        (run_dir / "metrics.jsonl").unlink()
    elif damage == "edited":
        (run_dir / "metrics.jsonl").write_text('{"step": 4, "eval/documents": 4}\n')
    else:
        settings["eval_documents"] = 2
    scored(0.9)
    fit(fit_config(cache, run_dir, resume=True, **settings))
    assert "looking at them with it again" in caplog.text
    assert best_checkpoint(run_dir).name == "checkpoint-4"
    load_drafter(run_dir / "best")


def test_a_damaged_best_checkpoint_is_replaced(cache, tmp_path, scored, caplog):
    scored(1.5, 2.5, 2.0)
    settings = {"checkpoint_every": 2, "keep_checkpoints": 2, "eval_every_tokens": 10**9}
    run_dir = tmp_path / "run"
    fit(fit_config(cache, run_dir, **settings))
    shutil.rmtree(newest := list_checkpoints(run_dir)[-1])
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "best" / "model.safetensors").write_bytes(b"")
    fit(fit_config(cache, run_dir, resume=True, **settings))
    assert "cannot be the best any more" in caplog.text
    assert best_checkpoint(run_dir) == newest


def test_weights_that_are_not_finite_are_not_looked_at(tmp_path):
    def bits(row, num_tokens):
        values = random_bits(num_tokens, row)
        values[:, 0, 0] = 0x7FC0 if row == 12 else 0
        return values

    folder = make_cache(tmp_path / "c", CORPUS, bits=bits)
    settings = {"eval_every_tokens": 1, "eval_documents": 3, "log_every": 1000}
    with pytest.raises(HscacheError, match="not finite at step"):
        fit(fit_config(folder, tmp_path / "run", **settings))
    assert all(line["eval/loss"] > 0 for line in evaluations(tmp_path / "run"))


def test_held_out_states_that_are_not_finite_stop_the_run_by_name(tmp_path):
    held_out = 0

    def bits(row, num_tokens):
        values = random_bits(num_tokens, row)
        if row == held_out:
            values[0] = 0x7FC0
        return values

    folder = make_cache(tmp_path / "c", CORPUS, bits=bits)
    held_out_rows = {
        document.row for document in plan_run(fit_config(folder, tmp_path)).cache.held_out
    }
    assert held_out in held_out_rows
    with pytest.raises(HscacheError, match=r"held-out documents is nan at step 1: .*verify --deep"):
        fit(fit_config(folder, tmp_path / "run", eval_every_tokens=1, eval_documents=9))
    assert evaluations(tmp_path / "run") == []


def test_cache_without_held_out_documents_is_said_and_trains_on(tmp_path, caplog, capsys):
    folder = make_cache(tmp_path / "c", documents([30] * 6))
    assert run(fit_config(folder, tmp_path / "run", **EVERY)) == 0
    assert "has no held-out document" in caplog.text
    assert "--data.held-out-fraction" in caplog.text
    assert evaluations(tmp_path / "run") == []
    assert "no evaluation" in capsys.readouterr().out


def test_plan_and_end_show_the_held_out_side(cache, tmp_path, capsys):
    config = fit_config(cache, tmp_path / "run", **EVERY)
    assert run(config, dry_run=True) == 0
    assert "3 documents, 78 anchors, every 200 tokens" in capsys.readouterr().out
    run(config)
    output = capsys.readouterr().out
    assert "sequential" in output.rpartition("trained")[2]
    assert "accuracy by slot" in output
