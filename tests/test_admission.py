"""Which shard a producer may start, and what it frees, against real caches and heartbeats."""

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from cache_maker import make_identity
from trainer_cache import documents, fill_disk, random_bits, small_disk
from trainer_cache import publish as write_shard

from hscache import budget, files, layout
from hscache.admission import Admission
from hscache.cli import main as hscache
from hscache.config import DataConfig, ProduceConfig, TargetConfig
from hscache.consumers import Progress, Registration, consumer_name, read_consumers
from hscache.errors import (
    CacheIncompleteError,
    ConfigError,
    DiskFullError,
    HscacheError,
    ShardCorruptError,
)
from hscache.freeing import free_shard, freed_shards
from hscache.inspect import describe_cache, look_at
from hscache.manifest import WindowIdentity, encode_group
from hscache.plan import deal_into_shards, write_plan
from hscache.prepare import make_cache_folder
from hscache.producers import Producer, read_record
from hscache.reader import open_cache
from hscache.status import limit_in_words, look
from hscache.verify import verify
from hscache.window import visit_stride
from hscache.zarr_array import canonical_json, checksum_hex

CORPUS = documents([30] * 30, held_out=(0, 1))
WINDOW = WindowIdentity(shards=2, passes=2, reserve=1)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("hscache.admission._WAIT_S", 0.001)


@pytest.fixture
def cache(tmp_path):
    """Shard 0 is held out, 1 to 7 are for training; none is there yet."""
    return begin(tmp_path / "cache")


def begin(folder):
    layout.shards_dir(folder).mkdir(parents=True)
    shards = deal_into_shards(CORPUS, 120, seed=0)
    identity = make_identity(
        CORPUS, shards, shard_tokens=120, target_layer_ids=(0, 2), hidden_size=32
    )
    identity = dataclasses.replace(identity, window=WINDOW)
    write_plan(folder, CORPUS, shards, {})
    files.create_once(layout.root_file(folder), encode_group(identity))
    return open_cache(folder)


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def publish(cache, shard):
    rows = cache.plan.shard_documents(shard)
    by_row = {row: cache.plan.source_rows[row] for row in rows}
    write_shard(cache.path, shard, cache.identity, by_row, CORPUS, lambda r, n: random_bits(n, r))


def fill(cache, admission):
    """Publish all that may be started."""
    made = []
    while (shard := admission.next_shard()) is not None:
        publish(cache, shard)
        made.append(shard)
    return made


def follower(cache, run_dir, ticks=0, **changes):
    num_shards = len(cache.plan.training_shards)
    stride = visit_stride(WINDOW.shards, num_shards, WINDOW.passes)
    progress = Progress(
        passes=2, stride=stride, num_ticks=num_shards + stride, ticks=ticks, **changes
    )
    return Registration(cache.path, run_dir, progress)


def admission_of(cache, producer, disk=None):
    return Admission(cache, producer, lambda: None, disk)


def on_disk(cache):
    return [s for s in cache.published_shards() if cache.shard_manifest(s).state != "freed"]


def test_a_window_pauses_frees_what_all_are_done_with_and_goes_on(cache, tmp_path, caplog):
    caplog.set_level("INFO")
    with Producer(cache.path) as producer:
        admission = admission_of(cache, producer)
        assert fill(cache, admission) == [0, 1, 2, 3]  # held out, then W + reserve
        admission.wait()
        assert "the window is full (shards 1 to 3" in caplog.text
        assert "nobody has registered to read them" in caplog.text
        with follower(cache, tmp_path / "a") as a, follower(cache, tmp_path / "b") as b:
            assert fill(cache, admission) == []
            a.acknowledge(dataclasses.replace(a.progress, ticks=3))  # shards 1, 2 twice
            assert fill(cache, admission) == []  # b has not
            assert on_disk(cache) == [0, 1, 2, 3]
            b.acknowledge(dataclasses.replace(b.progress, ticks=2))
            assert fill(cache, admission) == [4]
            assert "there is room again" in caplog.text
            assert on_disk(cache) == [0, 2, 3, 4]
            b.acknowledge(dataclasses.replace(b.progress, ticks=5))
            assert fill(cache, admission) == [5]
            b.acknowledge(dataclasses.replace(b.progress, ticks=8))
            a.acknowledge(dataclasses.replace(a.progress, ticks=8))
            assert fill(cache, admission) == [6, 7]
            assert cache.published_shards() == list(range(8))
            assert on_disk(cache) == [0]


