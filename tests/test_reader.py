"""Caches as a notebook sees them: documents, layers, errors; and the golden caches of old."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from cache_maker import LAYER_IDS, make_cache

import hscache
from hscache import layout, planes
from hscache.errors import (
    CacheIncompleteError,
    CacheMismatchError,
    ConfigError,
    ShardCorruptError,
)

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    documents, states = make_cache(folder, quarantine=(2,))
    return folder, documents, states


def test_documents_come_back_as_they_went_in(made):
    folder, documents, states = made
    cache = hscache.open(folder)
    assert len(cache.documents) == len(documents) == 20
    assert len(cache.held_out) + len(cache.training) == 20
    for row, (found, document) in enumerate(zip(cache.documents, documents, strict=True)):
        assert (found.row, len(found), found.key) == (row, len(document.ids_T), document.key)
        assert found.source_row == document.source_row
        assert found.input_ids.dtype == np.int32
        assert found.loss_mask.dtype == np.bool_
        np.testing.assert_array_equal(found.input_ids, document.ids_T)
        np.testing.assert_array_equal(found.loss_mask, document.loss_mask_T)
        if row == 2:
            continue
        hidden_TLH = found.hidden_states()
        assert hidden_TLH.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(hidden_TLH.view(np.uint16), states[row])
        for index, layer in enumerate(LAYER_IDS):
            one_TH = found.hidden_states(layer=layer)
            np.testing.assert_array_equal(one_TH.view(np.uint16), states[row][:, index])


def test_held_out_and_training_documents_are_told_apart(made):
    folder, documents, _ = made
    cache = hscache.open(folder)
    assert [documents[d.row].held_out for d in cache.held_out] == [True] * 4
    assert [documents[d.row].held_out for d in cache.training] == [False] * 16


def test_documents_are_a_sequence(made):
    cache = hscache.open(made[0])
    assert cache.documents[-1].row == 19
    assert [d.row for d in cache.documents[3:9:2]] == [3, 5, 7]
    assert cache.training[0].row == len(cache.held_out)
    with pytest.raises(IndexError):
        cache.documents[20]


def test_torch_gives_the_same_numbers(made):
    torch = pytest.importorskip("torch")
    folder, documents, states = made
    found = hscache.open(folder).documents[5].torch()
    assert found.input_ids.dtype == torch.int64
    assert found.loss_mask.dtype == torch.bool
    assert found.hidden_states.dtype == torch.bfloat16
    assert found.input_ids.tolist() == documents[5].ids_T.tolist()
    bits = found.hidden_states.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits, states[5])


def test_a_quarantined_document_says_why(made):
    cache = hscache.open(made[0])
    with pytest.raises(CacheIncompleteError, match=r"document 2 .* a test said so"):
        cache.documents[2].hidden_states()
    with pytest.raises(CacheIncompleteError, match=r"document 2 .* a test said so"):
        cache.shard(cache.documents[2].shard_number).read_arrays(2, {})
    assert len(cache.documents[2].input_ids)


def test_an_unknown_layer_is_refused_with_those_there_are(made):
    with pytest.raises(ConfigError, match=r"layer 2 is not in this cache; it has \[1, 3\]"):
        hscache.open(made[0]).documents[0].hidden_states(layer=2)


@pytest.mark.parametrize("codec", ["lossless", "none"])
def test_last_hidden_states_come_back_beside_the_layers(tmp_path, codec):
    _, states = make_cache(tmp_path, codec=codec, quarantine=(2,), last_hidden=True)
    cache = hscache.open(tmp_path)
    assert cache.identity.states.last_hidden
    for document in cache.documents:
        if document.row == 2:
            with pytest.raises(CacheIncompleteError, match="a test said so"):
                document.last_hidden()
            continue
        expected = states[document.row]
        last_TH = document.last_hidden()
        assert last_TH.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(last_TH.view(np.uint16), expected[:, -1])
        np.testing.assert_array_equal(
            document.hidden_states().view(np.uint16), expected[:, : len(LAYER_IDS)]
        )
        shard = cache.shard(document.shard_number)
        np.testing.assert_array_equal(shard.captured_bits(document.row), expected)
        assert [s.layer_id for s in shard.manifest.statistics] == [*LAYER_IDS, 5]
        assert shard.manifest.raw_bytes == shard.manifest.num_tokens * expected[0].size * 2


def test_a_cache_without_last_hidden_states_says_how_to_get_them(made):
    with pytest.raises(ConfigError, match=r"--target\.last-hidden true"):
        hscache.open(made[0]).documents[0].last_hidden()


def test_a_missing_cache_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path} is no hidden-state cache"):
        hscache.open(tmp_path)


def test_an_unpublished_shard_is_an_error_with_counts(tmp_path):
    make_cache(tmp_path, only_shards=2)
    cache = hscache.open(tmp_path)
    assert cache.published_shards() == [0, 1]
    with pytest.raises(CacheIncompleteError, match=r"has not been published: 2 of \d+ shards"):
        cache.documents[-1].hidden_states()


def test_a_shard_of_another_cache_is_refused(tmp_path):
    make_cache(tmp_path / "a")
    make_cache(tmp_path / "b", codec="none")
    stranger = layout.shard_dir(tmp_path / "a", 0)
    stranger.rename(tmp_path / "aside")
    layout.shard_dir(tmp_path / "b", 0).rename(stranger)
    with pytest.raises(CacheMismatchError, match="of another cache"):
        hscache.open(tmp_path / "a").documents[0].hidden_states()


def test_a_shard_under_another_number_is_refused(tmp_path):
    make_cache(tmp_path)
    first, second = layout.shard_dir(tmp_path, 0), layout.shard_dir(tmp_path, 1)
    first.rename(tmp_path / "aside")
    second.rename(first)
    with pytest.raises(CacheMismatchError, match="says it is shard 1"):
        hscache.open(tmp_path).shard(0)


def test_opening_reads_only_metadata_and_document_columns(tmp_path):
    make_cache(tmp_path)
    for path in tmp_path.rglob("c.*"):
        if path.parent.name in ("exponent", "significand"):
            path.unlink()
        elif path.parent.name in ("tokens", "loss_mask"):
            raw = path.read_bytes()
            path.write_bytes(bytes(len(raw) - 24) + raw[-24:])  # only checksum and index are left
    cache = hscache.open(tmp_path)
    assert "20 documents" in repr(cache)
    assert cache.shard(0).manifest.num_documents == len(cache.shard(0).doc_rows)
    with pytest.raises(ShardCorruptError):
        _ = cache.documents[0].input_ids
    with pytest.raises(ShardCorruptError):
        cache.documents[0].hidden_states()


def test_a_damaged_state_is_named_and_its_neighbours_can_be_read(tmp_path):
    _, states = make_cache(tmp_path, shard_tokens=1000)
    path = layout.shard_dir(tmp_path, 1) / "exponent" / "c.0.0.0"
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1  # in the first chunk: layer 1, first 256 tokens
    path.write_bytes(raw)
    document = hscache.open(tmp_path).training[0]
    with pytest.raises(ShardCorruptError, match=f"{path} is damaged: inner chunk 0"):
        document.hidden_states()
    found = document.hidden_states(layer=3).view(np.uint16)
    np.testing.assert_array_equal(found, states[document.row][:, 1])


def test_importing_and_opening_needs_no_torch(made):
    code = (
        "import sys, hscache\n"
        f"cache = hscache.open({str(made[0])!r})\n"
        "cache.documents[0].hidden_states()\n"
        "heavy = {'torch', 'transformers', 'zarr', 'trainer', 'jsonargparse'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_hscache_never_imports_the_trainer():
    for path in (ROOT / "hscache").glob("*.py"):
        roots = {name.split(".")[0] for name in imported_names(path)}
        assert "trainer" not in roots, path


def test_only_the_import_of_pickles_unpickles_and_only_tensors():
    for path in (ROOT / "hscache").glob("*.py"):
        if path.name == "peer_specforge.py":
            text = path.read_text()
            assert "from pickle import UnpicklingError\n" in text
            assert text.count("pickle import") == 1
            calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
            loads = [c for c in calls if ast.unparse(c.func) == "torch.load"]
            assert len(loads) == text.count("torch.load(") == 2
            assert all("weights_only=True" in ast.unparse(call) for call in loads)
            continue
        names = set(imported_names(path))
        assert not names & {"pickle", "shelve", "marshal", "joblib", "dill"}, path
        assert "torch.load(" not in path.read_text(), path


@pytest.mark.parametrize("codec", sorted(planes.ARRAYS))
def test_golden_caches_open_bit_exact(codec):
    name = "lossless" if codec == "none" else codec
    expected = json.loads((GOLDEN / f"expected-{name}.json").read_text())
    cache = hscache.open(GOLDEN / codec)
    states = expected["identity"]["states"]
    assert list(cache.identity.states.target_layer_ids) == states["target_layer_ids"]
    assert cache.identity.states.layer_convention == states["layer_convention"]
    assert cache.identity.encoding.codec == codec
    assert len(cache.documents) == len(expected["documents"])
    for found, document in zip(cache.documents, expected["documents"], strict=True):
        assert found.shard_number == document["shard"]
        assert found.source_row == document["source_row"]
        assert found.input_ids.tolist() == document["input_ids"]
        assert found.loss_mask.astype(int).tolist() == document["loss_mask"]
        if document["bits"] is None:
            with pytest.raises(CacheIncompleteError, match="golden quarantine"):
                found.hidden_states()
        else:
            bits = found.hidden_states().view(np.uint16)
            np.testing.assert_array_equal(bits, np.array(document["bits"], np.uint16))


def test_golden_caches_are_small():
    assert sum(p.stat().st_size for p in GOLDEN.rglob("*") if p.is_file()) < 240_000


@pytest.mark.parametrize("name", ["last_hidden", "last_hidden-schema2"])
def test_golden_last_hidden_states_open_bit_exact_also_in_zarr_python(name):
    expected = json.loads((GOLDEN / "expected-last_hidden.json").read_text())
    (document,) = expected["documents"]
    bits_TLH = np.array(document["bits"], np.uint16)
    cache = hscache.open(GOLDEN / name)
    (found,) = cache.documents
    np.testing.assert_array_equal(found.hidden_states().view(np.uint16), bits_TLH[:, :-1])
    np.testing.assert_array_equal(found.last_hidden().view(np.uint16), bits_TLH[:, -1])
    shard = zarr.open_group(GOLDEN / name, mode="r")["shards/000000"]
    exponent_TH = shard["last_hidden_exponent"][:].astype(np.uint16)
    significand_TH = shard["last_hidden_significand"][:].astype(np.uint16)
    bits_TH = exponent_TH << 7 | significand_TH & 0x7F | (significand_TH & 0x80) << 8
    np.testing.assert_array_equal(bits_TH, bits_TLH[:, -1])
    assert shard["last_hidden_exponent"].metadata.dimension_names == ("token", "hidden")


@pytest.mark.parametrize("codec", sorted(planes.ARRAYS))
def test_zarr_python_opens_the_whole_cache(codec):
    group = zarr.open_group(GOLDEN / codec, mode="r")
    assert group.attrs["hscache"]["encoding"]["codec"] == codec
    cache = hscache.open(GOLDEN / codec)
    assert (
        group["plan/tokens"][:].tolist()
        == np.concatenate([d.input_ids for d in cache.documents]).tolist()
    )
    for number in cache.published_shards():
        shard = group[f"shards/{number:06d}"]
        arrays = {name: shard[name][:] for name in planes.ARRAYS[codec]}
        bits = planes.decode(arrays, codec)
        np.testing.assert_array_equal(
            bits, cache.shard(number).read_bits(0, cache.shard(number).manifest.num_tokens)
        )
        np.testing.assert_array_equal(shard["doc_rows"][:], cache.shard(number).doc_rows)
