"""A result that could not be written is refused before the work, whichever command does it."""

import json
from pathlib import Path

import pytest

from hscache import cli
from hscache.errors import HscacheError
from hscache.result_file import require_writable, write_json


def test_a_result_is_written_whole_into_a_folder_that_is_made(tmp_path):
    path = tmp_path / "a" / "b" / "figures.json"
    require_writable(path)
    assert list(path.parent.iterdir()) == []
    write_json(path, {"what": "x"})
    assert json.loads(path.read_text()) == {"what": "x"}
    assert [p.name for p in path.parent.iterdir()] == ["figures.json"]
    require_writable(None)
    write_json(None, {})


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path, words in {
        tmp_path: "is a folder",
        tmp_path / "file" / "x.json": "cannot make the folder",
        Path("/proc/y/x.json"): "cannot make the folder",
        Path("/proc/x.json"): r"x\.json could not be written",
    }.items():
        with pytest.raises(HscacheError, match=words):
            require_writable(path)


@pytest.mark.parametrize("words", ["bench gemm", "bench forward", "bench store"])
def test_a_bench_asks_before_it_measures(words, tmp_path, llama_dir, monkeypatch, capfd):
    def measure(*arguments):
        raise AssertionError("it measured")

    module = f"hscache.{words.replace(' ', '_')}"
    monkeypatch.setattr(f"{module}.measure", measure)
    target = {"bench gemm": "--target", "bench forward": "--target.path", "bench store": ""}[words]
    given = [target, str(llama_dir)] if target else [str(tmp_path), "--size_gb", "0.001"]
    assert cli.main([*words.split(), *given, "--json", "/proc/x.json"]) == 1
    assert "/proc/x.json could not be written" in capfd.readouterr().err
