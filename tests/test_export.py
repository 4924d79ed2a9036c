"""Exported folders are literally what engines read, come back bit-equal, and appear whole."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_cache import (
    EOS,
    HIDDEN,
    LAYER_IDS,
    MASK,
    NUM_LAYERS,
    PAD,
    SHAPE,
    VOCAB,
    documents,
    fit_config,
    make_cache,
    random_frozen,
    small_disk,
)  # fmt: skip

from hscache.errors import CacheMismatchError, ConfigError, DiskFullError, HscacheError
from hscache.reader import open_cache
from trainer.config import ExportConfig
from trainer.drafter import Drafter, lay_out_blocks
from trainer.drafter_config import DrafterConfig
from trainer.drafter_folder import load_drafter
from trainer.drafter_json import drafter_json
from trainer.export import run
from trainer.fit import fit
from trainer.frozen import load_frozen
from trainer.run_plan import plan_run
from trainer.run_state import start_training

FIVE = DrafterConfig(
    **{**SHAPE, "num_hidden_layers": 5}, hidden_size=HIDDEN, rms_norm_eps=1e-5, rope_theta=1e4,
    vocab_size=VOCAB, max_position_embeddings=512, target_layer_ids=LAYER_IDS,
    num_target_layers=NUM_LAYERS,
)  # fmt: skip

# The names that the loaders of vLLM and SGLang map to their parameters, read in vLLM 036a00d1
# model_executor/models/qwen3_dflash.py (DFlashQwen3Model, its hf_to_vllm_mapper) and in SGLang
# 003b23d7 srt/models/dflash.py (load_weights); neither was run. No prefix, no buffers, no bias.
LAYER_TENSORS = [
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_norm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
]
TENSORS = [
    "fc.weight",
    "hidden_norm.weight",
    *(f"layers.{layer}.{name}" for layer in (0, 1, 2, 3, 4) for name in LAYER_TENSORS),
    "norm.weight",
]

# What both build a layer from. vLLM: `_resolve_layer_attention`, `_dflash_layer_causal`,
# DFlashQwen3DecoderLayer. SGLang: `_get_dflash_layer_attention_params` (full_attention: not
# causal), get_rope_config (rope_parameters, else rope_theta). z-lab's code under transformers 5:
# layer_types, rope_parameters.
LAYER = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "is_causal": False,
    "layer_types": [
        "full_attention",
        "full_attention",
        "full_attention",
        "full_attention",
        "full_attention",
    ],
    "max_position_embeddings": 512,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}

# SGLang 00731f0b srt/speculative/dflash_utils.py (parse_dflash_draft_config): num_target_layers;
# block_size, mask_token_id, target_layer_ids of dflash_config. vLLM 0cfdd2e1 v1/worker/gpu/
# spec_decode/eagle/eagle3_utils.py (get_eagle3_aux_layers_from_config):
# dflash_config.target_layer_ids, 0-based. z-lab dflash 0.1.0: top-level block_size.
ZLAB = {
    **LAYER,
    "architectures": ["DFlashDraftModel"],
    "block_size": 4,
    "dflash_config": {
        "block_size": 4,
        "causal": False,
        "mask_token_id": 5,
        "target_layer_ids": [0, 2],
    },
    "dtype": "bfloat16",
    "num_target_layers": 5,
}

# speculators 0.9.0 models/dflash/config.py. vLLM transformers_utils/configs/speculators: base.py
# asks for proposal_methods[0].speculative_tokens, verifier.name_or_path, transformer_layer_config;
# algos.py (update_dflash, since vllm#47745) takes draft_vocab_size, mask_token_id and
# aux_hidden_state_layer_ids - 1, and sets dflash_config.causal = not sliding_window_non_causal,
# for full layers too (vllm#56692 says so and is open).
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": 4,
    "draft_vocab_size": 128,
    "dtype": "bfloat16",
    "mask_token_id": 5,
    "sample_from_anchor": False,
    "sliding_window_non_causal": True,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": LAYER,
}

TARGET_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "cache"
    return make_cache(
        folder, documents([30] * 12), config=TARGET_CONFIG, target="Qwen/Qwen3-8B", revision="4f0c"
    )


@pytest.fixture(scope="module")
def run_dir(cache) -> Path:
    """A run in fp32, so that rounding to bfloat16 is the export's."""
    config = fit_config(cache, cache.parent / "run", passes=1, drafter={"num_hidden_layers": 2})
    fit(config)
    return config.run_dir


