"""What a follower waits for, acknowledges, refuses and asks, on caches that are still growing."""

import dataclasses
import threading
import time
from pathlib import Path

import pytest
import torch
from cache_maker import make_identity
from trainer_cache import documents, fit_config, make_cache, random_bits
from trainer_cache import publish as write_shard

from hscache import layout
from hscache.consumers import read_consumers
from hscache.errors import (
    CacheIncompleteError,
    ConfigError,
    HscacheError,
    ShardCorruptError,
    ShardFreedError,
)
from hscache.freeing import free_shard
from hscache.manifest import WindowIdentity, encode_group
from hscache.reader import open_cache
from trainer.batches import Loader
from trainer.checkpoint import read_state
from trainer.fit import fit
from trainer.follow import (
    Follower,
    acknowledged_by,
    first_ticks,
    require_unseen_kept,
    require_window,
    wait_for_cache,
)
from trainer.run_folder import list_checkpoints
from trainer.run_plan import plan_run
from trainer.schedule import Position

CORPUS = documents([30] * 34, held_out=(0, 1))  # shard 0 is held out, 1 to 8 are for training
WINDOW = WindowIdentity(shards=2, passes=2, reserve=1)


def windowed(folder, window=WINDOW, **changes):
    """A cache whose root names a window."""
    return make_cache(folder, CORPUS, window=window, **changes)


def publish(folder, shard):
    cache = open_cache(folder)
    rows = {row: cache.plan.source_rows[row] for row in cache.plan.shard_documents(shard)}
    write_shard(folder, shard, cache.identity, rows, CORPUS, lambda r, n: random_bits(n, r))


def config_of(folder, **changes):
    run_dir = changes.pop("run_dir", folder.with_name("run"))
    settings = {"follow": True, "checkpoint_every": 2, "anchors_per_row": 60, **changes}
    return fit_config(folder, run_dir, **settings)


def follower_of(run):
    run.config.run_dir.mkdir(exist_ok=True)
    return Follower(run, Position(), 1)


def loader_of(run, **changes):
    return Loader(
        run.cache, run.row_task(), device=torch.device("cpu"), dtype=torch.float32, **changes
    )


@pytest.mark.parametrize("separate", [False, True])
def test_all_rows_that_can_be_read_come_before_a_wait(tmp_path, separate):
    """Rows that stayed behind in a buffer would never be acknowledged: a deadlock."""
    folder = windowed(tmp_path / "c", leave_out=(3, 4, 5, 6, 7, 8))
    run = plan_run(config_of(folder))
    plan = run.cache.plan
    first, second = plan.shard_documents(1), plan.shard_documents(2)
    expected = sorted([*first, *first, *second])  # ticks 0 and 1 of stride 1
    seen = []
    with loader_of(run, separate=separate) as loader:
        for step in loader.steps(0.2):
            if step is not None:
                seen += [d for row in step[0] for d in row.document_ids]
            if sorted(seen) == expected:
                break
        assert next(loader.steps(0.3)) is None  # the next one is not there
        publish(folder, 3)
        more = next(step for step in loader.steps(0.2) if step is not None)
        assert more[0]
    assert not loader._thread.is_alive()


def test_waiting_takes_no_processor_time(tmp_path):
    run = plan_run(config_of(windowed(tmp_path / "c", leave_out=range(9))))
    with loader_of(run) as loader:
        started_s = time.process_time()
        for _ in zip(range(6), loader.steps(0.3), strict=False):
            pass
        assert time.process_time() - started_s < 0.3


def test_shards_that_come_later_are_waited_for_and_acknowledged(tmp_path, caplog):
    caplog.set_level("INFO")
    window = WindowIdentity(shards=4, passes=2, reserve=3)
    folder = windowed(tmp_path / "c", window, leave_out=(5, 6, 7, 8))

    def produce():
        for shard in (5, 6, 7, 8):
            time.sleep(0.2)
            publish(folder, shard)

    thread = threading.Thread(target=produce)
    thread.start()
    last = fit(config_of(folder, checkpoint_every=5))
    thread.join()
    [consumer] = read_consumers(folder)
    assert consumer.finished
    assert consumer.acknowledged(8) == 8
    assert consumer.progress.step == read_state(last).step
    assert consumer.progress.checkpoint_bytes == 0
    offline = fit(
        config_of(folder, follow=False, run_dir=tmp_path / "offline", checkpoint_every=99)
    )
    found = (last / "training.safetensors").read_bytes()
    assert found == (offline / "training.safetensors").read_bytes()


