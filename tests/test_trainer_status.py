"""`trainer status`: a run as its files tell it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_cache import documents, fit_config, make_cache

from hscache import files, run_files
from trainer.cli import main
from trainer.fit import fit


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("status")
    cache = make_cache(folder / "cache", documents([30, 40, 25, 50], held_out=(0,)))
    config = fit_config(cache, folder / "run", checkpoint_every=2, eval_every_tokens=50)
    fit(config)
    return folder


def show(capsys, run, *flags) -> str:
    assert main(["status", str(run), *flags]) == 0
    return capsys.readouterr().out


def test_a_finished_run_is_shown_whole(trained, capsys):
    text = show(capsys, trained / "run", "--watch")  # ends by itself
    step, look = run_files.last_metrics(trained / "run")
    assert "finished, last line" in text
    tokens = 2 * (40 + 25 + 50)
    assert f"{step['train/tokens']:,} of about {tokens:,} tokens, step {step['step']}" in text
    assert f"loss {step['train/loss']:.3f}" in text
    assert f"acceptance {look['eval/sequential']:.3f} sequential" in text
    assert f"checkpoint-{step['step']}" in text
    assert "complete" in text
    assert "limit" not in text


def test_a_run_whose_lock_is_held_is_running_and_watching_does_not_take_it(trained, capsys):
    run = trained / "run"
    with files.only_writer(run / "lock", "the run"):
        pid = run_files.writer_pid(run)
        text = show(capsys, run)
    assert re.search(rf"running, process {pid}\b", text)
    assert "this side: it does not wait" in text
    assert run_files.writer_pid(run) is None


def test_an_unfinished_run_without_a_process_is_not_called_running(trained, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_bytes((trained / "run" / "config.json").read_bytes())
    assert "not started: no line of metrics" in show(capsys, run)
    (run / "metrics.jsonl").write_text('{"step": 1, "train/tokens": 10}\n')
    assert "not running on this machine" in show(capsys, run)
    os.utime(run / "metrics.jsonl", (0, 0))
    assert "STOPPED" in show(capsys, run, "--watch")


def test_a_run_on_several_caches_names_each(trained, tmp_path, capsys):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    cache = str(trained / "cache")
    (run / "config.json").write_text(json.dumps({**config, "shards": [cache, cache]}))
    text = show(capsys, run)
    assert text.count(f"{cache}:") == 2
    assert f"of about {2 * 2 * (40 + 25 + 50):,} tokens" in text


def test_a_run_on_weighted_caches_ends_after_its_own_visits(trained, tmp_path, capsys):
    corpus = documents([30, 40, 25, 50], seed=1, held_out=(0,))
    other = make_cache(tmp_path / "other", corpus)
    config = fit_config(
        (trained / "cache", other), tmp_path / "run", weights=(1.0, 0.5), passes=4, row_tokens=64
    )
    fit(config)
    text = show(capsys, tmp_path / "run", "--watch")  # ends by itself
    assert "finished, last line" in text
    assert f"of about {(4 + 2) * (40 + 25 + 50):,} tokens" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_torch_is_not_needed(trained):
    code = (
        "import sys; from trainer.cli import main\n"
        f"assert main(['status', {str(trained / 'run')!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=root)
