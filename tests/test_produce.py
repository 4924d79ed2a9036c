"""`hscache produce` end to end on a tiny target: resume, races, refusals, bad states, bad disks."""

import json
import os
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch
from conftest import conversation, write_jsonl
from producer import (
    array_hashes,
    command,
    finish,
    fork,
    mtimes,
    published,
    start,
    temporaries,
    wait_until,
)

import hscache
from hscache import cli, layout
from hscache.config import TargetConfig
from hscache.manifest import Identity, read_group
from hscache.plan import Plan
from hscache.produce import cut_packs
from hscache.target import Target


def run_here(*args, **settings) -> int:
    """Run the command in this process; return its exit code."""
    return cli.main(command(*args, **settings)[3:])


@pytest.fixture(scope="module")
def reference(tmp_path_factory, llama_dir, corpus_file):
    """A cache made without interruption."""
    folder = tmp_path_factory.mktemp("reference") / "cache"
    assert run_here(folder, llama_dir, corpus_file) == 0
    assert len(published(folder)) >= 12
    return folder


def test_a_cache_holds_what_the_target_gives(reference, llama_dir, tokenizer):
    cache = hscache.open(reference)
    target = Target(TargetConfig(path=str(llama_dir), target_layer_ids=(0, 1, 3), device="cpu"))
    assert len(cache.documents) == 40
    for document in cache.documents:
        ids_T = torch.from_numpy(document.input_ids.astype(np.int64))
        alone_TLH = target.capture(ids_T, (0, len(ids_T))).float()
        found_TLH = document.torch().hidden_states.float()
        # bf16 matmuls of other sizes may round the other way
        difference = (found_TLH - alone_TLH).norm() / alone_TLH.norm()
        assert difference < 0.01
        text = tokenizer.decode(document.input_ids[document.loss_mask])
        assert text.endswith(".<|im_end|>")


def test_a_pack_keeps_to_the_budget_and_to_the_order(reference):
    plan = Plan(reference)
    for shard in range(plan.num_shards):
        packs = cut_packs(plan, shard, 130)
        assert [row for pack in packs for row in pack] == list(plan.shard_documents(shard))
        for pack in packs:
            assert pack
            assert sum(plan.lengths[pack]) <= 130 or len(pack) == 1


def test_shards_record_where_they_come_from(reference):
    cache = hscache.open(reference)
    for number in cache.published_shards():
        manifest = cache.shard_manifest(number)
        provenance = manifest.provenance
        assert provenance["device"] == "cpu"
        assert provenance["torch"] == torch.__version__
        assert sum(provenance["documents_per_pack"]) == manifest.num_documents
        assert [s.layer_id for s in manifest.statistics] == [0, 1, 3]


def test_the_frozen_folder_is_complete(reference):
    frozen = layout.frozen_dir(reference)
    config = json.loads((frozen / "target_config.json").read_text())
    assert config["num_hidden_layers"] == 5
    assert (frozen / "tokenizer" / "tokenizer.json").is_file()


def test_a_finished_cache_is_left_alone(reference, llama_dir, corpus_file):
    before = mtimes(reference, published(reference))
    hashes = array_hashes(reference)
    assert run_here(reference, llama_dir, corpus_file) == 0
    assert mtimes(reference, published(reference)) == before
    assert array_hashes(reference) == hashes


def moment_plan(folder):
    return (folder / "plan").exists()


def moment_first_shard_half_written(folder):
    return any((folder / "shards").glob(".tmp-*/exponent/c.*"))


def moment_some_published(folder):
    return len(published(folder)) >= 4


@pytest.mark.parametrize(
    "moment", [moment_plan, moment_first_shard_half_written, moment_some_published]
)
def test_a_killed_run_continues_and_gives_the_same_bits(
    tmp_path, reference, llama_dir, corpus_file, moment
):
    folder = tmp_path / "cache"
    process = fork(folder, llama_dir, corpus_file)
    assert wait_until(lambda: moment(folder), process)
    process.kill()
    finish(process)
    done = published(folder)
    assert len(done) < len(published(reference))
    before = mtimes(folder, done)
    assert run_here(folder, llama_dir, corpus_file) == 0
    assert mtimes(folder, done) == before
    assert array_hashes(folder) == array_hashes(reference)
    assert not temporaries(folder)
    assert not list((folder / "producers").iterdir())


