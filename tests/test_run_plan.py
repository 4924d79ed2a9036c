"""What is refused before the first step, and which shards a partial run takes."""

import dataclasses
import shutil

import pytest
import torch
from trainer_cache import EOS, PAD, VOCAB, documents, fit_config, make_cache

from hscache import layout
from hscache.errors import (
    CacheIncompleteError,
    CacheMismatchError,
    ConfigError,
    DataError,
    ShardCorruptError,
)
from hscache.manifest import encode_group
from hscache.reader import open_cache
from trainer.checkpoint import read_state
from trainer.fit import fit
from trainer.run_arithmetic import describe
from trainer.run_plan import plan_run

CORPUS = documents([30] * 20, held_out=(0, 1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("plan") / "cache", CORPUS)


@pytest.fixture
def partial(tmp_path):
    """Shard 0 is held out, 1..5 are for training, 2 and 4 are not there."""
    return make_cache(tmp_path / "partial", CORPUS, leave_out=(2, 4))


def plan_of(folder, **changes):
    return plan_run(fit_config(folder, folder / "run", **changes))


def test_unfinished_cache_is_refused_with_counts(partial):
    with pytest.raises(CacheIncompleteError, match="3 of 5 training shards"):
        plan_of(partial)


def test_partial_run_takes_what_is_there_says_so_and_records_it(partial, tmp_path, caplog):
    run = plan_of(partial, allow_partial=True)
    assert run.schedule.shards == (1, 3, 5)
    assert run.schedule.stride == 3
    assert "training on 3 of 5 shards (60 %)" in caplog.text
    checkpoint = fit(fit_config(partial, tmp_path / "run", allow_partial=True))
    assert read_state(checkpoint).schedule["shards"] == [1, 3, 5]


def test_partial_run_resumes_with_its_own_shards_after_more_were_published(
    whole, partial, tmp_path
):
    run_dir = tmp_path / "run"
    checkpoint = fit(fit_config(partial, run_dir, allow_partial=True))
    shutil.copytree(layout.shard_dir(whole, 2), layout.shard_dir(partial, 2))
    assert fit(fit_config(partial, run_dir, allow_partial=True, resume=True)) == checkpoint
    assert plan_of(partial, allow_partial=True).schedule.shards == (1, 2, 3, 5)
    shutil.copytree(layout.shard_dir(whole, 4), layout.shard_dir(partial, 4))
    with pytest.raises(CacheMismatchError, match=r"schedule\.shards"):
        fit(fit_config(partial, run_dir, resume=True))
    shutil.rmtree(layout.shard_dir(partial, 3))
    with pytest.raises(CacheMismatchError, match=r"schedule\.shards"):
        fit(fit_config(partial, run_dir, allow_partial=True, resume=True))


def test_cache_without_a_training_shard_is_refused(tmp_path):
    folder = make_cache(tmp_path / "c", CORPUS, leave_out=range(1, 9))
    with pytest.raises(CacheIncompleteError, match="0 of 5"):
        plan_of(folder)
    with pytest.raises(CacheIncompleteError, match="nothing to train on"):
        plan_of(folder, allow_partial=True)


def test_freed_shards_are_counted_and_refused(whole, tmp_path):
    """A tombstone: attributes without arrays."""
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    manifest = dataclasses.replace(open_cache(folder).shard_manifest(3), state="freed")
    where = layout.shard_dir(folder, 3)
    shutil.rmtree(where)
    where.mkdir()
    (where / "zarr.json").write_bytes(encode_group(manifest))
    with pytest.raises(
        CacheIncompleteError, match="4 of 5 training shards are there, 1 were freed"
    ):
        plan_of(folder)
    assert plan_of(folder, allow_partial=True).schedule.shards == (1, 2, 4, 5)


def test_what_was_quarantined_changes_no_plan_but_a_partial_one(tmp_path, caplog):
    """A run that follows cannot know it beforehand, and must see the same."""
    caplog.set_level("INFO")
    plan = open_cache(make_cache(tmp_path / "p", CORPUS, leave_out=range(9))).plan
    gone = tuple(plan.shard_documents(2)) + tuple(plan.shard_documents(3))[:1]
    folder = make_cache(tmp_path / "c", CORPUS, quarantine=gone)
    run = plan_of(folder)
    assert run.schedule.shards == (1, 2, 3, 4, 5)
    assert run.total_tokens == 2 * 30 * 18
    said = f"{len(gone)} quarantined documents have no states: the {30 * len(gone)} tokens of each"
    assert said in caplog.text
    partial = plan_of(folder, allow_partial=True)
    assert partial.schedule.shards == (1, 3, 4, 5)
    assert partial.total_tokens == 2 * 30 * (18 - len(gone))
    assert read_state(fit(fit_config(folder, tmp_path / "run"))).tokens == partial.total_tokens


def test_a_window_orders_the_visits_and_contradictions_are_refused(whole):
    run = plan_of(whole, window=4)
    assert run.schedule.stride == 2
    assert "5 x 2 passes of a window, 2 ticks apart" in describe(run, torch.device("cpu"))
    with pytest.raises(ConfigError, match="window: found 1, expected at least 2"):
        plan_of(whole, window=1)
    with pytest.raises(ConfigError, match="allow_partial and window"):
        plan_of(whole, window=4, allow_partial=True)
    with pytest.raises(ConfigError, match="allow_partial and follow"):
        plan_of(whole, follow=True, allow_partial=True)


def test_nothing_to_learn_is_refused(tmp_path):
    folder = make_cache(tmp_path / "c", documents([20, 30], prompt=40))
    with pytest.raises(DataError, match="No valid anchor"):
        plan_of(folder)


def test_row_shorter_than_the_longest_document_is_refused(whole):
    with pytest.raises(ConfigError, match=r"row_tokens is 29 .* 30 tokens"):
        plan_of(whole, row_tokens=29)
    plan_of(whole, row_tokens=30)


@pytest.mark.parametrize("token", [PAD, EOS])
def test_mask_token_that_is_pad_or_eos_is_refused(whole, token):
    name = "pad_token_id" if token == PAD else "eos_token_id"
    with pytest.raises(ConfigError, match=name):
        plan_of(whole, drafter={"mask_token_id": token})


def test_mask_token_among_several_eos_is_refused(tmp_path):
    config = {"eos_token_id": [7, 9], "rope_theta": 1e4}
    folder = make_cache(tmp_path / "c", CORPUS, config=config)
    with pytest.raises(ConfigError, match="eos_token_id"):
        plan_of(folder, drafter={"mask_token_id": 9})
    assert plan_of(folder).drafter.rope_theta == 1e4


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 50])
def test_mask_token_outside_the_vocabulary_is_refused(whole, token):
    with pytest.raises(ConfigError, match="mask_token_id"):
        plan_of(whole, drafter={"mask_token_id": token})


