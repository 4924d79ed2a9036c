"""Shards appear whole or not at all, and the first of two writers wins."""

import ml_dtypes
import numpy as np
import pytest
from cache_maker import HIDDEN, LAYER_IDS, make_cache, make_documents, make_identity, make_states

import hscache
from hscache import files, layout
from hscache.plan import deal_into_shards
from hscache.writer import ShardWriter


def new_writer(cache_dir, shard=0, codec="lossless"):
    documents = make_documents(20)
    identity = make_identity(documents, deal_into_shards(documents, 100, 0), codec=codec)
    return ShardWriter(cache_dir, shard, identity)


def test_of_two_writers_the_first_wins_and_the_other_leaves_nothing(tmp_path):
    with new_writer(tmp_path) as first, new_writer(tmp_path) as second:
        first.add(0, make_states(5, seed=1))
        second.add(0, make_states(5, seed=2))
        assert first.publish({"who": "first"})
        shard = layout.shard_dir(tmp_path, 0)
        before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in shard.rglob("*.*")}
        assert not second.publish({"who": "second"})
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in shard.rglob("*.*")} == before
    assert [p.name for p in layout.shards_dir(tmp_path).iterdir()] == ["000000"]


def test_an_error_publishes_nothing_and_leaves_nothing(tmp_path):
    def fail_half_way():
        with new_writer(tmp_path) as writer:
            writer.add(0, make_states(300, seed=1))
            raise RuntimeError("the GPU fell off")

    with pytest.raises(RuntimeError, match="the GPU fell off"):
        fail_half_way()
    assert not list(layout.shards_dir(tmp_path).iterdir())


def test_a_writer_that_cannot_start_leaves_nothing(tmp_path, monkeypatch):
    made = []

    def second_fails(*args):
        if made:
            raise OSError("no more")
        made.append(args)
        return real(*args)

    real = hscache.writer.ZarrArrayWriter
    monkeypatch.setattr("hscache.writer.ZarrArrayWriter", second_fails)
    with pytest.raises(OSError, match="no more"):
        new_writer(tmp_path).__enter__()
    assert not list(layout.shards_dir(tmp_path).iterdir())


def test_statistics_agree_with_float64(tmp_path):
    _, states = make_cache(tmp_path, shard_tokens=10_000)
    cache = hscache.open(tmp_path)
    shard = cache.shard(1)
    values = np.concatenate([states[row] for row in shard.doc_rows.tolist()])
    values_TLH = values.view(ml_dtypes.bfloat16).astype(np.float64)
    for index, found in enumerate(shard.manifest.statistics):
        values_TH = values_TLH[:, index]
        rms_H = np.sqrt((values_TH**2).mean(axis=0))
        assert found.layer_id == LAYER_IDS[index]
        assert found.mean_norm == pytest.approx(np.linalg.norm(values_TH, axis=1).mean(), 1e-5)
        assert found.max_abs == np.abs(values_TH).max()
        assert list(found.outlier_channels) == np.argsort(-rms_H)[:4].tolist()
        assert list(found.outlier_rms) == pytest.approx(np.sort(rms_H)[::-1][:4].tolist(), 1e-5)
        assert found.median_channel_rms == pytest.approx(np.median(rms_H), 1e-5)


def test_sizes_in_the_manifest_are_those_on_disk(tmp_path):
    make_cache(tmp_path)
    cache = hscache.open(tmp_path)
    manifest = cache.shard_manifest(0)
    folder = layout.shard_dir(tmp_path, 0)
    assert manifest.raw_bytes == manifest.num_tokens * len(LAYER_IDS) * HIDDEN * 2
    for name, record in manifest.arrays.items():
        [data] = (folder / name).glob("c.*")
        assert record.size_bytes == data.stat().st_size
    assert manifest.stored_bytes == sum(
        manifest.arrays[name].size_bytes for name in ("exponent", "significand")
    )


def test_replacing_a_file_keeps_the_old_one_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.replace_atomically(path, b"old")

    def fails(*_):
        raise OSError("power cut")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="power cut"):
        files.replace_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_file_is_created_once(tmp_path):
    assert files.create_once(tmp_path / "a", b"first")
    assert not files.create_once(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
