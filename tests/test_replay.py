"""`hscache verify --replay` tells states of this target from those of anything else."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, save_target
from hypothesis import given
from hypothesis import strategies as st
from producer import command
from safetensors.torch import load_file, save_file

import hscache
from hscache import cli, layout
from hscache.manifest import encode_group
from hscache.replay import ulp_distance
from hscache.writer import ShardWriter


def verify(folder, target, *flags):
    line = ["verify", str(folder), "--replay", "6", "--target", str(target), "--device", "cpu"]
    return cli.main([*line, *flags])


@pytest.fixture(scope="module")
def made(tmp_path_factory, llama_dir, corpus_file):
    folder = tmp_path_factory.mktemp("replay") / "cache"
    line = command(folder, llama_dir, corpus_file, target__last_hidden="true")
    assert cli.main(line[3:]) == 0
    return folder


def rewrite(folder, change, **states):
    """Write every shard anew, with the states that `change(bits_TLH)` gives and good checksums."""
    cache = hscache.open(folder)
    identity = dataclasses.replace(
        cache.identity, states=dataclasses.replace(cache.identity.states, **states)
    )
    kept = {
        shard: (
            cache.shard_manifest(shard).provenance,
            {
                row: cache.shard(shard).captured_bits(row)
                for row in cache.plan.shard_documents(shard)
            },
        )
        for shard in cache.published_shards()
    }
    shutil.rmtree(layout.shards_dir(folder))
    layout.shards_dir(folder).mkdir()
    layout.root_file(folder).write_bytes(encode_group(identity))
    for shard, (provenance, documents) in kept.items():
        with ShardWriter(folder, shard, identity) as writer:
            for row, bits_TLH in documents.items():
                writer.add(row, change(bits_TLH))
            writer.publish(provenance)


def test_states_of_this_target_are_bit_equal_in_their_packs(made, llama_dir, capsys):
    assert verify(made, llama_dir) == 0
    out = capsys.readouterr().out
    assert "6 documents in" in out
    assert "bit-equal" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("in their packs")]
    assert [row[3:] for row in rows] == [[b, "all", "0", "0"] for b in ("0", "1", "3", "4")]
    assert "no damage found" in out


def test_lossy_codecs_are_replayed_through_their_rounding(tmp_path, llama_dir, corpus_file, capsys):
    for codec in ("bitround4", "fp8"):
        line = command(tmp_path / codec, llama_dir, corpus_file, store__codec=codec)
        assert cli.main(line[3:]) == 0
        capsys.readouterr()
        assert verify(tmp_path / codec, llama_dir) == 0
        assert "bit-equal" in capsys.readouterr().out


def test_a_wrong_layer_is_named(made, tmp_path, llama_dir, capsys):
    folder = shutil.copytree(made, tmp_path / "cache")

    def shift(bits_TLH):
        return bits_TLH[:, [0, 2, 2, 3]]  # block 3's output where block 1's should be

    rewrite(folder, shift)
    assert cli.main(["verify", str(folder), "--deep"]) == 0  # checksums cannot know
    assert verify(folder, llama_dir) == 1
    out = capsys.readouterr().out
    assert "the states stored as block 1 are" in out
    assert "they are the output of block 3 (" in out
    assert "stored as block 0" not in out


def test_a_norm_that_was_applied_is_named(made, tmp_path, llama_dir, capsys):
    folder = shutil.copytree(made, tmp_path / "cache")

    def normed(bits_TLH):
        last = torch.from_numpy(bits_TLH[:, -1].view(np.int16)).view(torch.bfloat16).float()
        last = torch.nn.functional.rms_norm(last, last.shape[-1:], eps=1e-6).bfloat16()
        changed = bits_TLH.copy()
        changed[:, -1] = last.view(torch.int16).numpy().view(np.uint16)
        return changed

    rewrite(folder, normed)
    assert verify(folder, llama_dir) == 1
    out = capsys.readouterr().out
    assert "the states stored as block 4 are" in out
    assert "they are the output of block 4 after the final norm" in out


def test_another_template_is_named(made, tmp_path, llama_dir, capsys):
    other = shutil.copytree(llama_dir, tmp_path / "other")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(other)
    assert verify(made, other) == 1
    out = capsys.readouterr().out
    assert "states.template_sha256: the cache has" in out
    assert "states.weights_sha256" not in out


def test_other_weights_are_named_by_hash_and_found_without_one(made, tmp_path, llama_dir, capsys):
    other = save_target(tmp_path / "other", "llama", tie_word_embeddings=True)
    weights = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, value in weights.items():
        if "layers" in name:
            weights[name] = torch.randn(value.shape, generator=generator).mul(0.2).to(value.dtype)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert verify(made, other) == 1
    out = capsys.readouterr().out
    assert "states.weights_sha256: the cache has" in out
    folder = shutil.copytree(made, tmp_path / "cache")
    rewrite(folder, lambda bits: bits, weights_sha256="")  # as of a target from the hub
    assert verify(folder, other) == 1
    out = capsys.readouterr().out
    assert "states.weights_sha256" not in out
    assert "no block of this target gives them: other weights" in out


def test_one_changed_value_is_seen_and_no_damage_by_itself(made, tmp_path, llama_dir, capsys):
    folder = shutil.copytree(made, tmp_path / "cache")

    def touch(bits_TLH):
        changed = bits_TLH.copy()
        changed[0, 0, 0] += 1
        return changed

    rewrite(folder, touch)
    assert verify(folder, llama_dir) == 0
    out = capsys.readouterr().out
    assert "not bit-equal, though device and versions are those that made them" in out


def test_another_shape_or_a_damaged_shard_is_an_answer(made, tmp_path, llama_dir, capsys):
    wide = save_target(tmp_path / "wide", "llama", hidden_size=32, tie_word_embeddings=True)
    assert verify(made, wide) == 2
    assert "hidden size 32, and the states" in capsys.readouterr().err
    folder = shutil.copytree(made, tmp_path / "cache")
    for shard in layout.list_shards(folder):
        path = layout.shard_dir(folder, shard) / "significand" / "c.0.0.0"
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(data)
    assert verify(folder, llama_dir) == 1
    assert "fails its checksum" in capsys.readouterr().out


def test_shards_that_are_known_to_be_damaged_are_left_out_and_named(
    made, tmp_path, llama_dir, capsys
):
    folder = shutil.copytree(made, tmp_path / "cache")
    first, *others = layout.list_shards(folder)
    (layout.shard_dir(folder, first) / "zarr.json").write_bytes(b"{}")
    assert verify(folder, llama_dir) == 1
    out = capsys.readouterr().out
    assert "packs: bit-equal" in out
    assert f"shard {first}: " in out
    for shard in others:
        (layout.shard_dir(folder, shard) / "zarr.json").write_bytes(b"{}")
    assert verify(folder, llama_dir) == 1
    assert "no sound shard is left" in capsys.readouterr().out


def test_what_makes_no_sense_is_refused(made, capsys):
    assert cli.main(["verify", str(made), "--target", "x"]) == 2
    assert "--replay N" in capsys.readouterr().err
    assert cli.main(["verify", str(made), "--replay", "-1"]) == 2
    assert json.dumps(-1) in capsys.readouterr().err


@given(a=st.integers(0, 65535), b=st.integers(0, 65535))
def test_ulps_count_the_numbers_between(a, b):
    finite = [x for x in (a, b) if x & 0x7F80 != 0x7F80]
    if len(finite) < 2:
        return
    x, y = (
        torch.tensor([v], dtype=torch.int32).to(torch.uint16).view(torch.bfloat16) for v in finite
    )
    low, high = sorted((float(x), float(y)))
    found = int(ulp_distance(np.array([a], np.uint16), np.array([b], np.uint16))[0])
    step, value = 0, torch.tensor([low]).bfloat16()
    while float(value) < high and step < 40:
        value = torch.nextafter(value, torch.tensor([float("inf")]).bfloat16())
        step += 1
    assert found == step if step < 40 else found >= 40
