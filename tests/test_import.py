"""`hscache import`: caches that SpecForge, speculators and DeepSpec write become caches of ours."""

import dataclasses
import gzip
import json
import os
import pickle
import shutil
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peer_maker import BLOCKS, make_samples, write_deepspec, write_specforge, write_speculators
from producer import array_hashes, mtimes, published

import hscache
from hscache import cli, files, layout
from hscache.config import StoreConfig
from hscache.errors import CacheMismatchError, ConfigError, DataError, HscacheError
from hscache.import_cache import Import, import_cache
from hscache.import_config import ImportConfig
from hscache.peer import count_slots, resolve_layers
from trainer.cli import main as trainer


@pytest.fixture(scope="module")
def samples(llama_dir):
    return make_samples(llama_dir)


@pytest.fixture(scope="module")
def sources(tmp_path_factory, samples):
    """The same states as each program stores them; by format: folder, convention, ids."""
    folder = tmp_path_factory.mktemp("peers")
    return {
        "specforge": (write_specforge(folder / "sf", samples, pad_to=40), "block", BLOCKS),
        "speculators": (
            write_speculators(folder / "sp", samples),
            "hidden_states",
            tuple(i + 1 for i in BLOCKS),
        ),
        "deepspec": (write_deepspec(folder / "ds", samples), "block", None),
    }


def settings(shard_dir, source, target, kind="specforge", convention="block", ids=BLOCKS, **more):
    """An ImportConfig with small shards on the CPU."""
    return ImportConfig(
        **{
            "shard_dir": shard_dir,
            "format": kind,
            "source": source,
            "target": str(target),
            "layer_convention": convention,
            "layer_ids": ids,
            "allow_pickle": True,
            "device": "cpu",
            "check_documents": 2,
            "store": StoreConfig(shard_tokens=200, threads=1),
            **more,
        }
    )


def unchecked(*args, **more):
    """The same without running documents through the target."""
    return settings(*args, **{"check_documents": 0, **more})


@pytest.fixture(scope="module")
def imported(tmp_path_factory, sources, llama_dir):
    """A cache of each format, imported without interruption by the command line."""
    caches = {}
    for kind, (source, convention, ids) in sources.items():
        caches[kind] = tmp_path_factory.mktemp("imported") / kind
        line = [
            "import", f"--format={kind}", f"--source={source}", f"--target={llama_dir}",
            f"--layer-convention={convention}", f"--shard-dir={caches[kind]}", "--device=cpu",
            "--store.shard-tokens=200", "--store.threads=1", "--held-out-fraction=0.2",
        ]  # fmt: skip
        line += [f"--layer-ids={','.join(map(str, ids))}"] if ids else []
        line += ["--allow-pickle"] if kind == "specforge" else []
        assert cli.main(line) == 0
    return caches


@pytest.mark.parametrize("kind", ["specforge", "speculators", "deepspec"])
def test_an_imported_cache_holds_what_the_source_held(kind, imported, samples):
    cache = hscache.open(imported[kind])
    states = cache.identity.states
    assert states.target_layer_ids == BLOCKS
    assert states.origin.startswith("imported from ")
    assert states.dtype == "bfloat16"
    assert sorted(cache.plan.source_rows.tolist()) == list(range(len(samples)))
    assert 0 < len(cache.held_out) < len(cache.training)
    for document in cache.documents:
        sample = samples[int(cache.plan.source_rows[document.row])]
        found = document.torch()
        assert torch.equal(found.input_ids.long(), sample.ids)  # padding is gone
        assert torch.equal(found.loss_mask.long(), sample.mask)
        assert torch.equal(found.hidden_states, sample.blocks)


def test_the_three_formats_give_one_cache(imported):
    hashes = [array_hashes(cache) for cache in imported.values()]
    for other in hashes:
        # the root names the origin, the plan its report and numbers of padding
        differ = {name for name in hashes[0] if hashes[0][name] != other[name]}
        assert differ <= {"zarr.json", "plan/zarr.json"}


@pytest.mark.parametrize("kind", ["specforge", "speculators", "deepspec"])
def test_inspect_and_verify_take_an_imported_cache(kind, imported, capsys):
    assert cli.main(["verify", str(imported[kind]), "--deep"]) == 0
    assert cli.main(["inspect", str(imported[kind])]) == 0
    assert "imported from" in capsys.readouterr().out
    manifest = hscache.open(imported[kind]).shard_manifest(0)
    assert manifest.provenance["checked_documents"] == 4
    assert manifest.provenance["largest_error"] < 0.05


