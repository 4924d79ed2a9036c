"""metrics.jsonl reads as if the run had never stopped; what was not measured is null, not 0."""

import importlib.util
import json

import pytest
import torch
from trainer_cache import metrics_of, small_disk

from hscache.errors import DiskFullError, HscacheError
from trainer.metrics import MetricsLog, StepFigures, Window


def open_log(run_dir, after_step=0, log_with="none"):
    return MetricsLog(run_dir, after_step=after_step, log_with=log_with, config={"a": {"b": [1]}})


def test_lines_hold_the_step_and_null_for_what_is_missing(tmp_path):
    with open_log(tmp_path) as log:
        log.log(1, loss=2.5, accuracy=None)
    assert metrics_of(tmp_path) == [{"step": 1, "loss": 2.5, "accuracy": None}]


def test_lines_are_there_at_once(tmp_path):
    with open_log(tmp_path) as log:
        log.log(1, loss=2.5)
        assert len(metrics_of(tmp_path)) == 1


def test_lines_beyond_the_checkpoint_and_a_torn_one_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {i}}}\n' for i in range(1, 8)) + '{"step": 8, "lo')
    with open_log(tmp_path, after_step=5) as log:
        log.log(6, loss=1.0)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_new_run_starts_with_an_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with open_log(tmp_path):
        assert metrics_of(tmp_path) == []


def fill(log):
    for step in range(3000):
        log.log(step, text_of_some_length=1 / 3)


def test_full_disk_is_named(tmp_path):
    with small_disk(tmp_path / "small", "64k"):
        with pytest.raises(DiskFullError, match="disk full"), open_log(tmp_path / "small") as log:
            fill(log)
        assert len((tmp_path / "small/metrics.jsonl").read_text().splitlines()) > 500


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_same_numbers(tmp_path):
    with open_log(tmp_path, log_with="tensorboard") as log:
        log.log(1, loss=2.5, accuracy=None)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")
                 if path.parent.name == "hscache"}  # fmt: skip
    accumulator = EventAccumulator(str(events)).Reload()
    assert [e.value for e in accumulator.Scalars("loss")] == [2.5]
    assert "accuracy" not in accumulator.Tags()["scalars"]


def add(window, step, loss_sum, norm=1.0, weight_sum=2.0, correct=1.0):
    window.add(
        step, tokens=10, anchors=2, weight_sum=weight_sum, num_scored=4,
        sums=torch.tensor([loss_sum, correct, norm], dtype=torch.float64),
    )  # fmt: skip


def test_window_divides_sums_once():
    window = Window()
    add(window, 1, 3.0, weight_sum=2.0)
    add(window, 2, 8.0, weight_sum=6.0, norm=3.0, correct=3.0)
    values = window.values(wait_s=0.0)
    assert values["train/loss"] == 11 / 8  # not the mean of 1.5 and 1.33
    assert values["train/accuracy"] == 4 / 8
    assert values["train/grad_norm_max"] == 3.0
    assert values["perf/tokens_per_s"] > 0


def test_window_goes_on_from_the_figures_of_a_checkpoint():
    whole, first, second = Window(), Window(), None
    losses = [0.1, 1 / 3, 2.7, 1e-9]
    for step, loss in enumerate(losses):
        add(whole, step, loss)
    for step, loss in enumerate(losses[:2]):
        add(first, step, loss)
    stored = json.loads(json.dumps([vars(figures) for figures in first.read()]))
    second = Window(StepFigures(**figures) for figures in stored)
    for step, loss in enumerate(losses[2:], 2):
        add(second, step, loss)
    assert second.num_steps == 4
    for name, value in whole.values(0.0).items():
        if name.startswith("train/"):
            assert second.values(0.0)[name] == value


def test_nothing_measured_is_none_everywhere():
    assert set(Window().values(0.0).values()) == {None, 0.0}  # 0.0: the share of time waited
    assert [k for k, v in Window().values(0.0).items() if v == 0.0] == ["perf/data_wait"]


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_first_step_that_is_not_finite_is_named(loss, norm):
    window = Window()
    add(window, 7, 1.0)
    add(window, 8, loss, norm)
    add(window, 9, float("nan"))
    with pytest.raises(HscacheError, match="not finite at step 8"):
        window.read()


def test_a_damaged_line_is_dropped_and_stops_nobody(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"st\x00ep": 2\n[3]\n{"step": 4, "a": 4}\n')
    with MetricsLog(tmp_path, after_step=4, log_with="none", config={}) as metrics:
        metrics.log(5, a=5.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4, 5]
