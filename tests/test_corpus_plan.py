"""The plan is made once: by one of several producers, and never again for the same files."""

import gzip
import logging
import shutil
import subprocess
import sys
import threading
import time

import pytest
from conftest import byte_tokenizer, conversation, write_jsonl
from producer import array_hashes

from hscache import corpus_plan, layout
from hscache.config import DataConfig, ProduceConfig, StoreConfig, TargetConfig
from hscache.corpus_plan import make_plan, preview
from hscache.errors import CacheMismatchError, DataError
from hscache.plan import Plan

TOKENIZER = byte_tokenizer()


@pytest.fixture
def rows(tmp_path):
    found = [conversation(f"{i}?", f"answer {i % 23}") for i in range(60)]
    return write_jsonl(tmp_path / "rows.jsonl", found)


def config_of(folder, rows, *, seed=0, shard_tokens=200, **data) -> ProduceConfig:
    return ProduceConfig(
        shard_dir=folder,
        target=TargetConfig(path="none"),
        data=DataConfig(train=(str(rows),), held_out_fraction=0.2, **data),
        store=StoreConfig(shard_tokens=shard_tokens, seed=seed),
    )


def plan_of(config):
    return make_plan(config, TOKENIZER, lambda _: None)


def refuse(*args):
    raise AssertionError("tokenised again")


def test_a_plan_of_the_same_files_and_settings_is_not_made_again(tmp_path, rows, monkeypatch):
    config = config_of(tmp_path / "cache", rows)
    made = plan_of(config)
    plan = Plan(tmp_path / "cache")
    assert (made.content.num_tokens, made.longest) == (plan.num_tokens, plan.lengths.max())
    assert made.content.num_held_out_shards == len(plan.held_out_shards) > 0
    hashes = array_hashes(tmp_path / "cache")
    assert not layout.tokens_dir(tmp_path / "cache").exists()
    monkeypatch.setattr(corpus_plan, "load_corpus", refuse)
    moved = shutil.copy(rows, tmp_path / "moved.jsonl")
    free = config_of(tmp_path / "cache", moved, workers=3, min_supervised_share=0.2)
    for known in (plan_of(config), plan_of(free), preview(config, TOKENIZER)):
        assert known == made
    assert array_hashes(tmp_path / "cache") == hashes
    with pytest.raises(DataError, match=r"supervised_share is 90\.00%"):
        plan_of(config_of(tmp_path / "cache", rows, min_supervised_share=0.9))


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"shard_tokens": 300}, {"max_tokens": 25}, {"max_documents": 50}]
)
def test_a_plan_of_other_settings_is_refused_and_nothing_is_left(tmp_path, rows, change):
    folder = tmp_path / "cache"
    plan_of(config_of(folder, rows))
    hashes = array_hashes(folder)
    with pytest.raises(CacheMismatchError, match=f"Delete {folder / 'plan'} and run"):
        plan_of(config_of(folder, rows, **change))
    assert array_hashes(folder) == hashes
    assert not layout.tokens_dir(folder).exists()


def test_other_files_of_the_same_rows_are_the_same_corpus(tmp_path, rows):
    made = plan_of(config_of(tmp_path / "cache", rows))
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    assert plan_of(config_of(tmp_path / "cache", packed)) == made


def test_tokens_of_other_settings_are_deleted_and_those_of_a_refused_share_kept(tmp_path, rows):
    folder = tmp_path / "cache"
    parts = {}
    for share, max_tokens in ((0.9, 4096), (0.8, 4096), (0.9, 30)):
        with pytest.raises(DataError, match="supervised"):
            plan_of(config_of(folder, rows, min_supervised_share=share, max_tokens=max_tokens))
        [part] = layout.tokens_dir(folder).glob("*/*.npz")
        parts[share, max_tokens] = part, part.stat().st_mtime_ns
    assert parts[0.9, 4096] == parts[0.8, 4096]
    assert parts[0.9, 4096] != parts[0.9, 30]
    plan_of(config_of(folder, rows, max_tokens=30))
    assert {path.name for path in folder.iterdir()} == {"plan"}


def test_leftovers_of_a_run_killed_after_the_plan_are_deleted(tmp_path, rows, monkeypatch):
    config = config_of(tmp_path / "cache", rows)
    plan_of(config)
    layout.tokens_dir(config.shard_dir).mkdir()
    (layout.tokens_dir(config.shard_dir) / "lock").touch()
    monkeypatch.setattr(corpus_plan, "load_corpus", refuse)
    plan_of(config)
    assert not layout.tokens_dir(config.shard_dir).exists()


def test_a_producer_waits_and_says_for_whom_until_the_other_dies(
    tmp_path, rows, monkeypatch, caplog
):
    monkeypatch.setattr(corpus_plan, "_WAIT_S", 0.01)
    monkeypatch.setattr(corpus_plan, "_SAY_EVERY_S", 0.05)
    folder = tmp_path / "cache"
    lock = layout.tokens_dir(folder) / "lock"
    lock.parent.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys, time\nfile = open(sys.argv[1], 'a')\n"
         "fcntl.flock(file, fcntl.LOCK_EX)\nprint('gpu1-7', file=file, end='', flush=True)\n"
         "print(flush=True)\ntime.sleep(999)", str(lock)],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    holder.stdout.readline()
    with caplog.at_level(logging.INFO):
        thread = threading.Thread(target=plan_of, args=(config_of(folder, rows),))
        thread.start()
        while caplog.text.count("waiting for gpu1-7 to tokenize the corpus: 0 ranges") < 3:
            assert thread.is_alive()
        assert not layout.plan_dir(folder).exists()
        holder.kill()
        holder.communicate()
        thread.join()
    assert Plan(folder).num_documents > 0
    assert not lock.exists()


def test_of_several_producers_one_tokenises_and_all_go_on(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(corpus_plan, "_WAIT_S", 0.01)
    calls, found, load_corpus = [], [], corpus_plan.load_corpus

    def counted(*args):
        calls.append(args)
        return load_corpus(*args)

    monkeypatch.setattr(corpus_plan, "load_corpus", counted)
    config = config_of(tmp_path / "cache", rows)
    threads = [
        threading.Thread(target=lambda: found.append(plan_of(config)), daemon=True)
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(found) == 6
    assert all(one == found[0] for one in found)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"plan"}


def test_producers_that_waited_for_one_that_is_refused_are_refused_like_it(
    tmp_path, rows, monkeypatch
):
    monkeypatch.setattr(corpus_plan, "_WAIT_S", 0.01)
    load_corpus, folder = corpus_plan.load_corpus, tmp_path / "cache"
    plan_of(config_of(folder, rows))
    all_started, errors, at_work = threading.Barrier(4), [], threading.Lock()

    def alone(*args):
        assert at_work.acquire(blocking=False), "two producers tokenise at once"
        time.sleep(0.1)  # the others come to wait
        corpus = load_corpus(*args)
        at_work.release()
        return corpus

    def start():
        all_started.wait()
        with pytest.raises(CacheMismatchError) as refused:
            plan_of(config_of(folder, rows, seed=1))
        errors.append(str(refused.value))

    monkeypatch.setattr(corpus_plan, "load_corpus", alone)
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert len(set(errors)) == 1
    assert not layout.tokens_dir(folder).exists()
