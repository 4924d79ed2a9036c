"""Checkpoints load elsewhere with equal results, appear whole, and are checked when read."""

import dataclasses
import json
import shutil
import time

import pytest
import torch
from greedy_run import train_on_greedy_text
from safetensors.torch import load_file, save_file
from test_trainer_config import QWEN_27B
from trainer_cache import documents, fit_config, make_cache, small_disk

from hscache.drafter_sizes import num_parameters
from hscache.errors import CacheMismatchError, ConfigError, DiskFullError, ShardCorruptError
from hscache.reader import open_cache
from hscache.zarr_array import canonical_json, checksum_hex
from trainer.checkpoint import checkpoint_bytes, read_state, take_snapshot, write_checkpoint
from trainer.config import OptimConfig
from trainer.decode import speculative_decode
from trainer.drafter import lay_out_blocks
from trainer.drafter_folder import load_drafter
from trainer.fit import fit
from trainer.frozen import load_frozen, target_config
from trainer.optim import make_optimizers
from trainer.proposer import DrafterProposer
from trainer.run_folder import list_checkpoints, resolve_checkpoint
from trainer.run_plan import plan_run
from trainer.run_state import start_training, training_state

FILES = ["config.json", "model.safetensors", "trainer_state.json", "training.safetensors"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run with checkpoints 2, 3 and the last."""
    base = tmp_path_factory.mktemp("checkpoint")
    folder = make_cache(base / "cache", documents([30] * 12))
    config = fit_config(
        folder, base / "run", passes=1, checkpoint_every=1, keep_checkpoints=3,
        drafter={"num_hidden_layers": 2},
    )  # fmt: skip
    fit(config)
    return base / "run"


def test_only_the_newest_are_kept(run_dir):
    checkpoints = list_checkpoints(run_dir)
    steps = [int(path.name.removeprefix("checkpoint-")) for path in checkpoints]
    assert len(steps) == 3
    assert steps == sorted(steps)
    assert steps[-1] == read_state(checkpoints[-1]).step
    for path in checkpoints:
        assert sorted(p.name for p in path.iterdir()) == FILES


def test_a_run_folder_means_its_last_checkpoint(run_dir, tmp_path):
    last = list_checkpoints(run_dir)[-1]
    assert resolve_checkpoint(run_dir) == last
    assert resolve_checkpoint(last) == last
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        resolve_checkpoint(tmp_path)


def test_order_of_checkpoints_is_by_number(tmp_path):
    for step in (10, 9, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / ".tmp-x").mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == [
        "checkpoint-9", "checkpoint-10", "checkpoint-100",
    ]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "flip", "delete"])
def test_damaged_file_is_named(run_dir, tmp_path, name, damage):
    copy = tmp_path / "checkpoint-9"
    shutil.copytree(list_checkpoints(run_dir)[-1], copy)
    path = copy / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    with pytest.raises(ShardCorruptError, match=name):
        read_state(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_checkpoint_is_not_evaluated(run_dir, tmp_path, name):
    copy = tmp_path / "checkpoint-9"
    shutil.copytree(list_checkpoints(run_dir)[-1], copy)
    data = bytearray((copy / name).read_bytes())
    data[-5] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(ShardCorruptError, match=name):
        load_drafter(copy)


def published_folder(run_dir, folder):
    """The two files that other tools write."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(list_checkpoints(run_dir)[-1] / name, folder / name)
    return folder


def test_published_folder_without_our_state_loads(run_dir, tmp_path):
    drafter = load_drafter(published_folder(run_dir, tmp_path / "hub"))
    for name, value in load_drafter(run_dir).state_dict().items():
        assert torch.equal(drafter.state_dict()[name], value)


def test_weights_that_do_not_fit_are_refused(run_dir, tmp_path):
    folder = published_folder(run_dir, tmp_path / "hub")
    weights = load_file(folder / "model.safetensors")
    weights["layers.0.extra.weight"] = weights.pop("fc.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="does not fit"):
        load_drafter(folder)


def test_bf16_checkpoint_is_the_rounded_master(tmp_path):
    folder = make_cache(tmp_path / "cache", documents([30] * 4))
    checkpoint = fit(fit_config(folder, tmp_path / "run", passes=1, dtype="bfloat16"))
    masters = load_file(checkpoint / "training.safetensors")
    for name, value in load_file(checkpoint / "model.safetensors").items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, masters[f"master.{name}"].bfloat16())
    assert json.loads((checkpoint / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.fixture
def saved(tmp_path):
    """A run at step 0, and a function that saves a checkpoint of it under another step."""
    folder = make_cache(tmp_path / "cache", documents([30] * 4))
    run = plan_run(fit_config(folder, tmp_path / "run"))
    training = start_training(run, torch.device("cpu"))

    def save(where, step, keep=2):
        state = dataclasses.replace(training_state(run, training), step=step)
        snapshot = take_snapshot(training.masters, training.optimizers)
        return write_checkpoint(
            where, training.drafter.config, snapshot, state,
            target_config=target_config(run.cache), dtype=torch.float32, keep=keep,
        )  # fmt: skip

    return save


def test_existing_checkpoint_is_never_overwritten(saved, tmp_path):
    where = tmp_path / "run"
    where.mkdir()
    saved(where, 3)
    with pytest.raises(CacheMismatchError, match="another run"):
        saved(where, 3)
    read_state(where / "checkpoint-3")
    assert [p.name for p in where.iterdir()] == ["checkpoint-3"]


def fill(saved, where):
    for step in range(2, 9):
        saved(where, step, keep=9)


def test_full_disk_leaves_the_checkpoint_before(saved, tmp_path):
    where = tmp_path / "small"
    with small_disk(where, "260k"):
        saved(where, 1)
        with pytest.raises(DiskFullError, match="disk full"):
            fill(saved, where)
        names = [p.name for p in where.iterdir()]
        assert "checkpoint-1" in names
        assert not [name for name in names if name.startswith(".tmp")]
        for path in list_checkpoints(where):
            read_state(path)
            load_drafter(path)


def test_room_is_asked_for_all_that_is_written(saved, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("trainer.checkpoint.require_space", lambda _, size: asked.append(size))
    saved(tmp_path, 1)
    files = (tmp_path / "checkpoint-1").glob("*.safetensors")
    tensors = [t for f in files for name, t in load_file(f).items() if name != "rng"]
    assert asked == [sum(tensor.nbytes for tensor in tensors)]


@pytest.mark.parametrize(
    ("mode", "num_ranks", "expected_gb"),
    [
        ("ddp", 1, 24.2), ("ddp", 8, 24.2), ("average", 1, 24.2),
        ("average", 4, 10.4 + 4 * 13.84), ("broadcast", 8, 10.4 + 8 * 13.84),
        ("diloco", 4, 10.4 + 4 * 13.84 + 6.92),
    ],
)  # fmt: skip
def test_sizes_of_the_27b_drafters_checkpoints(mode, num_ranks, expected_gb):
    found = checkpoint_bytes(
        num_parameters(QWEN_27B), dtype_bytes=2, num_moments=2, mode=mode, num_ranks=num_ranks
    )
    assert found / 1e9 == pytest.approx(expected_gb, abs=0.03)


def test_a_checkpoint_that_would_not_fit_is_refused_before_the_first_step(tmp_path):
    folder = make_cache(tmp_path / "cache", documents([30] * 4))
    with small_disk(tmp_path / "small", "100k"):
        with pytest.raises(DiskFullError, match=r"disk full: a checkpoint of .* takes 158 kB"):
            fit(fit_config(folder, tmp_path / "small" / "run"))
        assert not list((tmp_path / "small" / "run").glob("metrics*"))


def test_a_checkpoint_of_another_version_says_so(run_dir, tmp_path):
    copy = tmp_path / "checkpoint-9"
    shutil.copytree(list_checkpoints(run_dir)[-1], copy)
    record = json.loads((copy / "trainer_state.json").read_text())
    del record["crc32c"], record["logged_step"]
    sealed = {**record, "crc32c": checksum_hex(canonical_json(record))}
    (copy / "trainer_state.json").write_bytes(canonical_json(sealed))
    with pytest.raises(CacheMismatchError, match="another version"):
        read_state(copy)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_stored_for_every_parameter(name):
    parameters = [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4))]
    optimizers = make_optimizers(parameters, OptimConfig(name=name))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    assert all(any(p in o.state for o in optimizers) for p in parameters)


# z-lab's own code (PyPI dflash) reads the folder, and its loop decodes with it.


@pytest.fixture(scope="module")
def zlab():
    return pytest.importorskip("dflash.model", reason="dflash is not installed")


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    return train_on_greedy_text(tmp_path_factory.mktemp("greedy"))


def load_zlab(zlab, run_dir):
    model, info = zlab.DFlashDraftModel.from_pretrained(
        list_checkpoints(run_dir)[-1], output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def test_zlab_loads_the_folder_strictly_and_computes_the_same(zlab, run_dir):
    theirs, ours = load_zlab(zlab, run_dir), load_drafter(run_dir)
    config = ours.config
    assert theirs.block_size == config.block_size
    assert theirs.mask_token_id == config.mask_token_id
    assert list(theirs.target_layer_ids) == list(config.target_layer_ids)
    features = torch.randn(11, config.num_features * config.hidden_size)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    blocks = lay_out_blocks(embedding[[7, config.mask_token_id]], config.block_size)
    with torch.inference_mode():
        kv = ours.context_kv(features, torch.arange(11))
        found = ours(blocks[:, 0], blocks[0, 1], kv, torch.tensor([0]), torch.tensor([11]))
        expected = theirs(
            position_ids=torch.arange(11 + config.block_size)[None],
            noise_embedding=blocks,
            target_hidden=features[None],
        )
    torch.testing.assert_close(found, expected[:, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # it calls transformers the older way
def test_zlab_generates_our_text_with_our_acceptance_lengths(zlab, greedy, monkeypatch):
    monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)  # it measures time on a GPU only
    theirs, ours = load_zlab(zlab, greedy.config.run_dir), load_drafter(greedy.config.run_dir)
    frozen = load_frozen(open_cache(greedy.folder)).to(torch.device("cpu"), torch.float32)
    known = list(greedy.prompts.values())
    lengths = []
    for prompt in (*known, [100, 50, 25], [11, 12, 13, 14, 15]):  # also texts it has not seen
        result = speculative_decode(
            greedy.target, prompt, DrafterProposer(ours, frozen),
            target_layer_ids=ours.config.target_layer_ids, block_size=ours.config.block_size,
            max_new_tokens=30, stop_ids=(),
        )  # fmt: skip
        with torch.inference_mode():
            stats = zlab.dflash_generate(
                theirs, greedy.target, torch.tensor([prompt]), 30, None, return_stats=True
            )
        assert stats.output_ids[0].tolist() == [*prompt, *result.ids]
        assert list(stats.acceptance_lengths) == result.acceptance_lengths
        lengths += result.acceptance_lengths
    assert min(lengths) == 1
    assert max(lengths) > 3
