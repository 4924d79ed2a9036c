"""Metadata: what is damaged, newer or different is refused in words."""

import dataclasses
import json

import pytest
from cache_maker import make_cache, make_documents, make_identity

import hscache
from hscache import layout
from hscache.errors import CacheMismatchError, HscacheError, ShardCorruptError
from hscache.manifest import (
    SCHEMA_VERSION,
    Identity,
    ShardManifest,
    encode_group,
    identity_diff,
    read_group,
    require_same_identity,
)
from hscache.plan import deal_into_shards
from hscache.zarr_array import canonical_json, checksum_hex


def identity():
    documents = make_documents(6)
    return make_identity(documents, deal_into_shards(documents, 100, 0))


def every_field():
    for tier in dataclasses.fields(Identity):
        for field in dataclasses.fields(tier.type):
            yield f"{tier.name}.{field.name}"


def changed(name):
    """The identity with one field changed, as another run would have it."""
    sound = identity()
    tier, field = name.split(".")
    value = getattr(getattr(sound, tier), field)
    other = {bool: lambda v: not v, int: lambda v: v + 1, tuple: lambda v: (*v, 5)}
    new = other.get(type(value), lambda v: f"{v}x")(value)
    part = dataclasses.replace(getattr(sound, tier), **{field: new})
    return dataclasses.replace(sound, **{tier: part})


def test_a_group_is_read_back_as_written(tmp_path):
    (tmp_path / "zarr.json").write_bytes(encode_group(identity()))
    assert read_group(tmp_path / "zarr.json", Identity) == identity()


@pytest.mark.parametrize("name", [name for name in every_field() if name != "states.target"])
def test_the_diff_names_each_changed_field_and_nothing_else(name, tmp_path):
    lines = identity_diff(identity(), changed(name))
    assert len(lines) == 1
    assert lines[0].startswith(f"  {name}: the cache has ")
    with pytest.raises(CacheMismatchError, match=f"{tmp_path} holds another cache.*\n  {name}:"):
        require_same_identity(identity(), changed(name), tmp_path)


def test_the_diff_lists_several_fields_one_a_line():
    other = dataclasses.replace(
        changed("content.seed"), encoding=changed("encoding.codec").encoding
    )
    assert [line.split(":")[0].strip() for line in identity_diff(identity(), other)] == [
        "content.seed",
        "encoding.codec",
    ]


def test_a_moved_target_folder_is_the_same_target(tmp_path):
    require_same_identity(identity(), changed("states.target"), tmp_path)


def test_a_newer_schema_is_refused_in_one_sentence_of_what_to_do(tmp_path):
    make_cache(tmp_path)
    for path, keys in (
        (layout.root_file(tmp_path), ("encoding", "schema_version")),
        (layout.plan_dir(tmp_path) / "zarr.json", ("schema_version",)),
        (layout.shard_dir(tmp_path, 0) / "zarr.json", ("schema_version",)),
    ):
        sound = path.read_bytes()
        group = json.loads(sound)
        place = group["attributes"]["hscache"]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = SCHEMA_VERSION + 1
        place["something_new"] = {"later": True}
        path.write_text(json.dumps(group, indent=1))
        with pytest.raises(CacheMismatchError) as caught:
            hscache.open(tmp_path).shard(0)
        assert str(caught.value) == (
            f"{path} has schema version 3, and this hscache reads versions up to 2. "
            "Update hscache to read this cache."
        )
        path.write_bytes(sound)


@pytest.mark.parametrize("kind", [Identity, ShardManifest])
def test_a_flipped_bit_anywhere_is_found(tmp_path, kind):
    make_cache(tmp_path, num_documents=6)
    root, shard = layout.root_file(tmp_path), layout.shard_dir(tmp_path, 0) / "zarr.json"
    path = root if kind is Identity else shard
    sound = path.read_bytes()
    for position in range(len(sound)):
        for bit in (position % 8, (position + 3) % 8):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(HscacheError, match=str(path)) as caught:
                read_group(path, kind)
            # One digit makes it a newer version; refused all the same.
            assert isinstance(caught.value, ShardCorruptError) or "schema version" in str(
                caught.value
            )


@pytest.mark.parametrize("left", [0, 1, 2])
def test_truncated_metadata_is_found(tmp_path, left):
    make_cache(tmp_path, num_documents=6)
    path = layout.root_file(tmp_path)
    sound = path.read_bytes()
    path.write_bytes(sound[: (0, len(sound) // 2, len(sound) - 1)[left]])
    with pytest.raises(ShardCorruptError, match=f"{path} is damaged"):
        hscache.open(tmp_path)


def test_reformatted_metadata_with_the_same_values_is_refused(tmp_path):
    make_cache(tmp_path, num_documents=6)
    path = layout.root_file(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=2))
    with pytest.raises(ShardCorruptError, match="changed by another program"):
        hscache.open(tmp_path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("shards/000000", {"arrays": {}}),
        ("shards/000000", {"num_tokens": "x"}),
        ("shards/000000", {"num_documents": -1}),
        ("shards/000000", {"codec": "../codec"}),
        ("shards/000000", {"quarantined": [{"document": 0}]}),
        ("plan", {"num_shards": True}),
        ("plan", {"num_held_out_shards": 3}),
        ("plan", {"arrays": {}}),
        (".", {"states": None}),
    ],
)
def test_forged_metadata_under_a_right_checksum_is_refused(tmp_path, place, value):
    make_cache(tmp_path)
    path = tmp_path / place / "zarr.json"
    content = json.loads(path.read_bytes())["attributes"]["hscache"]
    content.pop("crc32c")
    content |= value
    content["crc32c"] = checksum_hex(canonical_json(content))
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"hscache": content}}
    path.write_bytes(canonical_json(group))
    with pytest.raises(ShardCorruptError, match=str(tmp_path)):
        hscache.open(tmp_path).shard(0)


@pytest.mark.parametrize("place", ["shards", "shards/000000", "shards/000000/exponent", "plan"])
def test_a_link_out_of_the_cache_is_refused(tmp_path, place):
    make_cache(tmp_path / "cache")
    path = tmp_path / "cache" / place
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(ShardCorruptError, match=f"{path} is damaged: it is a link"):
        hscache.open(tmp_path / "cache").documents[0].hidden_states()
    (tmp_path / "link").symlink_to(tmp_path / "cache")  # a link to a whole cache is fine
    path.unlink()
    (tmp_path / "outside").rename(path)
    assert len(hscache.open(tmp_path / "link").documents[0].hidden_states())


def test_a_shard_has_one_name(tmp_path):
    make_cache(tmp_path)
    before = layout.list_shards(tmp_path)
    for name in ("0000001", "\u0660" * 5 + "\u0661", "..000001", "000001\n"):
        (layout.shards_dir(tmp_path) / name).mkdir()
    assert layout.list_shards(tmp_path) == before
