"""A damaged shard stops a run by name, or costs it exactly the documents that cannot be read."""

import os
import shutil
import sys
from collections import Counter

import numpy as np
import pytest
import rank_checks
import torch
from forked import context
from safetensors.torch import load_file
from trainer_cache import documents, fit_config, make_cache, metrics_of

from hscache import layout
from hscache.errors import HscacheError, ShardCorruptError
from hscache.reader import open_cache
from hscache.shard import Shard
from trainer.batches import Loader
from trainer.checkpoint import read_state
from trainer.config import SyncConfig
from trainer.fit import fit
from trainer.frozen import load_frozen, target_config
from trainer.ranks import Ranks
from trainer.run_folder import list_checkpoints
from trainer.run_plan import plan_run

CPU = torch.device("cpu")
LENGTHS = np.random.default_rng(4).integers(8, 40, 50).tolist()
QUARANTINED = 20


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    corpus = documents(LENGTHS, held_out=(1,))
    place = tmp_path_factory.mktemp("bad") / "cache"
    return make_cache(place, corpus, shard_tokens=250, quarantine=(QUARANTINED,))


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "cache")


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def load(folder, policy="skip", passes=1, separate=False):
    settings = {"passes": passes, "on_bad_shard": policy, "threads": 2}
    run = plan_run(fit_config(folder, folder / "run", **settings))
    task = run.row_task()
    loader = Loader(run.cache, task, device=CPU, dtype=torch.float32, separate=separate)
    with loader:
        return list(loader.steps())


def ids(steps):
    return [tuple(d for row in rows for d in row.document_ids) for rows, _ in steps]


def anchored(rows):
    return {d for step in rows for d in step}


def no_attributes(shard):
    (shard / "zarr.json").unlink()


def bad_attributes(shard):
    flip(shard / "zarr.json", 100)


def cut(shard):
    os.truncate(shard / "exponent" / "c.0.0.0", 50)


def gone(shard):
    shutil.rmtree(shard / "significand")


def one_bit(shard):
    flip(shard / "significand" / "c.0.0.0", 5)


def offsets(shard):
    flip(shard / "doc_offsets" / "c.0", 5)


@pytest.mark.parametrize("damage", [no_attributes, bad_attributes, cut, gone, one_bit, offsets])
def test_skipping_costs_the_documents_of_the_damage_and_moves_no_other(folder, damage, caplog):
    sound = load(folder)
    plan = open_cache(folder).plan
    lost = set(plan.shard_documents(2))
    assert QUARANTINED not in lost
    damage(layout.shard_dir(folder, 2))
    with pytest.raises(HscacheError, match="shard"):
        load(folder, "stop")
    caplog.clear()
    found = load(folder)
    assert len(found) == len(sound)
    for (rows, end), before, (_, sound_end) in zip(found, ids(sound), sound, strict=True):
        kept = tuple(d for d in before if d not in lost)
        assert tuple(d for row in rows for d in row.document_ids) == kept
        assert [d for d, _ in end.skipped] == [d for d in before if d in lost]
        assert end.skipped_tokens == plan.lengths[[d for d, _ in end.skipped]].sum()
        assert (end.position, end.num_tokens) == (sound_end.position, sound_end.num_tokens)
    assert f"{layout.shard_dir(folder, 2)}" in caplog.text
    assert "skipping documents" in caplog.text


def test_a_process_that_reads_skips_the_same_and_gives_memory_back(folder, made):
    for shard in (2, 3):  # more rows without any document than there are slots of memory
        for name in ("exponent", "significand"):
            for position in range(0, 4000, 500):
                flip(layout.shard_dir(folder, shard) / name / "c.0.0.0", position)
    sound = sum(len(rows) for rows, _ in load(shutil.copytree(made, folder.parent / "s")))
    assert sound - sum(len(rows) for rows, _ in load(folder)) > 5
    found, expected = load(folder, separate=True), load(folder)
    assert ids(found) == ids(expected)
    assert [end for _, end in found] == [end for _, end in expected]


