"""A tiny random hybrid that keeps what matters: three value heads to a key head, full attention in
every fourth of 8 blocks, and slow decay (random weights forget within a few tokens, which would
hide a leak or a state that was not rolled back).

`python -m pytest` puts this folder on the path, so tests import it by name.
"""

import torch
import transformers
from conftest import VOCAB_SIZE

SLOW = -3.0
"""A_log of a state that keeps 94 % a token."""
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def with_slow_decay(model):
    """Give a random hybrid slow decay, and weights large enough to make tokens differ."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(SLOW)
            elif weight.ndim > 1 and "embed" not in name:
                weight.mul_(4)
            elif "norm" in name:
                weight.add_(torch.randn_like(weight) / 4)
    return model.eval()


def tiny_hybrid() -> transformers.Qwen3_5ForCausalLM:
    """The text model alone, as decoding uses it."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**TEXT, eos_token_id=None, pad_token_id=0)
    return with_slow_decay(transformers.Qwen3_5ForCausalLM(config))
