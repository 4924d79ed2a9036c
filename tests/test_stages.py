"""Stages that run ahead, on a CPU: the same shards, whatever was guessed, failed or did not fit."""

import itertools
import logging

import numpy as np
import pytest
import torch
from producer import array_hashes, command, published, temporaries
from torch.utils._python_dispatch import TorchDispatchMode

from hscache import cli, layout, measures, produce
from hscache.config import TargetConfig
from hscache.content import facts
from hscache.manifest import ShardManifest, read_group
from hscache.measures import document_facts, document_sums, measure, split_into
from hscache.plan import Plan
from hscache.planes import decode, encode, to_float32
from hscache.stages import Stages, cut
from hscache.target import Target

OFFSETS = [0, 1, 5, 13, 14, 40]


def run_here(*args, **settings) -> int:
    return cli.main(command(*args, **{"store__shard_tokens": 700, **settings})[3:])


@pytest.fixture
def ahead(monkeypatch):
    """Let a CPU run ahead as a GPU does."""
    monkeypatch.setattr(produce, "_runs_ahead", lambda target: True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, llama_dir, corpus_file):
    """A cache made without running ahead."""
    folder = tmp_path_factory.mktemp("plain") / "cache"
    assert run_here(folder, llama_dir, corpus_file, token_budget=256) == 0
    return folder


def states(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(OFFSETS[-1], 3, 32, generator=generator).bfloat16()


def spoil(values, how):
    if how == "nan":
        values[6, 1, 3] = float("nan")
    elif how == "infinite":
        values[6, 1, 3] = float("-inf")
    elif how == "zero":
        values[6, 1] = 0
        values[6, 1, ::2] = -0.0
    elif how == "flat":
        values[6, 1] = 0.5
    elif how == "repeated":
        values[5:13, 2] = values[5, 2]
    elif how == "large":
        values[6, 1] *= 1e30


@pytest.mark.parametrize("how", ["sound", "nan", "infinite", "zero", "flat", "repeated", "large"])
def test_a_device_finds_the_facts_that_the_host_finds(how, monkeypatch):
    monkeypatch.setattr(measures, "_ROWS", 5)
    values = states()
    spoil(values, how)
    measured = measure(values, OFFSETS, "lossless")
    bits = values.view(torch.int16).numpy().view(np.uint16)
    for index, (begin, end) in enumerate(itertools.pairwise(OFFSETS)):
        found, expected = document_facts(measured, begin, end), facts(bits[begin:end])
        for name in ("finite", "zero_row", "flat_row", "repeated"):
            assert getattr(found, name) == getattr(expected, name), (name, index)
        np.testing.assert_allclose(found.norms_TL, expected.norms_TL, rtol=1e-5)
        if how not in ("nan", "infinite", "large"):
            sums, exact_TLH = document_sums(measured, index, begin, end), values[begin:end].double()
            assert sums.num_tokens == end - begin
            for name, exact in {
                "squares_LH": exact_TLH.square().sum(dim=0),
                "norms_L": exact_TLH.norm(dim=2).sum(dim=0),
                "max_L": exact_TLH.abs().amax(dim=(0, 2)),
            }.items():
                np.testing.assert_allclose(getattr(sums, name), exact, rtol=1e-5)


@pytest.mark.parametrize("codec", ["lossless", "none", "bitround4", "fp8"])
def test_planes_are_those_of_the_host(codec, monkeypatch):
    monkeypatch.setattr(measures, "_ROWS", 7)
    every_bit_pattern = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    values = every_bit_pattern.view(512, 2, 64)
    if codec in ("bitround4", "fp8"):
        values = values[values.isfinite().all(dim=2).all(dim=1)]
    bits = values.view(torch.int16).numpy().view(np.uint16)
    buffer = torch.full((2 * values.numel() + 5,), 99, dtype=torch.uint8)
    arrays = split_into(values, codec, buffer)
    if "bits" in arrays:
        arrays = encode(arrays["bits"], codec)
    for name, expected in encode(bits, codec).items():
        np.testing.assert_array_equal(arrays[name], expected)


@pytest.mark.parametrize("codec", ["lossless", "bitround4", "fp8"])
def test_a_device_finds_what_a_lossy_codec_changes(codec, monkeypatch):
    monkeypatch.setattr(measures, "_ROWS", 5)
    values = states()
    measured = measure(values, OFFSETS, codec)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    for index, (begin, end) in enumerate(itertools.pairwise(OFFSETS)):
        found = document_sums(measured, index, begin, end).errors_LH
        if codec == "lossless":
            assert found is None
            continue
        after = to_float32(decode(encode(bits[begin:end], codec), codec)).astype(np.float64)
        expected = np.square(after - to_float32(bits[begin:end])).sum(axis=0)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-30)