def test_a_drafter_trains_from_an_imported_cache(imported, tmp_path):
    line = (
        "fit --drafter.num-hidden-layers 1 --drafter.intermediate-size 64 "
        "--drafter.num-attention-heads 2 --drafter.num-key-value-heads 1 --drafter.head-dim 32 "
        "--drafter.block-size 4 --drafter.mask-token-id 1 --loss.gamma 4 --passes 3 "
        "--row-tokens 128 --anchors-per-row 16 --global-batch-rows 1 --optim.lr 3e-3 "
        "--log-every 1 --device cpu"
    )
    run = [*line.split(), "--shards", str(imported["deepspec"]), "--run-dir", str(tmp_path / "r")]
    assert trainer(run) == 0
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    losses = [x["train/loss"] for x in map(json.loads, lines) if "train/loss" in x]
    assert len(losses) >= 10
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


@pytest.mark.parametrize(
    ("kind", "convention", "ids", "words"),
    [
        # SpecForge's 0-based ids taken for indices into hidden_states: each a block too early
        (
            "specforge",
            "hidden_states",
            BLOCKS,
            ["stated block 0", "block 1 fits", "block 3 fits", "--layer-convention block"],
        ),
        # and ids of hidden_states taken for blocks: each a block too late
        (
            "specforge",
            "block",
            (2, 3),
            ["stated block 2", "block 1 fits", "--layer-ids 1 3"],
        ),
        ("deepspec", "hidden_states", None, ["block 3 fits", "--layer-convention block"]),
    ],
)
def test_a_wrong_convention_is_refused_with_the_layers_that_fit(
    kind, convention, ids, words, sources, llama_dir, tmp_path
):
    with pytest.raises(CacheMismatchError) as caught:
        import_cache(settings(tmp_path, sources[kind][0], llama_dir, kind, convention, ids))
    for word in words:
        assert word in str(caught.value)
    assert not layout.root_file(tmp_path).exists()
    assert published(tmp_path) == []


def test_hidden_states_ids_stated_as_blocks_are_refused(samples, llama_dir, tmp_path):
    """speculators' ids 1, 3 are the outputs of blocks 0 and 2."""
    early = [dataclasses.replace(s, blocks=s.blocks[:, :1]) for s in samples[:6]]
    source = write_speculators(tmp_path / "sp", early)  # block 1: id 2
    right = settings(tmp_path / "a", source, llama_dir, "speculators", "hidden_states", (2,))
    wrong = dataclasses.replace(right, shard_dir=tmp_path / "b", layer_convention="block")
    import_cache(right)
    with pytest.raises(CacheMismatchError, match="--layer-convention hidden_states"):
        import_cache(wrong)


def test_another_model_is_refused(samples, qwen3_dir, sources, tmp_path):
    with pytest.raises(CacheMismatchError, match=r"no block of qwen3 .* another model"):
        import_cache(settings(tmp_path, sources["specforge"][0], qwen3_dir))


def test_states_of_another_document_are_refused(samples, llama_dir, tmp_path):
    mixed = [dataclasses.replace(s) for s in samples[:3]]
    length = min(len(s.ids) for s in mixed)
    for sample, other in zip(mixed, [samples[0], samples[2], samples[1]], strict=True):
        sample.ids, sample.mask = sample.ids[:length], sample.mask[:length]
        sample.blocks, sample.normed = other.blocks[:length], other.normed[:length]
    source = write_deepspec(tmp_path / "ds", mixed[:1] * 3 + mixed[1:2])
    config = settings(tmp_path / "c", source, llama_dir, "deepspec", ids=None, check_documents=4)
    with pytest.raises(CacheMismatchError, match=r"document 3 of .* not those of its ids"):
        import_cache(config)