def test_a_tombstone_keeps_what_was_counted_and_is_not_made_again(cache, capsys):
    with Producer(cache.path) as producer:
        fill(cache, admission_of(cache, producer))
        before = cache.shard_manifest(1)
        free_shard(cache, 1, ["a"])
        manifest = cache.shard_manifest(1)
        assert dataclasses.replace(manifest, state="published", provenance={}) == (
            dataclasses.replace(before, provenance={})
        )
        assert manifest.provenance["freed"]["acknowledged_by"] == ["a"]
        where = layout.shard_dir(cache.path, 1)
        assert [path.name for path in where.iterdir()] == ["zarr.json"]
        assert hscache(["verify", str(cache.path), "--deep"]) == 1  # it has no frozen parts
        said = "4 of 8 shards published, 1 of them freed and no longer there to be checked"
        assert said in capsys.readouterr().out
        assert hscache(["verify", str(cache.path), "--dry-run"]) == 0
        assert "would check 3 shards" in capsys.readouterr().out
        assert budget.used_bytes(where) <= budget.attributes_bound(
            budget.ShardShape.of(cache.identity), 4
        )
        assert fill(cache, admission_of(cache, producer)) == [4]
    with pytest.raises(CacheIncompleteError, match="000001 has been freed"):
        open_cache(cache.path).shard(1)
    assert {damage.part for damage in verify(cache, deep=True)} == {"frozen"}  # it has none
    assert "freed" in describe_cache(cache, [look_at(cache, s) for s in cache.published_shards()])


def test_what_a_producer_killed_while_freeing_left_is_deleted(cache, monkeypatch):
    with Producer(cache.path) as producer:
        fill(cache, admission_of(cache, producer))
        with monkeypatch.context() as patch:
            patch.setattr("hscache.freeing.delete_arrays", lambda *_: None)
            free_shard(cache, 1, [])
        assert (layout.shard_dir(cache.path, 1) / "exponent").exists()
        admission_of(cache, producer)
        assert not (layout.shard_dir(cache.path, 1) / "exponent").exists()


def test_a_dead_producers_claim_and_bytes_are_taken_over_while_the_disk_is_full(cache, caplog):
    caplog.set_level("INFO")
    bound = budget.plan_shard_bound(cache.plan, cache.identity, 1)
    with Producer(cache.path) as producer:
        first = admission_of(cache, producer)
        for _ in range(2):
            publish(cache, first.next_shard())
        # A neighbour holds shard 2, the lowest that is missing, and has written almost all of it.
        [path] = layout.producers_dir(cache.path).glob("*.json")
        neighbour = path.with_name("box-1-abc.json")
        record = {**read_record(path), "claim": 2, "started": True}
        neighbour.write_text(json.dumps(record))
        temporary = layout.shards_dir(cache.path) / ".tmp-box-1-abc-0"
        temporary.mkdir()
        (temporary / "exponent").write_bytes(b"x" * (bound - 9000))
        disk = budget.used_bytes(cache.path) + 9000
        admission = admission_of(cache, producer, disk)
        assert admission.next_shard() is None  # shard 3 has no room beside shard 2
        admission.wait()
        assert "max_disk is reached" in caplog.text
        assert read_record(path)["claim"] is None
        owner = {**record["owner"], "pid": dead_pid()}
        neighbour.write_text(json.dumps({**record, "owner": owner}))
        assert admission.next_shard() == 2
        assert not temporary.exists()
        assert not neighbour.exists()