@pytest.fixture
def published(tmp_path) -> Path:
    """Five layers in z-lab's format, without a record of their training."""
    folder = tmp_path / "published"
    folder.mkdir()
    drafter = Drafter(FIVE, torch.Generator().manual_seed(2))
    save_file(drafter.state_dict(), folder / "model.safetensors")
    config = drafter_json(FIVE, TARGET_CONFIG, torch.float32)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def export(checkpoint: Path, output: Path, format: str, shards: Path | None = None, **changes):
    """Run the command; return the config and the tensors it wrote."""
    config = ExportConfig(
        checkpoint=checkpoint, output=output, format=format, shards=shards, **changes
    )
    assert run(config) == 0
    assert sorted(p.name for p in output.iterdir()) == ["config.json", "model.safetensors"]
    return json.loads((output / "config.json").read_text()), load_file(output / "model.safetensors")


def rounded(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: value.bfloat16().float() for name, value in drafter.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("with_shards", [False, True])
def test_zlab_folder_is_literally_what_engines_read(published, tmp_path, cache, with_shards):
    config, tensors = export(published, tmp_path / "out", "zlab", cache if with_shards else None)
    assert config == ZLAB
    assert sorted(tensors) == TENSORS
    assert len(tensors) == 58
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}


def test_speculators_folder_is_literally_what_engines_read(published, tmp_path, cache):
    config, tensors = export(published, tmp_path / "out", "speculators", cache)
    assert config == SPECULATORS
    assert sorted(tensors) == sorted([*TENSORS, "embed_tokens.weight", "lm_head.weight"])
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    frozen = load_frozen(open_cache(cache))
    assert torch.equal(tensors["embed_tokens.weight"], frozen.embedding_VH.bfloat16())
    assert torch.equal(tensors["lm_head.weight"], frozen.head_VH.bfloat16())


def test_tied_head_is_written_as_a_tensor_of_its_own(published, tmp_path):
    folder = make_cache(tmp_path / "tied", documents([30] * 4), frozen=random_frozen(tied=True))
    config, tensors = export(published, tmp_path / "out", "speculators", folder, target="a/b")
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])
    verifier = config["speculators_config"]["verifier"]
    assert verifier["architectures"] == []  # this target's config has none


def test_named_target_is_a_hub_id_or_an_absolute_folder(published, tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for target, expected in (("a/b", "a/b"), ("model", str(tmp_path / "model"))):
        output = tmp_path / expected.replace("/", "-")
        config, _ = export(published, output, "speculators", cache, target=target)
        assert config["speculators_config"]["verifier"]["name_or_path"] == expected


def test_target_folder_that_is_gone_is_asked_for(published, tmp_path):
    folder = make_cache(tmp_path / "cache", documents([30] * 4), target="gone/model", revision="")
    with pytest.raises(ConfigError, match=r"folder gone/model, which is not here.*--target"):
        export(published, tmp_path / "out", "speculators", folder)


def test_both_files_can_be_read_by_whom_the_umask_lets(published, tmp_path):
    export(published, tmp_path / "out", "zlab")
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()]
    (tmp_path / "plain").touch()
    assert modes == [(tmp_path / "plain").stat().st_mode & 0o777] * 2


@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_init_from_an_export_starts_with_bit_equal_weights(run_dir, tmp_path, cache, format):
    export(run_dir, tmp_path / "out", format, cache)
    config = fit_config(
        cache, tmp_path / "next", init_from=tmp_path / "out", drafter={"num_hidden_layers": 2}
    )
    started = start_training(plan_run(config), torch.device("cpu"))
    assert_equal(started.drafter.state_dict(), rounded(load_drafter(run_dir)))