class Operations(TorchDispatchMode):
    """Counts what would be kernels."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("codec", ["lossless", "fp8"])
def test_many_documents_take_no_more_kernels_than_one(codec):
    counts = []
    for offsets in ([0, 40], OFFSETS, list(range(41))):
        with Operations() as operations:
            measure(states(), offsets, codec)
        counts.append(operations.count)
    assert counts == [counts[0]] * 3


def same_arrays(folder, other):
    found, expected = ({**array_hashes(f)} for f in (folder, other))
    arrays = [name for name in expected if name.startswith("shards/")]
    assert len(arrays) >= 4 * 8
    assert {name: found.get(name) for name in arrays} == {name: expected[name] for name in arrays}


def manifest_of(folder, shard):
    return read_group(layout.shard_dir(folder, shard) / "zarr.json", ShardManifest)


def provenance_of(folder, shard):
    return manifest_of(folder, shard).provenance


@pytest.mark.parametrize("codec", ["lossless", "fp8"])
def test_running_ahead_changes_no_array(
    codec, plain, tmp_path, llama_dir, corpus_file, ahead, caplog
):
    caplog.set_level(logging.INFO)
    expected, folder = plain, tmp_path / "cache"
    settings = {"token_budget": 256, "store__codec": codec, "target__last_hidden": codec == "fp8"}
    if codec != "lossless":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(produce, "_runs_ahead", lambda target: False)
            expected = tmp_path / "plain"
            assert run_here(expected, llama_dir, corpus_file, **settings) == 0
    assert run_here(folder, llama_dir, corpus_file, **settings) == 0
    same_arrays(folder, expected)
    statistics = [manifest_of(f, 3).statistics for f in (folder, expected)]
    for found, exact in zip(*statistics, strict=True):
        assert found.mean_norm == pytest.approx(exact.mean_norm, rel=1e-5)
    provenance = provenance_of(folder, 3)
    assert set(provenance["busy"]) == {"forward", "measure and copy", "check and write", "publish"}
    assert provenance["limit"] in provenance["busy"]
    assert sum(provenance["documents_per_pack"]) == len(Plan(folder).shard_documents(3))


def make_stages(folder, llama_dir, token_budget=256, **options):
    target = Target(TargetConfig(path=str(llama_dir), target_layer_ids=(0, 1, 3), device="cpu"))
    return Stages(Plan(folder), target, "lossless", token_budget, **options)


def test_a_wrong_guess_is_thrown_away(plain, llama_dir):
    guesses = [0, 2]
    running = make_stages(plain, llama_dir, likely_next=lambda: guesses.pop() if guesses else None)
    for shard in (1, 2, 3):
        expected = [d for d, _ in make_stages(plain, llama_dir).states(shard)]
        assert [document for document, _ in running.states(shard)] == expected


def test_a_guess_that_changes_leaves_no_pack_of_the_first_before_the_second(plain, llama_dir):
    """Another producer takes a small shard that has been computed ahead in whole."""
    guesses = iter([2])
    running = make_stages(
        plain, llama_dir, token_budget=10_000, likely_next=lambda: next(guesses, 3)
    )
    for shard in (1, 3):
        expected = [d for d, _ in make_stages(plain, llama_dir).states(shard)]
        assert [document for document, _ in running.states(shard)] == expected


def failing(monkeypatch, decide):
    """Let launches fail with what `decide(tokens, number)` raises; return their sizes."""
    launch, sizes = Stages._launch, []

    def fails(self, shard, documents):
        sizes.append(sum(int(self._plan.lengths[document]) for document in documents))
        decide(sizes[-1], len(sizes))
        return launch(self, shard, documents)

    monkeypatch.setattr(Stages, "_launch", fails)
    return sizes


def out_of_memory_above(limit):
    def decide(tokens, number):
        if tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return decide


def test_out_of_memory_halves_the_packs_once_and_remembers(
    plain, tmp_path, llama_dir, corpus_file, ahead, monkeypatch, caplog
):
    sizes = failing(monkeypatch, out_of_memory_above(150))
    assert run_here(tmp_path / "cache", llama_dir, corpus_file, token_budget=256) == 0
    same_arrays(tmp_path / "cache", plain)
    warnings = [r.getMessage() for r in caplog.records if "did not fit" in r.getMessage()]
    assert len(warnings) == 1
    assert sum(tokens > 150 for tokens in sizes) == 1
    budgets = [provenance_of(tmp_path / "cache", shard)["token_budget"] for shard in range(4)]
    assert len(set(budgets)) == 1


def test_packs_halved_within_a_shard_are_run_again_as_they_were(
    tmp_path, llama_dir, corpus_file, ahead, monkeypatch, capsys
):
    folder = tmp_path / "cache"

    def memory_shrinks(tokens, number):
        out_of_memory_above(150 if number > 2 else 256)(tokens, number)

    with monkeypatch.context() as patch:
        failing(patch, memory_shrinks)
        assert run_here(folder, llama_dir, corpus_file, token_budget=256) == 0
    provenance = provenance_of(folder, 0)
    packs = cut(Plan(folder).shard_documents(0), Plan(folder).lengths, provenance["token_budget"])
    assert provenance["documents_per_pack"] != [len(pack) for pack in packs]
    flags = ["--replay", "50", "--target", str(llama_dir), "--device", "cpu"]
    assert cli.main(["verify", str(folder), *flags]) == 0
    assert "packs: bit-equal" in capsys.readouterr().out


def test_packs_wait_for_earlier_ones_before_they_are_halved(plain, llama_dir, monkeypatch):
    running = make_stages(plain, llama_dir)

    def no_room_for_two(tokens, number):
        if running._launched:
            raise torch.OutOfMemoryError("CUDA out of memory")

    failing(monkeypatch, no_room_for_two)
    expected = list(Plan(plain).shard_documents(1))
    assert [document for document, _ in running.states(1)] == expected
    assert running.token_budget == 256


def test_states_without_room_to_measure_them_are_measured_again(
    plain, tmp_path, llama_dir, corpus_file, ahead, monkeypatch, caplog
):
    calls = itertools.count()

    def cramped(*arguments):
        if next(calls) in (1, 4):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(*arguments)

    monkeypatch.setattr("hscache.stages.measure", cramped)
    assert run_here(tmp_path / "cache", llama_dir, corpus_file, token_budget=256) == 0
    same_arrays(tmp_path / "cache", plain)
    assert not any("did not fit" in record.getMessage() for record in caplog.records)


def test_states_that_cannot_be_measured_end_the_run_by_name(
    plain, tmp_path, llama_dir, corpus_file, ahead, monkeypatch, capfd
):
    def cramped(states_TLH, *arguments):
        if len(states_TLH) > 2:  # as many as warm it up
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(states_TLH, *arguments)

    monkeypatch.setattr("hscache.stages.measure", cramped)
    assert run_here(tmp_path / "cache", llama_dir, corpus_file, token_budget=256) == 1
    error = capfd.readouterr().err
    assert "shard 0, documents" in error
    assert "CUDA out of memory" in error
    assert not temporaries(tmp_path / "cache")


def test_halving_twice_warns_once(plain, llama_dir, monkeypatch, caplog):
    running = make_stages(plain, llama_dir, token_budget=700)
    sizes = failing(monkeypatch, out_of_memory_above(200))
    expected = list(Plan(plain).shard_documents(1))
    assert [document for document, _ in running.states(1)] == expected
    assert sum(tokens > 200 for tokens in sizes) == 2
    assert sum("did not fit" in record.getMessage() for record in caplog.records) == 1


def test_a_document_that_does_not_fit_alone_is_named(
    tmp_path, llama_dir, corpus_file, ahead, monkeypatch, capfd
):
    failing(monkeypatch, out_of_memory_above(40))
    assert run_here(tmp_path / "cache", llama_dir, corpus_file) == 1
    assert "alone does not fit the memory of cpu" in capfd.readouterr().err
    assert not temporaries(tmp_path / "cache")


def test_a_gpu_error_names_the_documents_and_publishes_nothing(
    plain, tmp_path, llama_dir, corpus_file, ahead, monkeypatch, capfd
):
    folder = tmp_path / "cache"

    def decide(tokens, number):
        if number == 8:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    with monkeypatch.context() as patch:
        failing(patch, decide)
        assert run_here(folder, llama_dir, corpus_file, token_budget=256) == 1
    error = capfd.readouterr().err
    assert "shard" in error
    assert "illegal memory access" in error
    assert "more lines" not in error
    done = published(folder)
    assert done
    assert not temporaries(folder)
    assert run_here(folder, llama_dir, corpus_file, token_budget=256) == 0
    same_arrays(folder, plain)


def test_packs_are_cut_in_order_and_within_the_budget():
    lengths = np.array([5, 5, 7, 30, 1])
    assert cut([0, 1, 2, 3, 4], lengths, 12) == [[0, 1], [2], [3], [4]]