def test_damaged_attributes_of_the_lowest_shard_hold_its_window_until_all_have_skipped_it(
    cache, tmp_path, caplog, capsys
):
    with Producer(cache.path) as producer, follower(cache, tmp_path / "a") as a:
        admission = admission_of(cache, producer)
        fill(cache, admission)
        (layout.shard_dir(cache.path, 1) / "zarr.json").write_bytes(b"{}")
        assert fill(cache, admission) == []
        assert admission.next_shard() is None
        assert caplog.text.count("shard 1 is in the way of its window until it is repaired") == 1
        a.acknowledge(dataclasses.replace(a.progress, ticks=3))
        assert fill(cache, admission) == [4, 5]
        assert on_disk(cache) == [0, 3, 4, 5]
        tombstone = cache.shard_manifest(1)
        assert tombstone.num_tokens == 120
        assert "does not match its checksum" in tombstone.provenance["damaged"]
        assert tombstone.provenance["freed"]["acknowledged_by"] == [a.name]
    assert freed_shards(cache) == [1, 2]
    assert {damage.part for damage in verify(cache, deep=True)} == {"frozen"}  # it has none
    assert hscache(["inspect", str(cache.path)]) == 0
    assert " 1  freed" in capsys.readouterr().out


def test_a_damaged_shard_that_is_repaired_meanwhile_is_made_again(cache, tmp_path):
    with Producer(cache.path) as producer, follower(cache, tmp_path / "a") as a:
        admission = admission_of(cache, producer)
        fill(cache, admission)
        a.acknowledge(dataclasses.replace(a.progress, ticks=2))
        assert fill(cache, admission) == [4]
        for shard in (1, 2):  # a tombstone, and the lowest shard
            (layout.shard_dir(cache.path, shard) / "zarr.json").write_bytes(b"{}")
        assert freed_shards(cache) == []
        assert hscache(["repair", str(cache.path)]) == 1  # and it has no frozen parts
        assert not cache.is_published(2)
        assert fill(cache, admission) == [1, 2]
        assert on_disk(cache) == [0, 2, 3, 4]  # 1 is freed again at once
        admission._clean()
        assert cache.shard(2).check_files() is None


def test_nothing_is_freed_through_a_link(cache, tmp_path):
    """Deleting what it points to would harm what is no part of the cache."""
    with Producer(cache.path) as producer, follower(cache, tmp_path / "a") as a:
        admission = admission_of(cache, producer)
        fill(cache, admission)
        elsewhere = layout.shard_dir(cache.path, 1).rename(tmp_path / "elsewhere")
        layout.shard_dir(cache.path, 1).symlink_to(elsewhere)
        before = sorted(elsewhere.rglob("*"))
        a.acknowledge(dataclasses.replace(a.progress, ticks=3))
        with pytest.raises(ShardCorruptError, match="000001"):
            admission.next_shard()
        assert sorted(elsewhere.rglob("*")) == before


def test_a_lower_claim_is_waited_for_and_a_higher_one_only_once_it_is_written(cache):
    with Producer(cache.path) as producer:
        admission_of(cache, producer).next_shard()
        publish(cache, 0)
        [path] = layout.producers_dir(cache.path).glob("*.json")
        neighbour = path.with_name("box-1-abc.json")
        record = {**read_record(path), "claim": 2, "started": False}
        neighbour.write_text(json.dumps(record))
        bound = budget.plan_shard_bound(cache.plan, cache.identity, 1)
        disk = budget.used_bytes(cache.path) + bound + bound // 2
        admission = admission_of(cache, producer, disk)
        assert admission.next_shard() == 1  # the lower one has precedence
        neighbour.write_text(json.dumps({**record, "started": True}))
        assert admission.next_shard() is None