def test_one_format_converts_to_the_other_and_back(published, tmp_path, cache):
    first, tensors = export(published, tmp_path / "a", "zlab", cache)
    export(tmp_path / "a", tmp_path / "b", "speculators", cache)
    second, same = export(tmp_path / "b", tmp_path / "c", "zlab", cache)
    assert second == first
    assert_equal(same, tensors)


def test_zlab_loads_the_export_strictly_and_gives_the_same_logits(run_dir, tmp_path, cache):
    zlab = pytest.importorskip("dflash.model", reason="dflash is not installed")
    export(run_dir, tmp_path / "out", "zlab", cache)
    theirs, info = zlab.DFlashDraftModel.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    ours = load_drafter(tmp_path / "out")
    frozen = load_frozen(open_cache(cache))
    features = torch.randn(11, ours.config.num_features * HIDDEN)
    blocks = lay_out_blocks(frozen.embedding_VH[[7, MASK]], 4)
    with torch.inference_mode():
        kv = ours.context_kv(features, torch.arange(11))
        hidden = ours(blocks[:, 0], blocks[0, 1], kv, torch.tensor([0]), torch.tensor([11]))
        found = hidden @ frozen.head_VH.T
        expected = (
            theirs.eval()(
                position_ids=torch.arange(11 + 4)[None],
                noise_embedding=blocks,
                target_hidden=features[None],
            )
            @ frozen.head_VH.T
        )[:, 1:]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_cache_of_another_target_is_refused_with_a_diff(run_dir, published, tmp_path):
    other = make_cache(
        tmp_path / "other", documents([30] * 4), weights_sha256="other", target_layer_ids=(0, 1)
    )
    for checkpoint in (run_dir, published):
        with pytest.raises(CacheMismatchError) as error:
            export(checkpoint, tmp_path / "out", "zlab", other)
        assert "target_layer_ids: the drafter has [0, 2], the cache [0, 1]" in str(error.value)
        assert ("weights_sha256" in str(error.value)) == (checkpoint == run_dir)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w.index_fill(0, torch.tensor([0]), torch.nan), "holds NaN or infinity"),
        (lambda w: w.to(torch.int8), r"is of torch\.int8; expected bfloat16"),
    ],
)
def test_weights_that_are_no_numbers_are_not_handed_on(published, tmp_path, spoil, words):
    tensors = load_file(published / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file({**tensors, name: spoil(tensors[name])}, published / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} {words}"):
        export(published, tmp_path / "out", "zlab", None)


def test_a_folder_that_cannot_be_written_is_named(published, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as mount:
        mount("1m,ro")
        with pytest.raises(HscacheError, match=r"cannot make the folder .*Read-only"):
            export(published, tmp_path / "disk" / "out", "zlab")


def test_nothing_is_overwritten(published, tmp_path):
    export(published, tmp_path / "out", "zlab")
    before = (tmp_path / "out" / "model.safetensors").stat()
    for output in (tmp_path / "out", published / "config.json"):
        with pytest.raises(ConfigError, match="exists already"):
            export(published, output, "zlab")
    assert (tmp_path / "out" / "model.safetensors").stat() == before
    (tmp_path / "empty").mkdir()
    export(published, tmp_path / "empty", "zlab")


def test_full_disk_leaves_nothing(published, tmp_path):
    with small_disk(tmp_path / "disk", "32k"):
        with pytest.raises(DiskFullError):
            export(published, tmp_path / "disk" / "out", "zlab")
        assert list((tmp_path / "disk").iterdir()) == []


def test_dry_run_prints_and_writes_nothing(published, tmp_path, capsys):
    config = ExportConfig(checkpoint=published, output=tmp_path / "new" / "out", format="zlab")
    assert run(config, dry_run=True) == 0
    assert "58" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
    config = dataclasses.replace(config, output=tmp_path / "new" / "my 'drafter'")
    assert run(config) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: shlex.split(line)[1:] for line in printed.splitlines()[2:]}
    assert json.loads(rows["vLLM"][-1])["model"] == str(config.output)  # quoted for the shell
    assert str(config.output) in rows["SGLang"]
    assert '"num_speculative_tokens": 3' in printed  # vLLM counts drafted tokens
    assert "--speculative-num-draft-tokens 4" in printed  # SGLang counts slots