def test_only_the_documents_of_a_damaged_chunk_are_lost(tmp_path):
    corpus = documents([200] * 6)
    folder = make_cache(tmp_path / "c", corpus, shard_tokens=2000)
    flip(layout.shard_dir(folder, 0) / "exponent" / "c.0.0.0", 5)  # layer 0 of tokens 0 to 255
    run = plan_run(fit_config(folder, folder / "run", row_tokens=400, on_bad_shard="skip"))
    loader = Loader(run.cache, run.row_task(), device=CPU, dtype=torch.float32)
    with loader:
        skipped = {pair for _, end in loader.steps() for pair in end.skipped}
    assert skipped == {(0, 0), (1, 0), (0, 1), (1, 1)}


def test_damage_in_a_later_piece_costs_its_own_document_and_no_other(folder, monkeypatch):
    """A document is read in pieces, so a piece's number in the row is no document's place."""
    read, bad = Shard.read_arrays, 7

    def read_arrays(shard, document, out, first=0):
        if document == bad and first:
            raise HscacheError("damaged")
        read(shard, document, out, first)

    monkeypatch.setattr("hscache.shard._PIECE_TOKENS", 4)
    monkeypatch.setattr(Shard, "read_arrays", read_arrays)
    assert {d for _, end in load(folder) for d, _ in end.skipped} == {bad}


def test_a_run_that_skips_says_so_in_metrics_checkpoint_and_at_the_end(folder, tmp_path, capsys):
    one_bit(layout.shard_dir(folder, 2))
    saved = fit(fit_config(folder, tmp_path / "run", on_bad_shard="skip", checkpoint_every=7))
    state = read_state(saved)
    trained = anchored(ids(load(folder)))
    plan = open_cache(folder).plan
    lost = {d for d, _ in state.skipped}
    assert lost
    assert lost <= set(plan.shard_documents(2))
    assert not lost & trained
    assert {p for _, p in state.skipped} == {0, 1}
    assert metrics_of(tmp_path / "run")[-1]["train/skipped_documents"] == len(state.skipped)
    out = capsys.readouterr().out
    assert f"{len(lost)} documents of damaged shards 2" in out
    assert state.tokens == read_state(fit(fit_config(make_sound(tmp_path), tmp_path / "r"))).tokens


def make_sound(tmp_path):
    corpus = documents(LENGTHS, held_out=(1,))
    return make_cache(tmp_path / "s", corpus, shard_tokens=250, quarantine=(QUARANTINED,))