def test_a_checkpoint_is_acknowledged_only_once_it_is_durable(tmp_path, monkeypatch):
    folder = windowed(tmp_path / "c")
    config = config_of(folder)
    monkeypatch.setattr(
        "trainer.run_state.write_checkpoint",
        lambda *_, **__: (_ for _ in ()).throw(HscacheError("no room")),
    )
    with pytest.raises(HscacheError, match="no room"):
        fit(config)
    [consumer] = read_consumers(folder)
    assert consumer.progress.ticks == 0
    assert not list_checkpoints(config.run_dir)


def test_a_starving_run_saves_if_that_makes_room_for_what_it_waits_for(tmp_path, caplog):
    folder = windowed(tmp_path / "c", leave_out=(4, 5, 6, 7, 8))
    run = plan_run(config_of(folder))
    with follower_of(run) as follower:
        assert follower.why_save(Position(tick=1), 2.0) == ""  # shard 1 has a visit to come
        assert "shard 4 is missing, and 1 shards" in follower.why_save(Position(tick=2), 2.0)
        follower.saving(Position(tick=2), 7)
        assert follower.why_save(Position(tick=2), 99.0) == ""  # it is being saved
    with follower_of(run) as follower:
        for shard in range(4, 9):
            publish(folder, shard)
        assert follower.why_save(Position(tick=5), 99.0) == ""  # nothing is missing
    caplog.set_level("INFO")
    run = plan_run(config_of(windowed(tmp_path / "d", leave_out=(3, 4, 5, 6, 7, 8))))
    with follower_of(run) as follower:
        follower._saved_ticks = 2
        assert follower.why_save(Position(tick=3), 2.0) == ""  # there is room for shard 3
        assert "no producer is at work" in caplog.text
        assert follower.why_save(Position(tick=3), 31.0)  # or is there?


def test_ticks_without_rows_do_not_hold_their_shards(tmp_path):
    plan = open_cache(windowed(tmp_path / "p", leave_out=range(9))).plan
    gone = [*plan.shard_documents(3), *plan.shard_documents(4)]
    run = plan_run(config_of(windowed(tmp_path / "c", quarantine=tuple(gone), leave_out=(8,))))
    assert first_ticks(run, Position(tick=2)) == 2  # visits shards 3 and 2
    assert first_ticks(run, Position(tick=3)) == 4  # visits 4 and 3
    assert first_ticks(run, Position(tick=3, row_in_tick=1)) == 3
    assert first_ticks(run, Position(tick=7)) == 7  # shard 8 is not there yet


def test_a_follower_goes_on_past_damaged_attributes_when_it_may_skip(tmp_path):
    window = WindowIdentity(shards=4, passes=2, reserve=3)
    folder = windowed(tmp_path / "c", window)
    (layout.shard_dir(folder, 4) / "zarr.json").write_bytes(b"{}")
    with pytest.raises(ShardCorruptError):
        fit(config_of(folder, run_dir=tmp_path / "stop"))
    saved = fit(config_of(folder, on_bad_shard="skip", run_dir=tmp_path / "skip"))
    lost = set(open_cache(folder).plan.shard_documents(4))
    assert {document for document, _ in read_state(saved).skipped} == lost
    consumers = {Path(c.run_dir).name: c for c in read_consumers(folder)}
    assert consumers["skip"].finished
    (layout.shard_dir(folder, 1) / "zarr.json").write_bytes(b"{}")  # the lowest, from the start
    fit(config_of(folder, on_bad_shard="skip", run_dir=tmp_path / "lowest"))
    free_shard(open_cache(folder), 2, ["skip"])
    with pytest.raises(CacheIncompleteError, match=r"1 shards .* freed, ids 2 to 2"):
        fit(config_of(folder, on_bad_shard="skip", run_dir=tmp_path / "late"))