def test_two_producers_share_the_work_and_one_may_be_killed(
    tmp_path, reference, llama_dir, corpus_file
):
    folder = tmp_path / "cache"
    first, second = (start(folder, llama_dir, corpus_file) for _ in range(2))
    try:
        assert wait_until(lambda: len(published(folder)) >= 2, second)
        first.send_signal(signal.SIGKILL)
        # It is not reaped yet: a zombie is dead too.
        code, output = finish(second)
        assert code == 0, output
    finally:
        first.kill()
        finish(first)
    assert array_hashes(folder).items() >= array_hashes(reference).items()
    assert run_here(folder, llama_dir, corpus_file) == 0
    assert array_hashes(folder) == array_hashes(reference)


def test_two_producers_finish_one_cache(tmp_path, reference, llama_dir, corpus_file):
    folder = tmp_path / "cache"
    processes = [fork(folder, llama_dir, corpus_file) for _ in range(2)]
    for process in processes:
        code, output = finish(process)
        assert code == 0, output
    assert array_hashes(folder) == array_hashes(reference)
    assert not temporaries(folder)


def test_sigterm_leaves_nothing_over_and_says_143(tmp_path, reference, llama_dir, corpus_file):
    folder = tmp_path / "cache"
    process = fork(folder, llama_dir, corpus_file)
    assert wait_until(lambda: len(published(folder)) >= 2, process)
    process.terminate()
    code, output = finish(process)
    assert code == 143, output
    assert "stopped by SIGTERM; what was published stays." in output
    assert not temporaries(folder)
    assert not list((folder / "producers").iterdir())
    hashes = array_hashes(reference)
    assert array_hashes(folder).items() <= hashes.items()
    assert run_here(folder, llama_dir, corpus_file) == 0
    assert array_hashes(folder) == hashes


def test_a_lost_shard_a_lost_plan_and_lost_weights_are_remade(
    tmp_path, reference, llama_dir, corpus_file
):
    folder = shutil.copytree(reference, tmp_path / "cache")
    for lost in (layout.shard_dir(folder, 3), layout.plan_dir(folder), layout.frozen_dir(folder)):
        shutil.rmtree(lost)
    assert run_here(folder, llama_dir, corpus_file) == 0
    assert array_hashes(folder) == array_hashes(reference)


@pytest.mark.parametrize("debris", ["an empty folder", "half a shard", "an empty file"])
def test_a_shards_name_alone_is_not_a_shard(
    tmp_path, reference, llama_dir, corpus_file, debris, capsys
):
    folder = shutil.copytree(reference, tmp_path / "cache")
    shard = layout.shard_dir(folder, 2)
    (shard / "zarr.json").unlink()
    if debris != "half a shard":
        shutil.rmtree(shard)
        shard.mkdir() if debris == "an empty folder" else shard.touch()
    assert run_here(folder, llama_dir, corpus_file) == 1
    assert f"{shard} is no shard" in capsys.readouterr().err


def change_weights(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.4.mlp.up_proj.weight"] += 1  # of a block that is not even loaded
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_template(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "{# a comment #}")


def change_config(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-5}))