def test_shape_that_contradicts_the_cache_is_refused(whole):
    with pytest.raises(CacheMismatchError, match=r"hidden_size is 64, .* has 32"):
        plan_of(whole, drafter={"hidden_size": 64})
    with pytest.raises(CacheMismatchError, match="target_layer_ids"):
        plan_of(whole, drafter={"target_layer_ids": (0, 3)})
    plan_of(whole, drafter={"hidden_size": 32, "target_layer_ids": (0, 2)})


def test_gamma_follows_the_block_size(whole):
    for block_size, gamma in ((16, 7.0), (10, 5.0), (8, 4.0)):
        run = plan_of(whole, drafter={"block_size": block_size}, loss={"gamma": None})
        assert run.row.gamma == gamma
    with pytest.raises(ConfigError, match="no default for block_size 5"):
        plan_of(whole, drafter={"block_size": 5}, loss={"gamma": None})


def test_dpace_weighs_no_slot_beforehand(whole):
    run = plan_of(whole, drafter={"block_size": 5}, loss={"gamma": None, "weighting": "dpace"})
    assert run.row.gamma is None
    assert "D-PACE" in describe(run, torch.device("cpu"))


def test_missing_rope_theta_is_asked_for(tmp_path):
    folder = make_cache(tmp_path / "c", CORPUS, config={"eos_token_id": EOS})
    with pytest.raises(ConfigError, match="rope_theta"):
        plan_of(folder)
    assert plan_of(folder, drafter={"rope_theta": 5e5}).drafter.rope_theta == 5e5


def test_rope_of_the_target_is_taken_over(whole):
    assert plan_of(whole).drafter.rope_theta == 10000.0
    assert plan_of(whole).drafter.max_position_embeddings == 512


def test_planned_tokens_are_those_consumed(whole, tmp_path):
    run = plan_of(whole)
    state = read_state(fit(fit_config(whole, tmp_path / "run")))
    assert state.tokens == run.total_tokens == 2 * 18 * 30
    assert f"{run.total_tokens:,}" in describe(run, torch.device("cpu"))


def test_planning_reads_no_states(whole, tmp_path):
    """Only metadata: the arrays of the shards may be gone."""
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    for name in ("exponent", "significand", "doc_rows", "doc_offsets"):
        for path in layout.shards_dir(folder).rglob(name):
            shutil.rmtree(path)
    assert plan_of(folder).schedule.shards == (1, 2, 3, 4, 5)
    with pytest.raises(ShardCorruptError):
        fit(fit_config(folder, tmp_path / "run"))


def test_frozen_weights_of_another_target_are_refused(whole, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    path = layout.frozen_weights(folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardCorruptError, match="does not have the hash"):
        fit(fit_config(folder, tmp_path / "run"))
    path.unlink()
    with pytest.raises(ShardCorruptError, match="missing"):
        fit(fit_config(folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
