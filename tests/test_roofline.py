"""Results of benches under the roofs of their card: parts add up, and nothing is mixed."""

import json
from pathlib import Path

import pytest

from hscache import roofline
from hscache.cli import main

TRAINER = Path(__file__).parents[1] / "tools" / "bench" / "results" / "trainer-27b-h200.json"
DENSE, SUSTAINED = 989.4e12, 680e12


def forward_file(folder: Path, *, kernels=None, device="NVIDIA H200") -> Path:
    """A forward of 3 PFLOP in 5 s."""
    forward = {"flop": {"total": 3e15}, "flop_per_s": 6e14, "seconds": {"median": 5.0}}
    figures = {
        "what": "hscache bench forward", "machine": {"device": device}, "budgets": [forward],
        "gemm": {"sustained_flop_per_s": SUSTAINED, "power_w": 690.0, "clock_mhz": 1450.0},
    }  # fmt: skip
    if kernels is not None:
        figures["milliseconds_by_kernel"] = [{"kernel": k, "ms": ms} for k, ms in kernels]
    file = folder / "forward.json"
    file.write_text(json.dumps(figures))
    return file


def test_a_forwards_time_is_split_by_its_kernels(tmp_path):
    kernels = [("nvjet_sm90_x", 4500.0), ("flash_fwd_gemm_like", 150.0), ("_rms_norm", 250.0)]
    found = roofline.gather([forward_file(tmp_path, kernels=kernels)])
    [split] = found.splits
    assert sum(split.parts.values()) == pytest.approx(split.seconds) == 5
    assert split.parts[roofline.USEFUL] == pytest.approx(3e15 / DENSE)
    assert split.parts[roofline.POWER] == pytest.approx(3e15 / SUSTAINED - 3e15 / DENSE)
    assert split.parts[roofline.SLOW_PRODUCTS] == pytest.approx(4.5 - 3e15 / SUSTAINED)
    assert split.parts[roofline.OTHER_KERNELS] == pytest.approx(0.4)
    assert split.parts[roofline.IDLE] == pytest.approx(0.1)


def test_without_kernels_their_causes_are_one_part(tmp_path):
    [split] = roofline.gather([forward_file(tmp_path)]).splits
    assert split.parts[roofline.MIXED] == pytest.approx(5 - 3e15 / SUSTAINED)
    assert roofline.SLOW_PRODUCTS not in split.parts


def test_a_step_is_split_into_what_the_bench_measured():
    figures = json.loads(TRAINER.read_text())
    found = roofline.gather([TRAINER])
    [split] = found.splits
    assert sum(split.parts.values()) == pytest.approx(split.seconds)
    assert split.parts[roofline.OPTIMIZER] == figures["optimizer_s"]["median"]
    wait = figures["from_shards"]["data_wait"]
    assert split.parts[roofline.DATA] / split.seconds == pytest.approx(wait)
    useful = split.parts[roofline.USEFUL] / split.seconds
    assert useful == pytest.approx(figures["step"]["flop_per_s"] / DENSE, rel=0.01)
    assert found.sustained == figures["gemm"]["sustained_flop_per_s"]


def test_intensity_is_flop_over_bytes():
    assert roofline.intensity_of([[2, 3, 4]]) == 2 * 24 / (2 * (6 + 12 + 8))
    assert roofline.intensity_of([]) is None


def test_one_json_and_a_picture_are_written(tmp_path, capsys):
    picture, everything = tmp_path / "out" / "roof.svg", tmp_path / "all.json"
    other = tmp_path / "other.json"
    other.write_text('{"what": "hscache bench store", "machine": {}}')
    files = [str(TRAINER), str(forward_file(tmp_path)), str(other)]
    assert main(["roofline", *files, "--picture", str(picture), "--json", str(everything)]) == 0
    assert picture.read_bytes().startswith(b"<?xml")
    found = json.loads(everything.read_text())
    assert {p["name"].split(":")[0] for p in found["points"]} == {"forward", "trainer-27b-h200"}
    assert [r["what"] for r in found["results"]] == ["trainer bench", "hscache bench forward"]
    text = capsys.readouterr().out
    assert "left out" in text
    assert "dense peak" in text


def test_a_dry_run_writes_nothing(tmp_path):
    picture = tmp_path / "roof.svg"
    assert main(["roofline", str(TRAINER), "--picture", str(picture), "--dry-run"]) == 0
    assert not picture.exists()


def test_what_cannot_be_drawn_is_refused(tmp_path, capsys):
    b200 = forward_file(tmp_path, device="NVIDIA B200")
    unknown = tmp_path / "unknown.json"
    unknown.write_text('{"what": "trainer bench", "machine": {"device": "NVIDIA T4"}}')
    text = tmp_path / "text.json"
    text.write_text("no")
    for files, words in (
        ([TRAINER, b200], ["one kind of GPU", "NVIDIA H200", "NVIDIA B200"]),
        ([unknown], ["NVIDIA T4", "not in hscache/gpus.py"]),
        ([text], ["no result file of a bench", "`what`"]),
        ([TRAINER, "--picture", "roof.txt"], ["found `.txt`", ".svg"]),
    ):
        assert main(["roofline", *map(str, files)]) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