def test_room_for_checkpoints_on_the_same_filesystem_is_kept(cache, tmp_path, caplog):
    caplog.set_level("INFO")
    free = budget.free_bytes(cache.path)
    with Producer(cache.path) as producer:
        admission = admission_of(cache, producer, 10**15)
        with follower(cache, tmp_path / "a", checkpoint_bytes=2 * free):
            assert admission.next_shard() is None
            admission.wait()
        assert "the disk is full" in caplog.text
        assert "and checkpoints" in caplog.text
        with follower(cache, tmp_path / "a"):
            assert admission.next_shard() == 0


def test_missing_inodes_are_named(cache, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(budget, "free_inodes", lambda where: 40)
    with Producer(cache.path) as producer:
        admission = admission_of(cache, producer, 10**15)
        assert admission.next_shard() is None
        admission.wait()
    assert "40 inodes are free" in caplog.text


def test_another_program_that_fills_the_disk_makes_a_pause_within_a_shard(cache, monkeypatch):
    left = iter([0, 0, 10**9])
    monkeypatch.setattr(budget, "free_bytes", lambda where: next(left))
    polls = []
    with Producer(cache.path) as producer:
        Admission(cache, producer, lambda: polls.append(1), 10**15).poll()
    assert len(polls) == 3
    assert next(left, None) is None


def test_a_full_disk_ends_neither_side_and_both_go_on_when_there_is_room(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.setattr("hscache.consumers.BEAT_S", 0.02)
    with small_disk(tmp_path / "disk", "2m"):
        cache = begin(tmp_path / "disk" / "cache")
        with Producer(cache.path) as producer, follower(cache, tmp_path / "a") as a:
            admission = admission_of(cache, producer, 10**6)
            assert fill(cache, admission) == [0, 1, 2, 3]
            a.acknowledge(dataclasses.replace(a.progress, ticks=2))
            filler = fill_disk(tmp_path / "disk")
            assert admission.next_shard() is None  # shard 1 cannot have its tombstone
            admission.wait()
            assert "the disk is full: shard 1 is done with" in caplog.text
            admission.free_what_is_done()
            a.acknowledge(dataclasses.replace(a.progress, ticks=3))
            time.sleep(0.1)
            assert caplog.text.count("the producer cannot be told") == 1
            assert [c.progress.ticks for c in read_consumers(cache.path)] == [2]
            assert on_disk(cache) == [0, 1, 2, 3]
            assert {d.part for d in verify(cache, deep=True)} == {"frozen"}  # it has none
            filler.unlink()
            while [c.progress.ticks for c in read_consumers(cache.path)] == [2]:
                time.sleep(0.01)
            assert fill(cache, admission) == [4, 5]
            assert on_disk(cache) == [0, 3, 4, 5]
        assert "the producer knows of the last checkpoint now" in caplog.text


def test_a_follower_that_leaves_without_having_been_heard_says_so(tmp_path, caplog):
    with small_disk(tmp_path / "disk", "1m"):
        cache = begin(tmp_path / "disk" / "cache")

        def unheard(error):
            with follower(cache, tmp_path / "a") as a:
                fill_disk(tmp_path / "disk")
                a.acknowledge(dataclasses.replace(a.progress, ticks=2))
                if error:
                    raise error

        with pytest.raises(DiskFullError, match="consumers/"):
            unheard(None)
        (tmp_path / "disk" / "filler").unlink()
        with pytest.raises(KeyError):  # the first error counts
            unheard(KeyError)
        assert "the producer does not know of the last checkpoint" in caplog.text


def test_who_vanishes_is_named_at_once_and_the_reason_is_kept_fresh(cache, tmp_path, caplog):
    caplog.set_level("INFO")
    with Producer(cache.path) as producer:
        admission = admission_of(cache, producer)
        fill(cache, admission)
        admission.wait()
        assert "nobody has registered" in caplog.text
        with follower(cache, tmp_path / "a") as a:
            assert fill(cache, admission) == []
            admission.wait()  # of the same kind, so it is not said again yet
            assert a.name not in caplog.text
            assert "nobody has registered" in limit_in_words(look(cache))
            producer.report()  # the next heartbeat
            assert f"it waits for {a.name}" in limit_in_words(look(cache))
        bury(layout.consumers_dir(cache.path) / f"{a.name}.json")
        assert fill(cache, admission) == []
        admission.wait()
        assert f"{a.name} (0 of 7 shards acknowledged, not running" in caplog.text
        assert f"resume {a.name}, or start" in limit_in_words(
            dataclasses.replace(look(cache), producers=[])
        )


def test_commands_are_quoted_for_the_shell(tmp_path, caplog, capsys):
    """A folder with a space in it would be two."""
    caplog.set_level("INFO")
    cache = begin(tmp_path / "my cache")

    def commands(text):
        return [shlex.split(command) for command in text.split("`")[1::2]]

    with Producer(cache.path) as producer:
        admission = admission_of(cache, producer)
        fill(cache, admission)
        admission.wait()
        assert ["trainer", "fit", "--follow", "--shards", str(cache.path)] in commands(caplog.text)
        with follower(cache, tmp_path / "a"):
            pass
        bury(layout.consumers_dir(cache.path) / f"{consumer_name(tmp_path / 'a')}.json")
        fill(cache, admission)
        admission.wait()
        drop = ["hscache", "consumers", str(cache.path), "--drop", "NAME"]
        assert drop in commands(caplog.text)
    (layout.shard_dir(cache.path, 1) / "zarr.json").write_bytes(b"{}")
    assert hscache(["verify", str(cache.path), "--deep"]) == 1
    repair = ["hscache", "repair", str(cache.path), "--deep"]
    assert repair in commands(capsys.readouterr().out)


def bury(path):
    """Let a consumer's entry be that of a process that has died."""
    record = json.loads(path.read_text())
    del record["crc32c"]
    record["owner"]["pid"] = dead_pid()
    path.write_bytes(canonical_json({**record, "crc32c": checksum_hex(canonical_json(record))}))


def test_a_resumed_run_is_the_same_consumer_and_a_dropped_one_holds_nothing(
    cache, tmp_path, capsys
):
    run_dir = tmp_path / "my run!"
    with follower(cache, run_dir, 1) as one:
        name = one.name
        assert name == consumer_name(run_dir)
        assert name.startswith("my_run-")
        [found] = read_consumers(cache.path)
        assert found.alive
        assert not found.finished
        assert hscache(["consumers", str(cache.path), "--drop", name]) == 2
        assert "is running" in capsys.readouterr().err
    record = json.loads((layout.consumers_dir(cache.path) / f"{name}.json").read_text())
    with follower(cache, run_dir, 2):
        assert [c.progress.ticks for c in read_consumers(cache.path)] == [2]
    assert record["progress"]["ticks"] == 1
    assert hscache(["consumers", str(cache.path), "--drop", "nobody"]) == 2
    assert f"registered: {name}" in capsys.readouterr().err


def test_the_command_lists_and_drops_vanished_consumers_only_when_told(cache, tmp_path, capsys):
    with follower(cache, tmp_path / "a", 3):
        pass
    path = layout.consumers_dir(cache.path) / f"{consumer_name(tmp_path / 'a')}.json"
    bury(path)
    assert hscache(["consumers", str(cache.path)]) == 0
    text = capsys.readouterr().out
    assert "not running" in text
    assert "2 of 7" in text
    assert "--drop NAME" in text
    assert path.exists()
    assert hscache(["consumers", str(cache.path), "--drop", path.stem, "--dry-run"]) == 0
    assert path.exists()
    assert hscache(["consumers", str(cache.path), "--drop", path.stem]) == 0
    assert not path.exists()
    assert "nobody is registered" in capsys.readouterr().out


def test_a_read_only_cache_is_neither_produced_to_nor_rid_of_a_consumer(tmp_path, capsys):
    with small_disk(tmp_path / "disk", "1m"):
        cache = begin(tmp_path / "disk" / "cache")
        with follower(cache, tmp_path / "a") as a:
            pass
        bury(layout.consumers_dir(cache.path) / f"{a.name}.json")
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        assert hscache(["consumers", str(cache.path), "--drop", a.name]) == 1
        said = capsys.readouterr().err
        assert f"cannot delete {cache.path}" in said
        assert "not mounted read-only" in said
        with pytest.raises(HscacheError, match=r"cannot write to .* give another --shard-dir"):
            make_cache_folder(cache.path)


def test_a_cache_that_is_deleted_meanwhile_ends_both_sides_in_words(cache, tmp_path):
    with Producer(cache.path) as producer, follower(cache, tmp_path / "a") as a:
        admission = admission_of(cache, producer)
        fill(cache, admission)
        shutil.rmtree(layout.consumers_dir(cache.path))  # by hand: it is there again
        a.acknowledge(dataclasses.replace(a.progress, ticks=1))
        assert [c.progress.ticks for c in read_consumers(cache.path)] == [1]
        shutil.rmtree(cache.path)
        with pytest.raises(HscacheError, match="somebody deleted or moved this cache"):
            admission.next_shard()
        with pytest.raises(HscacheError, match=r"cannot register .*: No such file"):
            a.acknowledge(dataclasses.replace(a.progress, ticks=2))
        assert not layout.shards_dir(cache.path).exists()


def test_a_cache_that_cannot_be_written_refuses_to_be_followed(cache, tmp_path):
    layout.consumers_dir(cache.path).write_text("in the way")
    with pytest.raises(HscacheError, match="cannot register"), follower(cache, tmp_path / "a"):
        pass


def test_without_a_window_nothing_is_ever_freed(cache, tmp_path):
    whole = open_cache(cache.path)
    identity = dataclasses.replace(cache.identity, window=WindowIdentity())
    os.unlink(layout.root_file(cache.path))
    files.create_once(layout.root_file(cache.path), encode_group(identity))
    whole = open_cache(cache.path)
    with follower(whole, tmp_path / "a", 8), Producer(whole.path) as producer:
        assert fill(whole, admission_of(whole, producer)) == list(range(8))
    assert on_disk(whole) == list(range(8))


def test_settings_that_contradict_each_other_are_refused():
    def config(**changes):
        parts = {"target": TargetConfig(path="t"), "data": DataConfig(train=("a",))}
        return ProduceConfig(shard_dir="x", **parts, **changes)

    for changes, words in (
        ({"passes": 6}, "only --retain window"),
        ({"reserve": 6}, "only --retain window"),
        ({"retain": "window"}, "needs max_disk and passes"),
        ({"retain": "window", "max_disk": "2TB"}, "needs max_disk and passes"),
        ({"retain": "window", "max_disk": "2TB", "passes": 0}, "at least 1"),
        ({"max_disk": "much"}, "a size such as 4TB"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(**changes)


@pytest.mark.parametrize(
    "garbage", [b"", b"{", b"[1]", b"\x00" * 40, b'{"crc32c": "00000000"}', None]
)
def test_a_damaged_entry_frees_nothing_and_ends_nothing(cache, tmp_path, caplog, garbage):
    with Producer(cache.path) as producer:
        admission = admission_of(cache, producer)
        with follower(cache, tmp_path / "a") as a, follower(cache, tmp_path / "b", ticks=3):
            path = layout.consumers_dir(cache.path) / f"{a.name}.json"
            edited = path.read_bytes().replace(b'"ticks":0', b'"ticks":9')
            path.write_bytes(edited if garbage is None else garbage)
            assert fill(cache, admission) == [0, 1, 2, 3]
            admission.wait()
            admission.wait()
            assert on_disk(cache) == [0, 1, 2, 3]  # though b has said it is done with one
            waiting = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
            assert len(waiting) == 1
            assert str(path) in waiting[0]
            assert "resume it" in waiting[0]
            admission.free_what_is_done()
            assert on_disk(cache) == [0, 1, 2, 3]
            a.acknowledge(dataclasses.replace(a.progress, ticks=3))
            assert fill(cache, admission) == [4, 5]