def test_a_sound_cache_gives_the_same_bits_whatever_the_policy(made, tmp_path):
    weights = [
        fit(fit_config(made, tmp_path / policy, on_bad_shard=policy)) / "model.safetensors"
        for policy in ("skip", "stop")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert "train/skipped_documents" not in metrics_of(tmp_path / "stop")[-1]


def test_a_resumed_run_skips_the_same_and_ends_in_the_same_bits(folder, tmp_path):
    one_bit(layout.shard_dir(folder, 2))
    settings = {"on_bad_shard": "skip", "checkpoint_every": 5}
    straight = fit(fit_config(folder, tmp_path / "straight", **settings))
    again = tmp_path / "again"
    found = rank_checks.train(Ranks(), stop=(0, 9), config=fit_config(folder, again, **settings))
    assert "StoppedBySignal" in found["error"]
    resumed = fit(fit_config(folder, again, resume=True, **settings))
    assert (resumed / "model.safetensors").read_bytes() == (
        straight / "model.safetensors"
    ).read_bytes()
    assert read_state(resumed).skipped == read_state(straight).skipped


@pytest.mark.parametrize("mode", ["ddp", "average"])
def test_two_ranks_stay_in_step_and_agree_on_what_was_skipped(pool, folder, tmp_path, mode):
    one_bit(layout.shard_dir(folder, 2))
    bad_attributes(layout.shard_dir(folder, 3))
    sync = SyncConfig(mode=mode, local_steps=3)
    settings = {"on_bad_shard": "skip", "global_batch_rows": 4, "sync": sync}
    alone = rank_checks.train(Ranks(), config=fit_config(folder, tmp_path / "alone", **settings))
    found = pool("train", 2, config=fit_config(folder, tmp_path / "two", **settings))
    assert [rank["error"] for rank in [alone, *found]] == [None] * 3
    read = Counter(d for rank in found for step in rank["ledger"] for d in step)
    assert read == Counter(d for step in alone["ledger"] for d in step)
    states = [read_state(list_checkpoints(tmp_path / name)[-1]) for name in ("alone", "two")]
    assert states[0].skipped
    assert states[0].skipped == states[1].skipped
    assert states[0].tokens == states[1].tokens
    if mode == "ddp":
        a, b = (
            load_file(list_checkpoints(tmp_path / name)[-1] / "model.safetensors")
            for name in ("alone", "two")
        )
        for name, value in a.items():
            np.testing.assert_allclose(value, b[name], rtol=0, atol=2e-5)


def test_a_disk_that_is_gone_is_no_shard_to_skip(folder, tmp_path):
    for shard in layout.list_shards(folder)[1:]:
        one_bit(layout.shard_dir(folder, shard))
        shutil.rmtree(layout.shard_dir(folder, shard) / "exponent")
    with pytest.raises(HscacheError, match=r"more than half of those seen.*verify"):
        fit(fit_config(folder, tmp_path / "run", on_bad_shard="skip"))


READ_BY_TRAINER = [
    "zarr.json", "plan/zarr.json", "frozen/weights.safetensors", "frozen/target_config.json",
    *(f"plan/{name}/{file}" for name in layout.PLAN_ARRAYS for file in ("zarr.json", "c.0")),
    "shards/000002/zarr.json",
    *(f"shards/000002/{name}/c.0" for name in layout.SHARD_SIDE_ARRAYS),
    *(f"shards/000002/{name}/c.0.0.0" for name in ("exponent", "significand")),
    *(f"shards/000002/{name}/zarr.json" for name in (*layout.SHARD_SIDE_ARRAYS, "exponent")),
]  # fmt: skip


@pytest.mark.parametrize("name", READ_BY_TRAINER)
def test_training_checks_every_file_and_names_it(folder, name):
    """Everything `fit` reads, through the functions it reads it with."""

    def read():
        run = plan_run(fit_config(folder, folder / "run", passes=1))
        load(folder, "stop")
        load_frozen(run.cache)
        target_config(run.cache)

    path = folder / name
    size = path.stat().st_size
    for position in (size // 3, size - 2):
        flip(path, position)
        with pytest.raises(ShardCorruptError, match=str(path)):
            read()
        flip(path, position)
    os.truncate(path, size - 1)
    with pytest.raises(ShardCorruptError, match=str(path)):
        read()


def fit_and_note_files(folder, run_dir, names):
    """Train, and write the names of all files that were opened; nothing ends such a hook again."""
    seen = set()
    sys.addaudithook(lambda event, args: seen.add(str(args[0])) if event == "open" else None)
    fit(fit_config(folder, run_dir, passes=1))
    names.write_text("\n".join(seen))


def test_the_list_of_files_is_whole(folder, tmp_path):
    """A file that training opens and the test above does not know would go unchecked."""
    names = tmp_path / "names"
    process = context().Process(target=fit_and_note_files, args=(folder, tmp_path / "run", names))
    process.start()
    process.join()
    assert process.exitcode == 0
    opened = {line for line in names.read_text().splitlines() if line.startswith(str(folder))}
    opened = {line.removeprefix(f"{folder}/") for line in opened}
    opened = {name.replace(f"shards/{n:06d}", "shards/000002") for name in opened for n in range(9)}
    assert len(opened) > 20
    known = {*READ_BY_TRAINER, "shards/000002/significand/zarr.json", ""}
    assert {name for name in opened if not name.startswith("shards/0")} <= known
    assert {name for name in opened if name.startswith("shards/000002/")} <= known
