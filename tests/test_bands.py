"""Bands through threads and buffers that are used again: the bytes on disk are always the same."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from cache_maker import HIDDEN, LAYER_IDS, make_cache, make_identity, make_states

import hscache
from hscache import bands, files, layout
from hscache.manifest import encode_group
from hscache.mapped_file import MappedFile
from hscache.plan import TokenizedDocument, write_plan
from hscache.planes import ARRAYS, decode, encode
from hscache.sums import state_sums
from hscache.writer import ShardWriter

CODECS = sorted(ARRAYS)
LENGTHS = (300, 1, 211, 256, 700, 44, 513)
"""A band ends inside of a document, with one, and after a document of several bands."""


def document(num_tokens, row):
    return TokenizedDocument(
        ids_T=np.full(num_tokens, row, np.int32),
        loss_mask_T=np.ones(num_tokens, np.uint8),
        source_row=row,
        held_out=False,
    )


def write(folder, codec, add, *, executor=None, last_hidden=False):
    """Write one shard of LENGTHS; `add` puts a document into the writer. Return the cache."""
    corpus = [document(length, row) for row, length in enumerate(LENGTHS)]
    shards = [list(range(len(corpus)))]
    identity = make_identity(corpus, shards, codec=codec, last_hidden=last_hidden)
    folder.mkdir()
    write_plan(folder, corpus, shards, {})
    files.create_once(layout.root_file(folder), encode_group(identity))
    with ShardWriter(folder, 0, identity, executor) as writer:
        for row in range(len(LENGTHS)):
            add(writer, row)
        writer.publish({})
    return hscache.open(folder)


def bits_of(row, layers=2):
    return make_states(LENGTHS[row], seed=row, layers=layers)


def plainly(writer, row):
    writer.add(row, bits_of(row))


def contents(cache):
    shard = layout.shard_dir(cache.path, 0)
    return {str(p.relative_to(shard)): p.read_bytes() for p in shard.rglob("*") if p.is_file()}


@pytest.mark.parametrize("codec", CODECS)
def test_threads_write_the_bytes_that_one_alone_writes(tmp_path, codec):
    alone = write(tmp_path / "alone", codec, plainly)
    with ThreadPoolExecutor(4) as pool:
        together = write(tmp_path / "together", codec, plainly, executor=pool)
    assert contents(together) == contents(alone)


@pytest.mark.parametrize("codec", CODECS)
def test_memory_given_to_the_writer_may_be_used_again_at_once(tmp_path, codec):
    def overwrite_bits(writer, row):
        bits_TLH = bits_of(row)
        writer.add(row, bits_TLH)
        bits_TLH.fill(0xFFFF)

    def overwrite_arrays(writer, row):
        bits_TLH = bits_of(row)
        arrays = {name: array.copy() for name, array in encode(bits_TLH, codec).items()}
        writer.add_encoded(row, arrays, state_sums(bits_TLH))
        for array in arrays.values():
            array.fill(255)

    with ThreadPoolExecutor(4) as pool:
        first = write(tmp_path / "bits", codec, overwrite_bits, executor=pool)
        second = write(tmp_path / "arrays", codec, overwrite_arrays, executor=pool)
    for row in range(len(LENGTHS)):
        expected = decode(encode(bits_of(row), codec), codec)
        np.testing.assert_array_equal(first.shard(0).bits(row), expected)
        np.testing.assert_array_equal(second.shard(0).bits(row), expected)


@pytest.mark.parametrize("last_hidden", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_zarr_python_and_tensorstore_read_every_codec(tmp_path, codec, last_hidden):
    layers = len(LAYER_IDS) + last_hidden

    def add(writer, row):
        writer.add(row, bits_of(row, layers))

    cache = write(tmp_path / "cache", codec, add, last_hidden=last_hidden)
    expected = np.concatenate([bits_of(row, layers) for row in range(len(LENGTHS))])
    expected = decode(encode(expected, codec), codec)
    group = zarr.open_group(layout.shard_dir(cache.path, 0), mode="r")

    def tensorstore_array(name):
        path = f"{layout.shard_dir(cache.path, 0) / name}/"
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        return tensorstore.open(spec).result().read().result()

    for read in (lambda name: group[name][:], tensorstore_array):
        found = decode({name: read(name) for name in ARRAYS[codec]}, codec)
        np.testing.assert_array_equal(found, expected[:, : len(LAYER_IDS)])
        if last_hidden:
            last = {name: read(layout.LAST_HIDDEN + name) for name in ARRAYS[codec]}
            np.testing.assert_array_equal(decode(last, codec), expected[:, -1])


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_readers_in_threads_never_see_each_others_buffers(tmp_path, monkeypatch, codec, mapped):
    if not mapped:
        monkeypatch.setattr(MappedFile, "bytes_in_memory", lambda *_: None)
    cache = write(tmp_path / "cache", codec, plainly)
    shard = cache.shard(0)
    expected = [encode(bits_of(row), codec) for row in range(len(LENGTHS))]

    def check(row):
        merged = shard.bits(row)
        found = {name: np.empty_like(array) for name, array in expected[row].items()}
        shard.read_arrays(row, found)
        np.testing.assert_array_equal(merged, decode(expected[row], codec))
        for name, array in expected[row].items():
            np.testing.assert_array_equal(found[name], array)
        return merged

    rows = list(itertools.chain(*[range(len(LENGTHS))] * 6))
    with ThreadPoolExecutor(8) as pool:
        kept = list(pool.map(check, rows))
    for row, merged in zip(rows, kept, strict=True):  # what was returned is the caller's
        np.testing.assert_array_equal(merged, decode(expected[row], codec))


def test_pieces_of_a_document_tile_it_and_share_no_chunk(tmp_path):
    cache = write(tmp_path / "cache", "lossless", plainly)
    shard = cache.shard(0)
    start, several = 0, 0
    for row, length in enumerate(LENGTHS):
        pieces = shard.pieces(row)
        assert [first for first, _ in pieces] == [0, *(last for _, last in pieces[:-1])]
        assert pieces[-1][1] == length
        assert all((start + first) % 256 == 0 for first, _ in pieces[1:])
        out = {n: np.empty_like(array) for n, array in encode(bits_of(row), "lossless").items()}
        for first, last in pieces:
            shard.read_arrays(row, {n: array[first:last] for n, array in out.items()}, first)
        np.testing.assert_array_equal(decode(out, "lossless"), bits_of(row))
        start += length
        several += len(pieces) > 1
    assert several


@pytest.mark.parametrize("codec", CODECS)
def test_the_manifest_has_a_lossy_codecs_error_in_every_channel_alike(tmp_path, codec):
    def add(writer, row):
        bits_TLH = bits_of(row)
        bits_TLH[:, 0, 0] += 15 << 7  # one channel is 2^15 times larger than the others
        writer.add(row, bits_TLH)
        states.append(bits_TLH)

    states = []
    cache = write(tmp_path / "cache", codec, add)
    before = np.concatenate(states)
    after = decode(encode(before, codec), codec)

    def values(bits):
        return bits.view(ml_dtypes.bfloat16).astype(np.float64)

    for index, found in enumerate(cache.shard_manifest(0).statistics):
        if codec in ("none", "lossless"):
            assert found.channel_error is None
            continue
        rms_H = np.sqrt(np.square(values(before[:, index])).mean(axis=0))
        change_TH = (values(after[:, index]) - values(before[:, index])) / rms_H
        expected = np.sqrt(np.square(change_TH).sum() / len(before) / HIDDEN)
        assert found.channel_error == pytest.approx(expected, rel=1e-3, abs=2e-6)


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_in_a_thread_publishes_nothing(tmp_path, monkeypatch, threads):
    def fails(*_, **__):
        raise MemoryError("no more")

    monkeypatch.setattr(bands, "encode_chunk", fails)
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(threads)) if threads else None
        with pytest.raises(MemoryError, match="no more"):
            write(tmp_path / "cache", "lossless", plainly, executor=executor)
    assert not list(layout.shards_dir(tmp_path / "cache").iterdir())


def test_opening_and_listing_read_metadata_only(tmp_path, monkeypatch):
    make_cache(tmp_path)
    opened = []

    def note(path):
        opened.append(path)
        return real(path)

    real = hscache.zarr_reader.open_regular
    monkeypatch.setattr(hscache.zarr_reader, "open_regular", note)
    cache = hscache.open(tmp_path)
    shards = cache.published_shards()
    assert len(shards) > 3
    assert not [path for path in opened if layout.shards_dir(tmp_path) in path.parents]
    num_plan_files = len(opened)
    for number in shards:
        cache.shard_manifest(number)
    assert [path.name for path in opened[num_plan_files:]] == ["zarr.json"] * len(shards)
    opened.clear()
    cache.shard(1)
    assert {path.parent.name for path in opened} == {"000001", "doc_offsets", "doc_rows"}


def test_a_disk_that_stands_still_does_not_stop_who_adds(tmp_path, monkeypatch):
    go, write_chunks = threading.Event(), bands.BandWriter._write_chunks

    def slow(*arguments):
        go.wait()
        write_chunks(*arguments)

    monkeypatch.setattr(bands.BandWriter, "_write_chunks", slow)

    def add(writer, row):
        plainly(writer, row)
        if row == len(LENGTHS) - 1:  # all are in, and nothing is on the disk
            go.set()

    with ThreadPoolExecutor(2) as pool:
        cache = write(tmp_path / "slow", "lossless", add, executor=pool)
    monkeypatch.undo()
    assert contents(cache) == contents(write(tmp_path / "plain", "lossless", plainly))


@pytest.mark.parametrize("failing", [0, 3, 7])
def test_an_error_of_the_disk_reaches_who_adds(failing, tmp_path, monkeypatch):
    calls, write_chunks = itertools.count(), bands.BandWriter._write_chunks

    def fails(*arguments):
        if next(calls) >= failing:
            raise OSError(5, "Input/output error")
        write_chunks(*arguments)

    monkeypatch.setattr(bands.BandWriter, "_write_chunks", fails)
    folder = tmp_path / "cache"
    with ThreadPoolExecutor(2) as pool, pytest.raises(OSError, match="Input/output error"):
        write(folder, "lossless", plainly, executor=pool)
    assert not list(layout.shards_dir(folder).iterdir())  # neither a shard nor a part of one
