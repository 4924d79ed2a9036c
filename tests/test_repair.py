"""`hscache repair` takes out exactly the damaged shards, and `produce` makes exactly these anew."""

import json
import os
import shutil
import subprocess

import pytest
from producer import array_hashes, command, mtimes, published, temporaries

import hscache
from hscache import cli, layout, producers
from hscache.manifest import ShardManifest, encode_group
from hscache.verify import verify
from hscache.writer import ShardWriter


def produce(folder, llama_dir, corpus_file, **settings):
    return cli.main(command(folder, llama_dir, corpus_file, **settings)[3:])


def repair(folder, *flags):
    return cli.main(["repair", str(folder), *flags])


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def made(tmp_path_factory, llama_dir, corpus_file):
    folder = tmp_path_factory.mktemp("repair") / "cache"
    assert produce(folder, llama_dir, corpus_file) == 0
    assert len(published(folder)) >= 8
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "cache")


def everything(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_a_sound_cache_is_left_alone(folder, capsys):
    before = everything(folder)
    assert repair(folder, "--deep") == 0
    assert "nothing to repair" in capsys.readouterr().out
    assert everything(folder) == before


def test_damaged_shards_are_made_again_bit_for_bit_and_nothing_else_is(
    folder, made, llama_dir, corpus_file, tmp_path, capsys
):
    flip(layout.shard_dir(folder, 2) / "significand" / "c.0.0.0", 7)  # only seen deep
    os.truncate(layout.shard_dir(folder, 3) / "exponent" / "c.0.0.0", 5)
    (layout.shard_dir(folder, 4) / "zarr.json").unlink()
    elsewhere = layout.shard_dir(folder, 5).rename(tmp_path / "elsewhere")
    layout.shard_dir(folder, 5).symlink_to(elsewhere)
    shutil.rmtree(layout.shard_dir(folder, 6))
    layout.shard_dir(folder, 6).write_bytes(b"a file")
    damaged = everything(folder)
    assert repair(folder, "--deep", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "would be requeued" in out
    assert "nothing was changed" in out
    assert everything(folder) == damaged
    sound = [name for name in published(made) if int(name) not in (2, 3, 4, 5, 6)]
    before = mtimes(folder, sound)
    assert repair(folder, "--deep") == 0
    out = capsys.readouterr().out
    assert "run `hscache produce` again" in out
    assert published(folder) == sound
    assert not temporaries(folder)
    assert (elsewhere / "zarr.json").exists()  # a link is removed, not followed
    assert produce(folder, llama_dir, corpus_file) == 0
    assert mtimes(folder, sound) == before
    assert array_hashes(folder) == array_hashes(made)
    assert verify(hscache.open(folder), deep=True) == []


def test_without_deep_only_what_metadata_shows_is_requeued(folder):
    flip(layout.shard_dir(folder, 2) / "significand" / "c.0.0.0", 7)
    os.truncate(layout.shard_dir(folder, 3) / "exponent" / "c.0.0.0", 5)
    assert repair(folder) == 0
    assert not layout.shard_dir(folder, 3).exists()
    assert layout.shard_dir(folder, 2).exists()


def test_a_shard_that_a_live_producer_is_making_is_left_to_it(folder, capsys):
    (layout.shard_dir(folder, 1) / "zarr.json").unlink()
    (layout.shard_dir(folder, 3) / "zarr.json").unlink()
    with producers.Producer(folder) as producer:
        producer._update(claim=1)
        assert repair(folder) == 1
    out = capsys.readouterr().out
    assert "left to" in out
    assert layout.shard_dir(folder, 1).exists()
    assert not layout.shard_dir(folder, 3).exists()
    assert repair(folder) == 0  # its producer is gone
    assert not layout.shard_dir(folder, 1).exists()


def test_damage_outside_of_shards_is_named_and_left(folder, capsys):
    flip(layout.frozen_weights(folder), -3)
    tokenizer = layout.frozen_dir(folder) / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|im_fin|>"))
    config = layout.target_config_file(folder)
    config.write_text(config.read_text().replace('"hidden_size":64', '"hidden_size":65'))
    before = everything(folder)
    assert repair(folder) == 1
    out = capsys.readouterr().out
    for path in (layout.frozen_weights(folder), tokenizer, layout.target_config_file(folder)):
        assert f"{path} " in out
    assert "Delete frozen/" in out
    assert everything(folder) == before


def test_a_freed_shard_is_not_damaged(folder):
    cache = hscache.open(folder)
    manifest = cache.shard_manifest(2)
    content = {f: getattr(manifest, f) for f in manifest.__dataclass_fields__}
    tombstone = ShardManifest(**{**content, "state": "freed"})
    for array in manifest.arrays:
        shutil.rmtree(layout.shard_dir(folder, 2) / array)
    (layout.shard_dir(folder, 2) / "zarr.json").write_bytes(encode_group(tombstone))
    assert repair(folder, "--deep", "--quarantined") == 0
    assert layout.shard_dir(folder, 2).exists()


def test_quarantined_documents_are_requeued_when_asked(folder, made, llama_dir, corpus_file):
    manifest = hscache.open(folder).shard_manifest(2)
    documents = [{"document": d, "reason": "a bad day"} for d in (
        hscache.open(folder).shard(2).doc_rows.tolist())]  # fmt: skip
    path = layout.shard_dir(folder, 2) / "zarr.json"
    # as `produce` publishes a shard none of whose documents could be used
    shutil.rmtree(path.parent)
    with ShardWriter(folder, 2, hscache.open(folder).identity) as writer:
        for one in documents:
            writer.quarantine(one["document"], one["reason"])
        writer.publish({})
    assert json.loads(path.read_bytes())["attributes"]["hscache"]["state"] == "empty"
    assert repair(folder, "--deep") == 0
    assert path.exists()
    assert repair(folder, "--quarantined") == 0
    assert not path.exists()
    assert produce(folder, llama_dir, corpus_file) == 0
    assert hscache.open(folder).shard_manifest(2).num_documents == manifest.num_documents
    assert array_hashes(folder) == array_hashes(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_that_cannot_be_written_is_named(folder, tmp_path, capsys):
    (layout.shard_dir(folder, 1) / "zarr.json").unlink()
    place = tmp_path / "read-only"
    place.mkdir()
    if subprocess.run(["mount", "--bind", str(folder), str(place)], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        assert repair(place) == 1
        error = capsys.readouterr().err
        assert f"cannot take {place / 'shards' / '000001'} out of the cache: Read-only" in error
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
