"""`hscache status`: both sides of a cache as their files tell it, alive or dead."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cache_maker import make_cache

from hscache import layout, run_files
from hscache.cli import main
from hscache.freeing import free_shard
from hscache.producers import Producer
from hscache.reader import open_cache
from hscache.status import _rate, bar, look, watch


@pytest.fixture
def partial(tmp_path):
    """A cache of which three shards are made."""
    make_cache(tmp_path / "cache", num_documents=60, only_shards=3)
    return tmp_path / "cache"


def show(capsys, folder, *flags) -> str:
    assert main(["status", str(folder), *flags]) == 0
    return capsys.readouterr().out


def consume(cache_dir: Path, run_dir: Path, *, ticks: int = 2, owner=None) -> Path:
    """Write what a following trainer would, as the process that runs this test."""
    with Producer(cache_dir):  # knows how a process is named
        [record] = layout.producers_dir(cache_dir).glob("*.json")
        owner = owner or json.loads(record.read_bytes())["owner"]
    folder = cache_dir / "consumers"
    folder.mkdir(exist_ok=True)
    progress = {"passes": 2, "stride": 1, "num_ticks": 10, "ticks": ticks}
    file = folder / "run-a.json"
    file.write_text(json.dumps({"owner": owner, "run_dir": str(run_dir), "progress": progress}))
    return file


def log_step(run_dir: Path, **values) -> None:
    run_dir.mkdir(exist_ok=True)
    line = {"step": 7, "train/tokens": 900, "perf/tokens_per_s": 120.0, "perf/data_wait": 0.0}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line, **values}) + "\n")


def test_produced_tokens_are_those_of_the_published_shards(partial, capsys):
    cache = open_cache(partial)
    tokens = sum(cache.shard_manifest(shard).num_tokens for shard in range(3))
    text = show(capsys, partial)
    assert f"{tokens:,} of {cache.plan.num_tokens:,} tokens, 3 of {cache.plan.num_shards}" in text
    assert "nobody produces" in text
    assert "nobody works on it" in text
    stored = sum(cache.shard_manifest(shard).stored_bytes for shard in range(3))
    assert look(cache).disk_bytes == pytest.approx(stored, rel=0.02)


def test_a_cache_without_a_shard_yet_is_shown(tmp_path, capsys):
    make_cache(tmp_path / "cache", only_shards=0)
    assert "not started" in show(capsys, tmp_path / "cache")


def test_a_finished_cache_says_so(tmp_path, capsys):
    make_cache(tmp_path / "cache")
    text = show(capsys, tmp_path / "cache", "--watch")  # ends by itself
    assert "all is produced" in text
    assert "nothing is left to produce" in text


def test_producers_are_alive_or_dead(partial, capsys):
    with Producer(partial) as producer:
        producer.report(tokens=1234, shards=3, claim=3)
        [record] = layout.producers_dir(partial).glob("*.json")
        dead = json.loads(record.read_bytes())
        dead["owner"]["start_ticks"] = -1
        (record.parent / "dead-1-x.json").write_text(json.dumps(dead))
        text = show(capsys, partial)
        assert re.search(rf"{record.stem} +producing +3 +3 +1,234", text)
        assert re.search(r"dead-1-x +DEAD", text)
        assert "a dead producer's shard is made by another" in text
        assert re.search(r"limit +the target$", text, re.M)


def test_the_side_that_is_waited_for_is_the_limit(partial, tmp_path, capsys):
    log_step(tmp_path / "run", **{"perf/data_wait": 0.4})
    consume(partial, tmp_path / "run")
    text = show(capsys, partial)
    assert "nobody produces, and training waits 40% of the time" in text
    assert re.search(r"run-a +training +2 of 10 +7 +120 +40.0%", text)
    with Producer(partial):
        assert "the target: training waits 40%" in show(capsys, partial)
        log_step(tmp_path / "run", **{"perf/data_wait": 0.001})
        assert "the trainer, which never waits" in show(capsys, partial)


def test_a_consumer_that_is_gone_or_done_is_named_so(partial, tmp_path, capsys):
    file = consume(partial, tmp_path / "run")
    record = json.loads(file.read_text())
    record["owner"]["start_ticks"] = -1
    file.write_text(json.dumps(record))
    assert re.search(r"run-a +not running +2 of 10", show(capsys, partial))
    consume(partial, tmp_path / "run", ticks=10)
    assert re.search(r"run-a +finished +10 of 10", show(capsys, partial))


def test_freed_shards_count_as_produced_and_take_no_disk(partial):
    before = look(open_cache(partial))
    for name in ("doc_rows", "exponent"):
        for file in (layout.shard_dir(partial, 2) / name).iterdir():
            file.unlink()
        (layout.shard_dir(partial, 2) / name).rmdir()
    after = look(open_cache(partial))
    assert (after.freed, after.published) == (1, 3)
    assert after.produced_tokens == before.produced_tokens
    assert after.disk_bytes < before.disk_bytes


def test_freeing_a_shard_is_not_publishing_one(partial):
    for shard in range(3):
        os.utime(layout.shard_dir(partial, shard) / "zarr.json", (1000, 1000))
    free_shard(open_cache(partial), 2, ["run"])
    status = look(open_cache(partial))
    assert status.freed == 1
    assert status.stopped_s > 1e6


def test_the_rate_is_tokens_over_the_time_from_first_start_to_last_end():
    class Made:
        num_tokens = 1000

        def __init__(self, seconds, finished):
            self.provenance = {"seconds": seconds, "finished": finished}

    # two producers at once: 0-10 s and 5-20 s
    assert _rate([Made(10, "2026-12-01T00:00:10Z"), Made(15, "2026-12-01T00:00:20Z")]) == 100
    assert _rate([]) is None


def test_watching_ends_when_nothing_is_left(capsys, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    texts = iter([("one", False), ("two", True)])
    watch(lambda: next(texts), 3.0)
    assert capsys.readouterr().out == "one\n\ntwo\n\n"
    assert waits == [3.0]


def test_ctrl_c_ends_watching_quietly(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    watch(lambda: ("text", False), 1.0)


def test_a_bar_is_as_full_as_its_share():
    assert bar(0.5, 4) == "██░░"
    assert bar(2.0, 4) == "████"


def test_the_end_of_metrics_is_read_without_half_a_line(tmp_path):
    log_step(tmp_path / "run", step=8)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "eval/documents": 3, "eval/sequential": 1.5}\n{"step": 9, "tra')
    step, look = run_files.last_metrics(tmp_path / "run")
    assert (step["step"], look["eval/sequential"]) == (8, 1.5)
    assert run_files.last_metrics(tmp_path) == ({}, {})


def test_nothing_is_written_and_torch_is_not_needed(partial):
    def all_files():
        return {p: p.stat().st_mtime_ns for p in partial.rglob("*")}

    before = all_files()
    code = (
        "import sys; from hscache.cli import main\n"
        f"assert main(['status', {str(partial)!r}]) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=root)
    assert all_files() == before
