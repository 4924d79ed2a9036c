"""Curves come from metrics.jsonl alone; runs in any state can be drawn; fit never needs it."""

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import hscache
import trainer
from hscache.errors import ConfigError
from trainer.config import PlotConfig
from trainer.plot import draw, moving_mean, read_runs, run, series, short_count

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(folder, num_steps, num_looks, *, torn=False):
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, num_steps + 1):
        lines.append({
            "step": step, "train/loss": 5 / step, "train/accuracy": None if step == 2 else 0.5,
            "train/grad_norm_max": 1.0, "train/lr": 1e-3, "train/tokens": 100 * step,
            "perf/tokens_per_s": 1000.0, "perf/data_wait": 0.01,
        })  # fmt: skip
        if step <= num_looks:
            lines.append({
                "step": step, "eval/tokens": 100 * step, "eval/loss": 4 / step,
                "eval/sequential": 1 + step / 10, "eval/dense": 1.2, "eval/accuracy": 0.4,
                "eval/accuracy_slot_01": 0.5, "eval/accuracy_slot_02": None, "eval/documents": 3,
            })  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + ('{"step": 9' if torn else ""))
    return folder


def test_runs_of_every_kind_are_drawn_into_one_picture(tmp_path, capsys):
    runs = (
        write_run(tmp_path / "long", 200, 80),
        write_run(tmp_path / "short", 3, 0, torn=True),
        write_run(tmp_path / "one", 1, 1),
    )
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    output = tmp_path / "new" / "curves.png"
    assert run(PlotConfig(runs=runs, output=output)) == 0
    assert output.read_bytes().startswith(PNG)
    assert "long: 200 + 80 lines, short: 3 + 0 lines, one: 1 + 1 lines" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")} == before
    assert run(PlotConfig(runs=runs, output=tmp_path / "no.png"), dry_run=True) == 0
    assert not (tmp_path / "no.png").exists()


def test_text_of_a_picture_names_runs_and_panels(tmp_path):
    found = read_runs(
        [write_run(tmp_path / "a" / "run", 5, 2), write_run(tmp_path / "b/run", 5, 0)]
    )
    assert [one.label for one in found] == ["a/run", "b/run"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = draw(found, "svg").decode()
    for word in ("a/run", "b/run", "Loss", "Acceptance length", "Learning rate", "1.20", "dense"):
        assert word in text


def test_every_run_is_within_the_axes(tmp_path):
    """Also one that is much faster than the runs before it."""
    slow, fast = (write_run(tmp_path / name, 5, 2) for name in ("slow", "fast"))
    path = fast / "metrics.jsonl"
    path.write_text(path.read_text().replace("1000.0", "9000.0").replace("0.01", "0.5"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = draw(read_runs([slow, fast]), "svg").decode()
    assert ">8k<" in text
    assert ">40<" in text


def test_series_leave_out_what_was_not_measured(tmp_path):
    [one] = read_runs([write_run(tmp_path / "run", 4, 0)])
    x, y = series(one.steps, "train/tokens", "train/accuracy")
    assert x.tolist() == [100, 300, 400]
    assert y.tolist() == [0.5] * 3
    assert [len(part) for part in series(one.steps, "train/tokens", "eval/loss")] == [0, 0]


def test_moving_mean_keeps_the_ends():
    y = np.array([3.0, 0.0, 6.0, 0.0, 3.0])
    assert moving_mean(y, 3).tolist() == [1.5, 3.0, 2.0, 3.0, 1.5]


def test_folder_without_a_line_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"st')
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl with a line"):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (500, "500"), (20_000, "20k"), (1.5e6, "1.5M"), (1.87e9, "1.87B")]
)
def test_counts_on_axes_are_short(value, text):
    assert short_count(value) == text


def test_nothing_but_the_two_that_draw_imports_matplotlib():
    modules = [
        *Path(trainer.__file__).parent.glob("*.py"),
        *Path(hscache.__file__).parent.glob("*.py"),
    ]
    texts = {path.name: path.read_text() for path in modules}
    drawing = {name for name, text in texts.items() if "matplotlib" in text}
    assert drawing == {"plot.py", "roofline.py"}
    for module in ("trainer.plot", "hscache.roofline"):
        imports = (f"import {module}", f"from {module} import")
        assert not [n for n, text in texts.items() for line in imports if line in text]
