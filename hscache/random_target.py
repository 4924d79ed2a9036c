"""A decoder of any size with random weights, made on the device itself: for measurements.

Takes a config and a seed. The real weights of a large target need not be at hand to know how fast
its shape runs; what such a model says is nonsense.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModel

from hscache.packed_forward import place


def random_base(
    config: Any, num_blocks: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the first `num_blocks` blocks of a decoder of `config`, merged and on the device."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_blocks
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_blocks]
    config.use_cache = False
    with torch.device("meta"):
        base = AutoModel.from_config(config, dtype=dtype)
    base.norm = torch.nn.Identity()  # the captured states come before it
    base.rotary_emb = type(base.rotary_emb)(config=base.config)
    place(base, device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in base.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(0.01, 16, generator=generator).log_()
            elif name.endswith("dt_bias"):
                weight.fill_(1)
            elif "norm" in name:
                zero_centred = config.model_type.startswith("qwen3_5") and "linear_attn" not in name
                weight.normal_(0 if zero_centred else 1, 0.1, generator=generator)
            else:
                weight.normal_(0, 0.02, generator=generator)
    return base.eval().requires_grad_(False)
