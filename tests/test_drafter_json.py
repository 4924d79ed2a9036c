"""config.json of a drafter: what we write is what we read, and what we cannot run is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from trainer_cache import HIDDEN, LAYER_IDS, MASK, NUM_LAYERS, SHAPE, VOCAB

from hscache.errors import ConfigError
from trainer.drafter_config import DrafterConfig
from trainer.drafter_json import drafter_config_from_json, drafter_json

CONFIG = DrafterConfig(
    **SHAPE, hidden_size=HIDDEN, rms_norm_eps=1e-5, rope_theta=1e4, vocab_size=VOCAB,
    max_position_embeddings=512, target_layer_ids=LAYER_IDS, num_target_layers=NUM_LAYERS,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"layer_types": ["chunked_attention"]}, r"\['chunked_attention'\] are not supported"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types: found .* expected 1 items"),
        ({"layer_types": None, "use_sliding_window": True}, "which layers slide"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"is_causal": True}, "is_causal"),
        ({"hidden_size": None}, "does not say hidden_size;"),
        ({"hidden_size": "32"}, "hidden_size is '32'; expected a whole number"),
        ({"hidden_size": 32.0}, r"hidden_size is 32\.0; expected a whole number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; expected a number"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; expected an object"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; expected a list"),
        ({"layer_types": [["x"]]}, "expected a list of texts"),
        (
            {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2.0]}},
            r"target_layer_ids is \[0, 2\.0\]; expected a list of whole numbers",
        ),
        ({"dflash_config": None}, "no DFlash config"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "does not say mask_token_id;"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"block_size": 8}, "block_size is 8 at the top and 4"),
        ({"num_target_layers": ...}, "num_target_layers"),
    ],
)
def test_config_that_we_would_compute_otherwise_is_refused(change, message):
    config = drafter_json(CONFIG, {}, torch.bfloat16)
    drafter_config_from_json(config, Path("config.json"))
    config = {k: v for k, v in {**config, **change}.items() if v is not ...}
    with pytest.raises(ConfigError, match=message):
        drafter_config_from_json(config, Path("config.json"))


SLIDING = dataclasses.replace(CONFIG, layer_types=("sliding_attention",), sliding_window=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": False}, "use_sliding_window is not true"),
        ({"sliding_window": None}, "sliding_window: found None"),
        ({"is_causal": False}, "is_causal is False for all layers"),  # as DFlash 2
        ({"is_causal": True}, "is_causal is True for all layers"),
    ],
)
def test_sliding_layers_with_another_mask_are_refused(change, message):
    config = drafter_json(SLIDING, {}, torch.bfloat16) | change
    with pytest.raises(ConfigError, match=message):
        drafter_config_from_json(config, Path("config.json"))


def test_sliding_layers_round_trip_and_leave_causality_to_their_types():
    mixed = dataclasses.replace(
        CONFIG, num_hidden_layers=5, sliding_window=2048,
        layer_types=("sliding_attention",) * 4 + ("full_attention",),
    )  # fmt: skip
    for drafter in (SLIDING, mixed):
        config = json.loads(json.dumps(drafter_json(drafter, {}, torch.bfloat16)))
        assert drafter_config_from_json(config, Path("config.json")) == drafter
        assert config["use_sliding_window"] is True
        assert "is_causal" not in config
        assert "causal" not in config["dflash_config"]
    assert (config["sliding_window"], config["layer_types"][3:]) == (
        2048, ["sliding_attention", "full_attention"],
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True},
        {"use_swa": True},
        {"attention_sink_bias": True},
        {"attention_value_scale": 0.7},
        {"selector_top_k": 16},
        {"conv_kernel_size": 2},
        {"output_multiplier": 0.5},
        {"final_logit_softcapping": 30.0},
    ],
    ids=str,
)
def test_relatives_of_dflash_are_refused_by_name(change):
    config = drafter_json(CONFIG, {}, torch.bfloat16)
    config["dflash_config"] |= change
    (name,) = change
    with pytest.raises(ConfigError, match=rf"dflash_config\.{name} is"):
        drafter_config_from_json(config, Path("config.json"))


def test_config_round_trips_through_json():
    config = json.loads(json.dumps(drafter_json(CONFIG, {"eos_token_id": [2, 9]}, torch.bfloat16)))
    assert drafter_config_from_json(config, Path("config.json")) == CONFIG
    older = {k: v for k, v in config.items() if k != "rope_parameters"}  # transformers 4
    assert drafter_config_from_json(older, Path("config.json")) == CONFIG
    nested = {k: v for k, v in config.items() if k != "block_size"}  # since Qwen3.5
    assert drafter_config_from_json(nested, Path("config.json")) == CONFIG


def test_config_says_what_engines_ask_for():
    config = drafter_json(CONFIG, {"eos_token_id": 2, "pad_token_id": 0}, torch.bfloat16)
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4
    assert config["layer_types"] == ["full_attention"] * CONFIG.num_hidden_layers
    assert config["is_causal"] is config["dflash_config"]["causal"] is False
    assert config["dtype"] == "bfloat16"
    assert (config["eos_token_id"], config["pad_token_id"]) == (2, 0)
    assert "auto_map" not in config  # it would need code beside the weights
