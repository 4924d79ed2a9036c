"""Heartbeats, claims, and whose leftovers may be deleted."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cache_maker import make_cache
from forked import context
from trainer_cache import fill_disk, small_disk

from hscache import files, layout, producers
from hscache.producers import STALE_S, Producer, clean_leftovers, is_alive, read_record

DEAD_NAME = "otherbox-4242-0123abcd"


@pytest.fixture
def cache_dir(tmp_path):
    layout.shards_dir(tmp_path).mkdir()
    return tmp_path


def neighbour(cache_dir, **changes):
    """A second producer's heartbeat file: that of this process, changed."""
    with Producer(cache_dir):
        [path] = layout.producers_dir(cache_dir).glob("*.json")
        record = read_record(path)
    other = path.with_name(f"{DEAD_NAME}.json")
    other.write_text(json.dumps({**record, **changes}))
    return other


def dead_owner():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def make_temporaries(cache_dir, owner):
    folder = layout.shards_dir(cache_dir) / f".tmp-{owner}-7"
    (folder / "exponent").mkdir(parents=True)
    (folder / "exponent" / "c.0.0.0").write_bytes(b"half")
    file = cache_dir / f".tmp-{owner}-3"
    file.write_bytes(b"half")
    return [folder, file]


def test_a_heartbeat_lives_as_long_as_the_producer(cache_dir):
    with Producer(cache_dir) as producer:
        [path] = layout.producers_dir(cache_dir).iterdir()
        record = read_record(path)
        assert record is not None
        assert is_alive(path, record)
        assert record["claim"] is None
        producer.report(tokens=17)
        assert json.loads(path.read_text())["tokens"] == 17
    assert not list(layout.producers_dir(cache_dir).iterdir())


def test_a_producer_on_a_full_disk_is_not_taken_for_dead(tmp_path):
    with small_disk(tmp_path / "disk", "64k"), Producer(tmp_path / "disk") as producer:
        [path] = layout.producers_dir(tmp_path / "disk").iterdir()
        fill_disk(tmp_path / "disk")
        os.utime(path, (0, 0))
        producer.report(tokens=17)
        assert time.time() - path.stat().st_mtime < STALE_S
        assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_lowest_free_shard_is_claimed(tmp_path):
    make_cache(tmp_path, only_shards=2)
    other = neighbour(tmp_path, claim=2)
    with Producer(tmp_path) as producer:
        assert producer.claim_next(6) == 3
        assert producer.claim_next(3) is None
        other.unlink()
        assert producer.claim_next(6) == 2


def test_claims_of_the_dead_are_taken_over(cache_dir):
    other = neighbour(cache_dir, claim=0)
    record = read_record(other)
    owner = {**record["owner"], "pid": dead_owner()}
    other.write_text(json.dumps({**record, "owner": owner}))
    with Producer(cache_dir) as producer:
        assert producer.claim_next(2) == 0


def test_a_reused_pid_is_not_the_producer(cache_dir):
    other = neighbour(cache_dir)
    record = read_record(other)
    assert is_alive(other, record)
    record["owner"]["start_ticks"] -= 1
    assert not is_alive(other, record)


def test_a_zombie_is_dead(cache_dir):
    other = neighbour(cache_dir)
    record = read_record(other)
    process = subprocess.Popen(["sleep", "60"])
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    record["owner"].update(pid=process.pid, start_ticks=int(fields[19]))
    assert is_alive(other, record)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert not is_alive(other, record)
    process.wait()


def test_a_producer_elsewhere_is_given_up_after_a_silence(cache_dir):
    other = neighbour(cache_dir)
    record = read_record(other)
    record["owner"]["boot"] = "another machine"
    assert is_alive(other, record)
    long_ago = time.time() - STALE_S - 1
    os.utime(other, (long_ago, long_ago))
    assert not is_alive(other, record)


def test_a_clock_that_differs_from_the_file_servers_kills_nobody(cache_dir):
    other = neighbour(cache_dir)
    record = read_record(other)
    record["owner"]["boot"] = "another machine"
    other.write_text(json.dumps(record))
    left = make_temporaries(cache_dir, DEAD_NAME)
    server_s = time.time() - 10 * STALE_S
    with Producer(cache_dir):
        for path in layout.producers_dir(cache_dir).iterdir():
            os.utime(path, (server_s, server_s))
        assert is_alive(other, record)
        assert clean_leftovers(cache_dir) == []
    assert all(path.exists() for path in left)


