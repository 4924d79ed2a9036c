"""Drafters in speculators' format: what its own code writes is read, what we cannot run is not."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trainer_cache import HIDDEN, LAYER_IDS, NUM_LAYERS, SHAPE, VOCAB

from hscache.errors import ConfigError
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.drafter_folder import load_drafter
from trainer.speculators_format import drafter_config_from_speculators, speculators_json

CONFIG = DrafterConfig(
    **SHAPE, hidden_size=HIDDEN, rms_norm_eps=1e-6, rope_theta=1e4, vocab_size=VOCAB,
    max_position_embeddings=512, target_layer_ids=LAYER_IDS, num_target_layers=NUM_LAYERS,
)  # fmt: skip

# What `save_pretrained` of speculators 0.9.0 under transformers 5.19.0 wrote for such a drafter.
THEIRS = json.loads("""{
  "architectures": ["DFlashDraftModel"],
  "auto_map": {"": "config.DFlashSpeculatorConfig"},
  "aux_hidden_state_layer_ids": [1, 3],
  "block_size": 4,
  "draft_vocab_size": 128,
  "dtype": "float32",
  "mask_token_id": 5,
  "sample_from_anchor": false,
  "sliding_window_non_causal": false,
  "speculators_config": {
    "algorithm": "dflash",
    "default_proposal_method": "greedy",
    "proposal_methods": [
      {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3,
       "verifier_accept_k": 1}
    ],
    "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"}
  },
  "speculators_model_type": "dflash",
  "speculators_version": "0.9.0",
  "target_hidden_size": null,
  "tie_word_embeddings": false,
  "transformer_layer_config": {
    "attention_bias": false,
    "attention_dropout": 0.0,
    "bos_token_id": null,
    "eos_token_id": null,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_types": ["full_attention"],
    "max_position_embeddings": 512,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "pad_token_id": null,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": null,
    "tie_word_embeddings": false,
    "use_cache": true,
    "use_sliding_window": false,
    "vocab_size": 128
  },
  "transformers_version": "5.19.0"
}""")


def save(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def changed(**changes) -> dict:
    """Their config with fields replaced (or left out: ...); `layer` those of the decoder."""
    config = copy.deepcopy(THEIRS)
    config["transformer_layer_config"] |= changes.pop("layer", {})
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


def test_their_layer_ids_are_ours_plus_one():
    found = drafter_config_from_speculators(THEIRS, Path("config.json"), NUM_LAYERS)
    assert found == CONFIG
    assert found.target_layer_ids == (0, 2)  # of [1, 3]


def test_config_round_trips():
    config = json.loads(json.dumps(speculators_json(CONFIG, {}, torch.bfloat16, verifier="x")))
    assert drafter_config_from_speculators(config, Path("config.json"), NUM_LAYERS) == CONFIG


def test_their_sliding_layers_are_ours():
    theirs = changed(
        layer={
            "layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 64,
        }
    )  # fmt: skip
    found = drafter_config_from_speculators(theirs, Path("config.json"), NUM_LAYERS)
    assert [found.window_of(0), found.slides] == [64, True]
    config = json.loads(json.dumps(speculators_json(found, {}, torch.bfloat16, verifier="x")))
    assert config["sliding_window_non_causal"] is False
    assert drafter_config_from_speculators(config, Path("config.json"), NUM_LAYERS) == found


@pytest.mark.parametrize("with_targets", [False, True])
def test_their_folder_loads_with_or_without_the_targets_tensors(tmp_path, with_targets):
    weights = Drafter(CONFIG, torch.Generator().manual_seed(3)).state_dict()
    tensors = dict(weights)
    if with_targets:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
        tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    folder = save(tmp_path / "theirs", THEIRS, tensors)
    drafter = load_drafter(folder, num_target_layers=NUM_LAYERS)
    assert drafter.config == CONFIG
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            changed(speculators_model_type="eagle3", draft_vocab_size=100),
            "speculators_model_type is 'eagle3', .* expected 'dflash'",
        ),
        (changed(sample_from_anchor=True), "sample_from_anchor is True"),
        (changed(target_hidden_size=64), "target_hidden_size is 64"),
        (changed(draft_vocab_size=100), r"draft_vocab_size is 100 .* 128: .* pruned vocabulary"),
        (changed(draft_vocab_size=...), "draft_vocab_size is None"),
        (changed(aux_hidden_state_layer_ids=[0, 3]), r"\[0, 3\]; expected numbers from 1"),
        (changed(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids is None"),
        (changed(aux_hidden_state_layer_ids=[1, 5]), "found the last block 4"),
        (changed(mask_token_id=None), "does not say mask_token_id"),
        (changed(mask_token_id=128), "found 128, expected 0 to 127"),
        (changed(transformer_layer_config=[1]), r"transformer_layer_config is \[1\]"),
        (changed(aux_hidden_state_layer_ids=[True, 3]), "expected numbers from 1"),
        (changed(transformer_layer_config=...), "transformer_layer_config is missing"),
        (changed(layer={"layer_types": ["sliding_attention"]}), "use_sliding_window is not true"),
        (
            changed(
                sliding_window_non_causal=True,
                layer={"layer_types": ["sliding_attention"], "use_sliding_window": True},
            ),
            "sliding_window_non_causal is true",
        ),
        (changed(layer={"hidden_act": "gelu"}), "hidden_act"),
    ],
)
def test_config_that_we_would_compute_otherwise_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        drafter_config_from_speculators(config, Path("config.json"), NUM_LAYERS)


def test_mapping_to_a_pruned_vocabulary_is_refused(tmp_path):
    tensors = {**Drafter(CONFIG).state_dict(), "d2t": torch.zeros(VOCAB, dtype=torch.long)}
    folder = save(tmp_path / "theirs", THEIRS, tensors)
    with pytest.raises(ConfigError, match=r"holds d2t: .* pruned vocabulary"):
        load_drafter(folder, num_target_layers=NUM_LAYERS)


def test_missing_number_of_target_blocks_is_asked_for(tmp_path):
    folder = save(tmp_path / "theirs", THEIRS, Drafter(CONFIG).state_dict())
    with pytest.raises(ConfigError, match=r"how many blocks .* --shards"):
        load_drafter(folder)