def change_dataset(path):
    path.write_text(path.read_text().replace("alpha", "alphA", 1))


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"store__seed": "1"}, {"content.seed"}),
        ({"target__target_layer_ids": "0,2,3"}, {"states.target_layer_ids"}),
        ({"target__dtype": "float32"}, {"states.dtype", "states.frozen_sha256"}),
        ({"store__codec": "none"}, {"encoding.codec"}),
        ({"data__max_tokens": "255"}, {"content.max_tokens"}),
        ({"data__over_long": "drop"}, {"content.over_long"}),
        ({"store__shard_tokens": "202"}, {"content.shard_tokens"}),
        ({"data__held_out_fraction": "0.5"}, {"content.num_held_out_shards"}),
        ({"dataset": change_dataset}, {"content.corpus_sha256"}),
        ({"folder": change_weights}, {"states.weights_sha256"}),
        ({"folder": change_template}, {"states.template_sha256"}),
        ({"folder": change_config}, {"states.config_sha256", "states.frozen_sha256"}),
    ],
)
def test_changed_settings_are_refused_field_by_field(
    tmp_path, reference, llama_dir, corpus_file, change, fields, capsys
):
    settings = dict(change)
    target, corpus = llama_dir, corpus_file
    if edit := settings.pop("folder", None):
        target = shutil.copytree(llama_dir, tmp_path / "target")
        edit(target)
    if edit := settings.pop("dataset", None):
        corpus = shutil.copy(corpus_file, tmp_path / "train.jsonl")
        edit(corpus)
    before = array_hashes(reference)
    assert run_here(reference, target, corpus, **settings) == 1
    message = capsys.readouterr().err
    assert f"{reference} holds another cache than this run would make:" in message
    named = {line.split(":")[0].strip() for line in message.splitlines() if line[:2] == "  "}
    # Other documents, or another order of them, change the counts as well.
    assert named == fields if fields.isdisjoint(COUNTED) else fields <= named
    assert array_hashes(reference) == before
    assert not temporaries(reference)


COUNTED = {"content.corpus_sha256", "content.shard_tokens", "content.num_held_out_shards"}


def test_what_is_free_to_change_is_not_refused(tmp_path, reference, llama_dir, corpus_file):
    target = shutil.copytree(llama_dir, tmp_path / "moved")
    corpus = shutil.copy(corpus_file, tmp_path / "renamed.jsonl")
    folder = shutil.copytree(reference, tmp_path / "cache")
    shutil.rmtree(layout.shard_dir(folder, 3))
    changed = {"token_budget": "512", "store__threads": "2"}
    assert run_here(folder, target, corpus, **changed) == 0
    assert read_group(layout.root_file(folder), Identity).states.target == str(llama_dir)