def test_leftovers_of_the_dead_are_removed_and_nothing_else(tmp_path):
    make_cache(tmp_path)
    other = neighbour(tmp_path)
    record = read_record(other)
    record["owner"]["pid"] = dead_owner()
    other.write_text(json.dumps(record))
    left = make_temporaries(tmp_path, DEAD_NAME)
    kept = sorted(p for p in tmp_path.rglob("*") if p not in left and p.parent not in left)
    removed = clean_leftovers(tmp_path)
    assert sorted(removed) == sorted(path.name for path in left)
    after = sorted(tmp_path.rglob("*"))
    assert [p for p in kept if p != other and "exponent/c." not in str(p)] == [
        p for p in after if "exponent/c." not in str(p)
    ]
    assert not other.exists()


def test_leftovers_of_the_living_stay(cache_dir):
    other = neighbour(cache_dir)
    mine = make_temporaries(cache_dir, files.process_name())
    theirs = make_temporaries(cache_dir, DEAD_NAME)
    long_ago = time.time() - 10 * STALE_S
    for path in [*mine, *theirs]:
        os.utime(path, (long_ago, long_ago))
    with Producer(cache_dir):
        assert clean_leftovers(cache_dir) == []
    assert other.exists()
    assert all(path.exists() for path in [*mine, *theirs])


def test_leftovers_of_nobody_known_go_when_they_are_old(cache_dir):
    young = make_temporaries(cache_dir, "stranger-1-aa")
    old = make_temporaries(cache_dir, "stranger-2-bb")
    long_ago = time.time() - STALE_S - 1
    for path in old:
        os.utime(path, (long_ago, long_ago))
    clean_leftovers(cache_dir)
    assert all(path.exists() for path in young)
    assert not any(path.exists() for path in old)


def test_an_unreadable_heartbeat_is_nobody(cache_dir):
    other = neighbour(cache_dir)
    other.write_text("{ half")
    with Producer(cache_dir) as producer:
        assert producer.claim_next(1) == 0


def test_a_link_among_the_leftovers_is_removed_and_not_followed(cache_dir, tmp_path_factory):
    precious = tmp_path_factory.mktemp("precious")
    (precious / "data").write_text("keep")
    link = layout.shards_dir(cache_dir) / ".tmp-stranger-2-bb-0"
    link.symlink_to(precious)
    os.utime(link, (0, 0), follow_symlinks=False)
    clean_leftovers(cache_dir)
    assert not link.is_symlink()
    assert (precious / "data").read_text() == "keep"


def test_the_claim_of_a_stopped_process_is_taken_over_but_its_files_are_not(cache_dir):
    process = subprocess.Popen(["sleep", "60"])
    try:
        other = neighbour(cache_dir, claim=0)
        record = read_record(other)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        record["owner"].update(pid=process.pid, start_ticks=int(fields[19]))
        other.write_text(json.dumps(record))
        with Producer(cache_dir) as producer:
            assert producer.claim_next(1) is None
            assert "shard 0" in producer.claims_of_others()
            process.send_signal(signal.SIGSTOP)
            long_ago = time.time() - STALE_S - 1
            os.utime(other, (long_ago, long_ago))
            assert producer.claim_next(1) == 0
            clean_leftovers(cache_dir)
            assert other.exists()  # it may wake up; the rename then decides
    finally:
        process.kill()
        process.wait()


def claim_often(cache_dir, barrier, rounds, results):
    claimed = []
    with Producer(cache_dir) as producer:
        for _ in range(rounds):
            barrier.wait()
            shard = producer.claim_next(10_000)
            claimed.append(shard)
            barrier.wait()  # all have claimed
            layout.shard_dir(cache_dir, shard).mkdir(exist_ok=True)
    results.put(claimed)


def test_claims_at_the_same_moment_are_of_different_shards(cache_dir):
    server = context()
    barrier, results = server.Barrier(4), server.SimpleQueue()
    arguments = (cache_dir, barrier, 40, results)
    processes = [server.Process(target=claim_often, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    claimed = [shard for _ in processes for shard in results.get()]
    for process in processes:
        process.join()
    assert len(set(claimed)) == len(claimed) == 160


def test_a_claim_does_not_wait_long_for_a_stopped_producer(cache_dir, monkeypatch):
    monkeypatch.setattr(producers, "_CLAIM_S", 0.1)
    with Producer(cache_dir) as producer:
        held = os.open(layout.producers_dir(cache_dir), os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert producer.claim_next(1) == 0
        os.close(held)