class Evil:
    """Runs a command when unpickled by anything that obeys pickles."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("gz", [False, True])
def test_a_malicious_pickle_is_refused_and_not_run(gz, samples, llama_dir, tmp_path):
    source = write_specforge(tmp_path / "sf", samples[:3], gz=gz)
    victim = next(source.rglob("data_1.ckpt*"))
    record = {"input_ids": samples[0].ids, "loss_mask": samples[0].mask}
    plain = tmp_path / "evil"
    torch.save({**record, "hidden_states": Evil(tmp_path / "owned")}, plain)
    data = plain.read_bytes()
    victim.write_bytes(gzip.compress(data) if gz else data)
    with pytest.raises(HscacheError, match="more than tensors, and nothing of it was run"):
        import_cache(unchecked(tmp_path / "cache", source, llama_dir))
    assert not (tmp_path / "owned").exists()
    torch.load(plain, weights_only=False)  # the file does bite
    assert (tmp_path / "owned").exists()


def test_a_bare_pickle_is_refused_and_not_run(samples, llama_dir, tmp_path):
    source = write_specforge(tmp_path / "sf", samples[:1])
    next(source.rglob("*.ckpt")).write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(HscacheError):
        import_cache(unchecked(tmp_path / "cache", source, llama_dir))
    assert not (tmp_path / "owned").exists()


def test_packed_files_are_read(samples, llama_dir, tmp_path):
    source = write_specforge(tmp_path / "sf", samples[:4], gz=True)
    cache = import_cache(unchecked(tmp_path / "c", source, llama_dir))
    assert cache.plan.num_tokens == sum(len(s.ids) for s in samples[:4])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_floats_are_rounded_and_it_is_recorded(dtype, samples, llama_dir, tmp_path, caplog):
    kind = getattr(torch, dtype)
    noisy = [
        dataclasses.replace(s, blocks=(s.blocks.float() * 1.0007).to(kind)) for s in samples[:4]
    ]
    source = write_specforge(tmp_path / "sf", noisy)
    cache = import_cache(settings(tmp_path / "c", source, llama_dir))
    assert cache.identity.states.dtype == dtype
    assert cache.identity.states.origin.endswith(f"{dtype} rounded to bfloat16")
    for document in cache.documents:
        sample = noisy[int(cache.plan.source_rows[document.row])]
        assert torch.equal(document.torch().hidden_states, sample.blocks.bfloat16())
    assert ("float16" in caplog.text) == (dtype == "float16")


def published_checks(cache):
    manifests = [cache.shard_manifest(shard) for shard in cache.published_shards()]
    return {manifest.provenance["checked_documents"] for manifest in manifests}


def test_unusable_states_are_quarantined_and_too_many_stop(samples, llama_dir, tmp_path):
    spoilt = [dataclasses.replace(s, blocks=s.blocks.clone()) for s in samples]
    spoilt[5].blocks[2, 1, 3] = float("nan")
    source = write_deepspec(tmp_path / "ds", spoilt)
    config = unchecked(tmp_path / "c", source, llama_dir, "deepspec", ids=None)
    with pytest.raises(HscacheError, match="max_quarantined_share"):
        import_cache(config)
    store = dataclasses.replace(config.store, max_quarantined_share=0.1)
    cache = import_cache(dataclasses.replace(config, store=store))
    found = [q for s in cache.published_shards() for q in cache.shard_manifest(s).quarantined]
    assert [int(cache.plan.source_rows[q.document]) for q in found] == [5]
    assert found[0].reason == "states that are not finite"
    checked = dataclasses.replace(config, store=store, check_documents=24, shard_dir=tmp_path / "d")
    assert published_checks(import_cache(checked)) == {23}
    for sample in spoilt:
        sample.blocks[0] = float("inf")
    source = write_deepspec(tmp_path / "inf", spoilt)
    with pytest.raises(DataError, match=r"none of the documents .* has finite states"):
        import_cache(dataclasses.replace(checked, source=source, shard_dir=tmp_path / "e"))


def test_files_at_odds_with_themselves_are_left_out_and_counted(samples, llama_dir, tmp_path):
    source = write_speculators(tmp_path / "sp", samples)
    few = StoreConfig(shard_tokens=200, threads=1, max_quarantined_share=0.5)
    config = unchecked(
        tmp_path / "c", source, llama_dir, "speculators", "hidden_states", (2, 4), store=few
    )

    def path(number):
        return source / f"hs_{number}.safetensors"

    path(0).write_bytes(path(0).read_bytes()[:-100])  # cut
    shutil.copy(path(2), path(1))  # the states of another row
    shutil.copy(path(2), path(99))  # no such row
    path(3).unlink()  # not made: no fault
    cache = import_cache(config)
    assert set(cache.plan.source_rows.tolist()) == set(range(24)) - {0, 1, 3}
    assert cache.plan.manifest.report["dropped: unreadable or at odds with itself"] == 3
    strict = dataclasses.replace(config, shard_dir=tmp_path / "d", store=StoreConfig())
    with pytest.raises(HscacheError, match=r"1 documents cannot be used.*hs_0.*is it cut"):
        import_cache(strict)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks": lambda x: x[:, :1]}, "expected .* tokens x 2 layers stated x hidden size 64"),
        ({"blocks": lambda x: x[:-1]}, "states of shape"),
        ({"ids": lambda x: x + 200}, "the target's are 0 to 258"),
        ({"mask": lambda x: x * 2}, "other than 0 and 1"),
        ({"mask": lambda x: x[:-1]}, "loss mask values"),
        ({"blocks": lambda x: x.double()}, "dtype float64"),
        ({"ids": lambda x: x + 0.5}, "input_ids holds values of .*float32 that are no whole"),
        ({"mask": lambda x: x * 0.9}, "loss_mask holds values"),
        ({"ids": lambda x: x * 1j}, "no whole numbers"),
    ],
)
def test_a_document_of_wrong_lengths_or_values_is_refused(
    change, words, samples, llama_dir, tmp_path
):
    ((name, apply),) = change.items()
    wrong = dataclasses.replace(samples[0], **{name: apply(getattr(samples[0], name))})
    source = write_specforge(tmp_path / "sf", [wrong])
    with pytest.raises(HscacheError, match=words):
        import_cache(unchecked(tmp_path / "c", source, llama_dir))


def test_a_damaged_byte_in_a_packed_file_is_no_traceback(samples, llama_dir, tmp_path):
    source = write_specforge(tmp_path / "sf", samples[:3], gz=True)
    packed = source / "rows_0-10" / "data_1.ckpt.gz"
    data = bytearray(packed.read_bytes())
    data[20:60] = bytes(40)  # no deflate stream
    packed.write_bytes(data)
    with pytest.raises(HscacheError, match=r"data_1\.ckpt\.gz: it cannot be read, is it cut"):
        import_cache(unchecked(tmp_path / "c", source, llama_dir))


@pytest.mark.parametrize("column", [2, 4])  # after number, shard and tokens: ids, mask
def test_a_deepspec_index_that_points_nowhere_is_refused(column, samples, llama_dir, tmp_path):
    source = write_deepspec(tmp_path / "ds", samples[:3])
    index = bytearray((source / "samples.idx").read_bytes())
    index[8 * column : 8 * column + 8] = b"\xff" * 8
    (source / "samples.idx").write_bytes(index)
    config = unchecked(tmp_path / "c", source, llama_dir, "deepspec", ids=None)
    with pytest.raises(HscacheError, match="its index entry ends at byte 18,446,744"):
        import_cache(config)


def flip(path, share: float) -> None:
    """Change four bytes in the middle of a file."""
    data = bytearray(path.read_bytes())
    start = int(len(data) * share)
    data[start : start + 4] = bytes(byte ^ 0x11 for byte in data[start : start + 4])
    path.write_bytes(data)


def test_states_whose_checksums_do_not_match_are_quarantined(samples, llama_dir, tmp_path):
    source = write_specforge(tmp_path / "sf", samples)
    for number in (3, 7):  # the states are most of a file
        flip(source / "rows_0-10" / f"data_{number}.ckpt", 0.5)
    few = StoreConfig(shard_tokens=200, threads=1, max_quarantined_share=0.2)
    config = dataclasses.replace(settings(tmp_path / "c", source, llama_dir), store=few)
    config = dataclasses.replace(config, check_documents=24)
    cache = import_cache(config)
    found = [q for s in cache.published_shards() for q in cache.shard_manifest(s).quarantined]
    assert sorted(int(cache.plan.source_rows[q.document]) for q in found) == [3, 7]
    assert "checksums do not match" in found[0].reason


def test_a_packed_file_with_a_changed_byte_is_left_out(samples, llama_dir, tmp_path):
    source = write_specforge(tmp_path / "sf", samples, gz=True)
    flip(source / "rows_0-10" / "data_3.ckpt.gz", 0.3)
    flip(source / "rows_0-10" / "data_4.ckpt.gz", 0.6)
    few = StoreConfig(threads=1, max_quarantined_share=0.2)
    cache = import_cache(unchecked(tmp_path / "c", source, llama_dir, store=few))
    assert set(cache.plan.source_rows.tolist()) == set(range(24)) - {3, 4}


@pytest.mark.parametrize("how", ["gone", "cut", "shorter"])
def test_a_file_that_changes_between_the_passes_ends_the_import(
    how, samples, llama_dir, tmp_path, monkeypatch
):
    source = write_specforge(tmp_path / "sf", samples)
    path = source / "rows_0-10" / "data_3.ckpt"
    start = Import.start

    def change(*args):
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, 1000)
        else:
            short = dataclasses.replace(samples[3], blocks=samples[3].blocks[:3])
            shutil.copy(write_specforge(tmp_path / "o", [short]) / "rows_0-10/data_0.ckpt", path)
        return start(*args)

    monkeypatch.setattr(Import, "start", change)
    with pytest.raises(HscacheError, match=r"document 3 of .* has changed since its ids were read"):
        import_cache(unchecked(tmp_path / "c", source, llama_dir))


@pytest.mark.parametrize("offset", [16, 32, 40])
def test_a_deepspec_index_that_points_nowhere_leaves_the_sample_out(
    offset, samples, llama_dir, tmp_path
):
    source = write_deepspec(tmp_path / "ds", samples)
    index = bytearray((source / "samples.idx").read_bytes())
    struct.pack_into("<Q", index, 56 * 3 + offset, 2**63 + 5)
    (source / "samples.idx").write_bytes(index)
    few = StoreConfig(threads=1, max_quarantined_share=0.2)
    config = unchecked(tmp_path / "c", source, llama_dir, "deepspec", ids=None, store=few)
    assert set(import_cache(config).plan.source_rows.tolist()) == set(range(24)) - {3}


def test_a_cut_deepspec_cache_is_refused(sources, samples, llama_dir, tmp_path):
    source = shutil.copytree(sources["deepspec"][0], tmp_path / "ds")
    config = unchecked(tmp_path / "c", source, llama_dir, "deepspec", ids=None)
    with pytest.raises(ConfigError, match="Leave the setting out"):
        import_cache(dataclasses.replace(config, layer_ids=(0, 2)))
    shard = source / "shard-00002.bin"
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(HscacheError, match="its index entry ends at byte"):
        import_cache(config)
    os.truncate(source / "samples.idx", 100)
    with pytest.raises(DataError, match="need 56 each"):
        import_cache(config)
    (source / "manifest.json").unlink()
    with pytest.raises(DataError, match="unfinished one has none"):
        import_cache(config)


class Stop(Exception):
    pass


def test_an_interrupted_import_continues_and_gives_the_same(sources, llama_dir, tmp_path):
    def config(name):
        return unchecked(tmp_path / name, sources["deepspec"][0], llama_dir, "deepspec", ids=None)

    import_cache(config("whole"))
    calls = 0

    def poll():
        nonlocal calls
        calls += 1
        if calls == 24 + 15:  # all of the first pass, some of the second
            raise Stop

    with pytest.raises(Stop):
        import_cache(config("cut"), poll)
    first = published(tmp_path / "cut")
    assert 0 < len(first) < len(published(tmp_path / "whole"))
    assert not list((tmp_path / "cut").rglob(f"{files.TEMPORARY_PREFIX}*"))
    before = mtimes(tmp_path / "cut", first)
    import_cache(config("cut"))
    assert mtimes(tmp_path / "cut", first) == before
    assert array_hashes(tmp_path / "cut") == array_hashes(tmp_path / "whole")


def test_another_source_is_refused_on_an_import(sources, imported, llama_dir, tmp_path):
    cache = shutil.copytree(imported["deepspec"], tmp_path / "cache")
    source, convention, ids = sources["speculators"]
    other = unchecked(cache, source, llama_dir, "speculators", convention, ids)
    with pytest.raises(CacheMismatchError, match=r"states.origin: the cache has 'imported"):
        import_cache(dataclasses.replace(other, held_out_fraction=0.2))


def test_a_dry_run_writes_nothing(sources, llama_dir, tmp_path, capsys):
    source, convention, _ = sources["speculators"]
    line = (
        f"import --format speculators --source {source} --target {llama_dir} --dry-run "
        f"--layer-convention {convention} --layer-ids 2 4 --shard-dir {tmp_path / 'c'}"
    )
    assert cli.main(line.split()) == 0
    assert "[1, 3] (blocks, 0-based)" in capsys.readouterr().out
    assert not (tmp_path / "c").exists()


@given(blocks=st.lists(st.integers(0, 8), min_size=1, unique=True).map(sorted), final=st.booleans())
def test_both_conventions_name_the_same_blocks(blocks, final):
    ids = (*blocks, 9) if final else tuple(blocks)
    a = resolve_layers(ids, "block", 10, may_append_final=True)
    b = resolve_layers(tuple(i + 1 for i in ids), "hidden_states", 10, may_append_final=True)
    assert a == b
    assert a.block_ids == tuple(blocks)  # never the last block
    assert a.fit(len(ids))
    assert a.fit(len(ids) + 1) == (not final)


@pytest.mark.parametrize("ids", [(), (9,), (3, 1), (1, 1), (-1, 2), (1, 10), (9, 1)])
def test_ids_that_name_no_layer_are_refused(ids):
    with pytest.raises(ConfigError, match="which cannot be imported"):
        resolve_layers(ids, "block", 10, may_append_final=False)


@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 4))
def test_slots_are_counted_in_every_shape(tokens, slots, hidden):
    for shape in ((tokens, slots, hidden), (tokens, slots * hidden), (1, tokens, slots * hidden)):
        assert count_slots(shape, tokens, hidden) == slots
        assert count_slots(shape, tokens + 1, hidden) is None
