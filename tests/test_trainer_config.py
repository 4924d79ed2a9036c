"""Drafter settings: what is refused, the layer formula and the parameter count."""

import dataclasses

import pytest

from hscache.config import spaced_layer_ids
from hscache.drafter_sizes import num_parameters
from hscache.errors import ConfigError
from trainer.config import LossConfig
from trainer.drafter_config import DrafterConfig

QWEN_27B = DrafterConfig(
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    max_position_embeddings=262_144,
    vocab_size=248_320,
    block_size=16,
    mask_token_id=248_070,
    target_layer_ids=(1, 16, 31, 46, 61),
    num_target_layers=64,
)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (64, (32,)),
        (64, (1, 61)),
        (64, (1, 31, 61)),
        (64, (1, 21, 41, 61)),
        (64, (1, 16, 31, 46, 61)),
        (64, (1, 13, 25, 37, 49, 61)),
        (64, (1, 11, 21, 31, 41, 51, 61)),
        (64, (1, 10, 18, 27, 35, 44, 52, 61)),
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 6, 11, 16, 22, 27, 32, 37)),
        (32, (1, 8, 15, 22, 29)),
        (52, (1, 13, 25, 37, 49)),
        (30, (1, 8, 14, 20, 27)),
    ],
)
def test_layer_formula_gives_the_published_ids(num_layers, expected):
    assert spaced_layer_ids(num_layers, len(expected)) == expected


def test_layer_formula_refuses_a_target_too_shallow():
    with pytest.raises(ConfigError, match="evenly spaced"):
        spaced_layer_ids(6, 5)


def test_parameter_count_of_the_27b_drafter_is_1_730_billion():
    assert round(num_parameters(QWEN_27B) / 1e9, 3) == 1.730


def test_parameter_count_of_the_8b_drafter_is_1_049_billion():
    config = dataclasses.replace(
        QWEN_27B,
        hidden_size=4096,
        intermediate_size=12288,
        num_target_layers=36,
        target_layer_ids=spaced_layer_ids(36, 5),
    )
    assert round(num_parameters(config) / 1e9, 3) == 1.049


def test_ids_from_a_list_become_a_tuple():
    config = dataclasses.replace(QWEN_27B, target_layer_ids=[1, 31, 61])
    assert config.target_layer_ids == (1, 31, 61)
    assert config.num_features == 3
    assert hash(config)


def test_the_published_layer_types_are_four_sliding_ones_and_a_full_one():
    types = ["sliding_attention"] * 4 + ["full_attention"]
    config = dataclasses.replace(QWEN_27B, layer_types=types, sliding_window=2048)
    assert [config.window_of(i) for i in range(5)] == [2048, 2048, 2048, 2048, None]
    assert config.slides
    assert hash(config)
    assert not QWEN_27B.slides
    assert QWEN_27B.window_of(4) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 30}, "multiple of num_key_value_heads"),
        ({"head_dim": 63}, "even number"),
        ({"mask_token_id": 248_320}, "0 to 248319"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"block_size": 1}, "at least 2"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"target_layer_ids": ()}, "at least one id"),
        ({"target_layer_ids": (1, 31, 31)}, "strictly increasing"),
        ({"target_layer_ids": (31, 1)}, "strictly increasing"),
        ({"target_layer_ids": (1, 64)}, "from 0 to 62"),
        ({"target_layer_ids": (-1, 5)}, "from 0 to 62"),
        ({"target_layer_ids": (1, 63)}, "last block 63"),
        ({"layer_types": ("full_attention",) * 4}, "expected 5 items"),
        ({"layer_types": ("sliding",) * 5}, "each one of full_attention, sliding_attention"),
        ({"layer_types": ("sliding_attention",) * 5}, "sliding_window: found None"),
        ({"sliding_window": 2048}, "no layer slides"),
    ],
)
def test_nonsense_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(QWEN_27B, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": "soft"}, "labels soft"),
        ({"sample_slots": True}, "sample_slots True"),
        ({"gamma": 7.0}, "gamma 7.0"),
    ],
)
def test_what_dpace_cannot_use_is_refused(change, message):
    LossConfig(weighting="dpace")
    with pytest.raises(ConfigError, match=message):
        LossConfig(weighting="dpace", **change)
