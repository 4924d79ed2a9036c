"""The sizes of a drafter that its cost follows from: FLOPs, memory, checkpoints. No torch.

`trainer.drafter_config.DrafterConfig` has them, and so has what `hscache plan` reads of a config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class DrafterSizes(Protocol):
    """What is counted with."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def block_size(self) -> int: ...  # noqa: D102
    @property
    def num_features(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """The sizes alone."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    num_features: int


def num_parameters(config: DrafterSizes) -> int:
    """Count the trained parameters: not the embedding and head, which are the target's."""
    hidden, head_dim = config.hidden_size, config.head_dim
    attention = 2 * hidden * head_dim * (config.num_attention_heads + config.num_key_value_heads)
    mlp = 3 * hidden * config.intermediate_size
    norms = 2 * hidden + 2 * head_dim
    fusion = config.num_features * hidden**2 + 2 * hidden
    return config.num_hidden_layers * (attention + mlp + norms) + fusion