@pytest.mark.parametrize("name", ["plan", "frozen"])
def test_what_is_left_of_a_start_with_other_settings_is_refused(
    tmp_path, reference, llama_dir, corpus_file, name, capsys
):
    # As if killed before the root was written; a plan of other shards has the same tokens.
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.copytree(reference / name, folder / name)
    settings = {"store__shard_tokens": "210"} if name == "plan" else {"target__dtype": "float32"}
    assert run_here(folder, llama_dir, corpus_file, **settings) == 1
    assert f"Delete {folder / name} and run" in capsys.readouterr().err
    assert run_here(folder, llama_dir, corpus_file) == 0
    assert array_hashes(folder) == array_hashes(reference)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory, llama_dir):
    """A target whose embedding of "~" is NaN."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(llama_dir, tmp_path_factory.mktemp("poisoned") / "target")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][vocabulary["~"]] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def poisoned_rows(corpus_file, rows):
    found = [json.loads(line) for line in corpus_file.read_text().splitlines()]
    for row in rows:
        found[row] = conversation("Hi?", f"~ {row} ~")
    return found


def test_a_document_with_nan_states_is_quarantined_and_the_run_goes_on(
    tmp_path, poisoned, llama_dir, corpus_file, caplog
):
    corpus = write_jsonl(tmp_path / "rows.jsonl", poisoned_rows(corpus_file, [11]))
    share = {"store__max_quarantined_share": "0.05"}
    assert run_here(tmp_path / "bad", poisoned, corpus, **share) == 0
    assert run_here(tmp_path / "good", llama_dir, corpus) == 0
    bad, good = hscache.open(tmp_path / "bad"), hscache.open(tmp_path / "good")
    refused = [
        (q.document, q.reason)
        for shard in bad.published_shards()
        for q in bad.shard_manifest(shard).quarantined
    ]
    [row] = [document.row for document in bad.documents if document.source_row == 11]
    assert refused == [(row, "states that are not finite")]
    assert f"document {row} (input row 11) quarantined: states that are not finite" in caplog.text
    for document, twin in zip(bad.documents, good.documents, strict=True):
        if document.row != row:
            bits = document.hidden_states().view(np.uint16)
            np.testing.assert_array_equal(bits, twin.hidden_states().view(np.uint16))


def test_too_many_bad_documents_stop_the_run_with_their_ids_also_after_a_restart(
    tmp_path, poisoned, corpus_file, capsys
):
    corpus = write_jsonl(tmp_path / "rows.jsonl", poisoned_rows(corpus_file, [3, 11, 20, 35]))
    share = {"store__max_quarantined_share": "0.06"}  # 2 of 40
    folder = tmp_path / "cache"
    for _ in range(2):
        assert run_here(folder, poisoned, corpus, **share) == 1
        error = capsys.readouterr().err
        assert "3 documents gave unusable states, more than" in error
        bad = [d.row for d in hscache.open(folder).documents if d.source_row in (3, 11, 20, 35)]
        assert f"documents {', '.join(map(str, bad[:3]))}; the last (input row" in error
        assert not temporaries(folder)
    assert run_here(folder, poisoned, corpus, store__max_quarantined_share="0.5") == 0


def test_a_shard_of_bad_documents_alone_is_published_empty(tmp_path, poisoned, corpus_file):
    corpus = write_jsonl(tmp_path / "rows.jsonl", poisoned_rows(corpus_file, [3]))
    changes = {"store__max_quarantined_share": "0.5", "store__shard_tokens": "1"}
    assert run_here(tmp_path / "cache", poisoned, corpus, **changes) == 0
    cache = hscache.open(tmp_path / "cache")
    [document] = [d for d in cache.documents if d.source_row == 3]
    shard = cache.shard(document.shard_number)
    assert (shard.manifest.state, shard.manifest.num_tokens) == ("empty", 0)
    assert shard.read_bits(0, 0).shape == (0, 3, 64)


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts (or remounts) a tmpfs with options, and its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options, check=True):
        line = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(line, check=check, capture_output=True, text=True)

    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    attempt = mount("size=1m", check=False)
    if attempt.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {attempt.stderr.strip()}")
    yield mount, folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("limit", "more"), [("size=640k", "size=64m"), ("nr_inodes=150,size=64m", "nr_inodes=9999")]
)
def test_a_full_disk_is_named_and_a_rerun_with_room_completes(
    small_disk, reference, llama_dir, corpus_file, limit, more, capsys
):
    mount, disk = small_disk
    mount(f"remount,{limit}")
    folder = disk / "cache"
    assert run_here(folder, llama_dir, corpus_file) == 1
    error = capsys.readouterr().err
    assert f"disk full while writing {folder}" in error
    assert "free some space and run the same command again" in error
    assert "Traceback" not in error
    done = published(folder)
    assert 0 < len(done) < len(published(reference))
    assert not temporaries(folder)
    hashes = array_hashes(reference)
    assert array_hashes(folder).items() <= hashes.items()
    before = mtimes(folder, done)
    mount(f"remount,{more}")
    assert run_here(folder, llama_dir, corpus_file) == 0
    assert mtimes(folder, done) == before
    assert array_hashes(folder) == hashes


@pytest.mark.parametrize(
    "limit",
    ["size=4k", "size=16k", "size=64k", "size=96k", "nr_inodes=3", "nr_inodes=5", "nr_inodes=30"],
)
def test_a_disk_too_small_for_the_plan_is_named_too(
    small_disk, llama_dir, corpus_file, limit, capsys
):
    mount, disk = small_disk
    mount(f"remount,{limit}")
    assert run_here(disk / "cache", llama_dir, corpus_file) == 1
    assert f"disk full while writing {disk / 'cache'}" in capsys.readouterr().err


def test_a_read_only_disk_is_named_at_once(small_disk, llama_dir, corpus_file, capsys):
    mount, disk = small_disk
    (disk / "cache" / "shards").mkdir(parents=True)
    mount("remount,ro")
    assert run_here(disk / "cache", llama_dir, corpus_file) == 1
    assert f"cannot write to {disk / 'cache'}: it is read-only" in capsys.readouterr().err
    assert run_here(disk / "new", llama_dir, corpus_file) == 1
    assert f"cannot write to {disk / 'new'}: Read-only file system" in capsys.readouterr().err


def test_a_file_in_the_way_is_named(tmp_path, llama_dir, corpus_file, capsys):
    (tmp_path / "cache").touch()
    assert run_here(tmp_path / "cache", llama_dir, corpus_file) == 1
    assert f"cannot write to {tmp_path / 'cache'}: Not a directory" in capsys.readouterr().err


def test_shards_without_a_root_are_refused(tmp_path, reference, llama_dir, corpus_file, capsys):
    folder = tmp_path / "cache"
    shutil.copytree(reference / "shards", folder / "shards")
    assert run_here(folder, llama_dir, corpus_file) == 1
    assert "has shards but no root zarr.json" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_and_touches_nothing(tmp_path, llama_dir, corpus_file, capsys):
    line = command(tmp_path / "cache", llama_dir, corpus_file)[3:]
    assert cli.main([*line, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "rows in" in printed
    assert "supervised share" in printed
    assert "[0, 1, 3] of 5" in printed
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_disk": "100kB"},
        {"max_disk": "100kB", "retain": "window", "passes": "2"},
        {"max_disk": "900PB", "retain": "window", "passes": "2"},
    ],
)
def test_a_dry_run_refuses_a_budget_in_the_words_of_the_run(
    tmp_path, llama_dir, corpus_file, capsys, settings
):
    line = command(tmp_path / "cache", llama_dir, corpus_file, **settings)[3:]
    code = cli.main([*line, "--dry-run"])
    said = capsys.readouterr()
    assert not (tmp_path / "cache").exists()
    if settings["max_disk"] == "900PB":
        assert code == 0
        [row] = [x for x in said.out.splitlines() if x.startswith("max_disk")]
        assert cli.main(line) == 0
        window = hscache.open(tmp_path / "cache").identity.window
        assert f"{window.shards} shards at a time, {window.reserve} more in reserve" in row
        capsys.readouterr()
        without = command(tmp_path / "cache", llama_dir, corpus_file)[3:]
        assert cli.main([*without, "--dry-run"]) == cli.main(without) == 1
        assert capsys.readouterr().err.count("window.shards: the cache has") == 2
    else:
        assert (code, cli.main(line)) == (2, 2)
        assert said.err.splitlines()[-1] == capsys.readouterr().err.splitlines()[-1]
        assert "max_disk" in said.err


@pytest.mark.parametrize(
    ("settings", "code", "complaint"),
    [
        ({"target__target_layer_ids": "0,9"}, 2, "expected increasing block numbers from 0 to 3"),
        ({"token_budget": "100"}, 2, "a document must fit into one pack"),
        ({"store__codec": "zip"}, 2, "store.codec"),
        ({"store__threads": "0"}, 2, "store.threads is 0"),
        ({"data__train": "/nowhere.jsonl"}, 1, "/nowhere.jsonl does not exist"),
    ],
)
def test_bad_settings_exit_with_their_code(
    tmp_path, llama_dir, corpus_file, settings, code, complaint, capsys
):
    assert run_here(tmp_path / "cache", llama_dir, corpus_file, **settings) == code
    assert complaint in capsys.readouterr().err


def test_documents_beyond_the_targets_context_are_refused(llama_dir, tmp_path, capsys):
    folder = shutil.copytree(llama_dir, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    corpus = write_jsonl(tmp_path / "rows.jsonl", [conversation("alpha?", "beta " * 30)])
    assert run_here(tmp_path / "cache", folder, corpus) == 2
    error = capsys.readouterr().err
    assert "target was made for 20" in error
    assert "data.max_tokens" in error


def test_dry_run_refuses_to_continue_a_cache_of_other_documents(
    llama_dir, corpus_file, tmp_path, capsys
):
    folder = tmp_path / "cache"
    assert run_here(folder, llama_dir, corpus_file) == 0
    assert cli.main([*command(folder, llama_dir, corpus_file)[3:], "--dry-run"]) == 0
    changed = command(folder, llama_dir, corpus_file, store__shard_tokens="300")[3:]
    assert cli.main([*changed, "--dry-run"]) == 1
    assert "content.shard_tokens: the cache has 200, this run 300" in capsys.readouterr().err