def test_what_is_freed_under_a_run_is_no_damage_to_be_skipped(tmp_path):
    """Somebody dropped the run by hand: going on without those documents would be silent loss."""
    folder = windowed(tmp_path / "c")
    run = plan_run(config_of(folder, on_bad_shard="skip"))
    free_shard(open_cache(folder), 3, ["another"])
    with loader_of(run) as loader, pytest.raises(ShardFreedError, match="000003 has been freed"):
        list(loader.steps())


def test_a_window_too_small_for_the_checkpoints_is_refused_with_what_fits(tmp_path):
    folder = windowed(tmp_path / "c", leave_out=range(9))
    with pytest.raises(ConfigError, match="checkpoint_every to at most") as caught:
        require_window(plan_run(config_of(folder, checkpoint_every=1000)), 1)
    most = int(str(caught.value).rstrip(".").rpartition(" ")[2])
    require_window(plan_run(config_of(folder, checkpoint_every=most)), 1)
    with pytest.raises(ConfigError, match="checkpoint_every to at most"):
        require_window(plan_run(config_of(folder, checkpoint_every=most + 1)), 1)
    with pytest.raises(ConfigError, match=r"global_batch_rows, or make .* --reserve"):
        require_window(plan_run(config_of(folder, global_batch_rows=500)), 1)
    whole = windowed(tmp_path / "w", WindowIdentity(shards=8, passes=2, reserve=1))
    require_window(plan_run(config_of(whole, checkpoint_every=1000)), 1)  # nothing need be freed


def test_what_was_freed_before_a_run_saw_it_is_refused_by_id(tmp_path):
    folder = windowed(tmp_path / "c")
    cache = open_cache(folder)
    for shard in (1, 2):
        free_shard(cache, shard, ["run-early"])
    run = plan_run(config_of(folder))
    with pytest.raises(CacheIncompleteError, match=r"2 shards .* ids 1 to 2, when run-early"):
        require_unseen_kept(run, Position())
    assert acknowledged_by(run, 3) == 2
    require_unseen_kept(run, Position(tick=3))
    with pytest.raises(CacheIncompleteError, match=r"6 of 8 training .*, 2 were freed"):
        plan_run(config_of(folder, follow=False))
    with pytest.raises(CacheIncompleteError, match="ids 1 to 2"):
        fit(config_of(folder))


def test_the_passes_and_the_window_are_those_of_the_cache(tmp_path):
    folder = windowed(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"passes: found 3, .* after 2"):
        plan_run(config_of(folder, passes=3))
    with pytest.raises(ConfigError, match=r"window: found 5, .* of 2 shards"):
        plan_run(config_of(folder, window=5))


def test_a_plain_run_changes_nothing_in_the_cache(tmp_path):
    folder = windowed(tmp_path / "c")

    def state():
        return {str(p): p.stat().st_mtime_ns for p in [folder, *sorted(folder.rglob("*"))]}

    before = state()
    fit(config_of(folder, follow=False, checkpoint_every=99))
    assert state() == before


def test_a_place_that_is_not_there_is_refused_and_a_slow_start_waited_for(tmp_path):
    with pytest.raises(ConfigError, match="cannot be followed"):
        wait_for_cache(config_of(tmp_path / "none" / "cache"))
    folder = tmp_path / "later"
    made = threading.Thread(target=lambda: (time.sleep(0.3), make_cache(folder, CORPUS)))
    made.start()
    wait_for_cache(config_of(folder, eval_every_tokens=100))
    made.join()
    assert open_cache(folder).is_published(0)


def test_an_identity_without_a_window_is_written_as_before_there_were_any():
    identity = make_identity([], [])
    assert b"window" not in encode_group(identity)
    assert b'"window":{"passes":2' in encode_group(dataclasses.replace(identity, window=WINDOW))
