"""The work of a row, against the figures of the 27B drafter (4,096 tokens, 512 anchors x 16)."""

import dataclasses

import pytest

from hscache.drafter_sizes import num_parameters
from hscache.flops import row_flops
from trainer.drafter_config import DrafterConfig

QWEN_27B = DrafterConfig(
    hidden_size=5120, intermediate_size=17408, num_hidden_layers=5, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e7,
    max_position_embeddings=262144, vocab_size=248320, block_size=16, mask_token_id=248070,
    target_layer_ids=(1, 16, 31, 46, 61), num_target_layers=64,
)  # fmt: skip


def test_the_27b_row_takes_126_tflop():
    flops = row_flops(QWEN_27B, num_tokens=4096, num_anchors=512, mean_context=2048)
    assert flops.blocks == pytest.approx(78.6e12, rel=1e-3)
    assert flops.head == pytest.approx(39.1e12, rel=2e-3)
    assert flops.context == pytest.approx(3.4e12, rel=2e-2)
    assert flops.attention == pytest.approx(4.8e12, rel=3e-3)
    assert flops.total == pytest.approx(126e12, rel=1e-3)


def test_blocks_cost_six_times_the_layers_weights_a_slot():
    flops = row_flops(QWEN_27B, num_tokens=100, num_anchors=3, mean_context=0)
    fewer = {"num_hidden_layers": 4, "layer_types": QWEN_27B.layer_types[:4]}
    without = dataclasses.replace(QWEN_27B, **fewer)
    norms = 2 * 5120 + 2 * 128
    layer = num_parameters(QWEN_27B) - num_parameters(without) - norms
    assert flops.blocks == 6 * 3 * 16 * layer * 5


def test_fewer_scored_slots_make_the_head_cheaper_and_nothing_else():
    size = {"num_tokens": 100, "num_anchors": 10, "mean_context": 50}
    whole, half = row_flops(QWEN_27B, **size), row_flops(QWEN_27B, **size, num_scored=75)
    assert half.head == whole.head / 2
    assert half.total == whole.total - half.head
