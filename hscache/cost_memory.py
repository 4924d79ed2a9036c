"""Whether both models of a run fit a GPU, for `hscache plan`: sums of what each must hold.

Takes shapes; hands on bytes, and refuses with the arithmetic what cannot fit. They are sums of the
large parts; `trainer fit --dry-run` predicts its own peak more closely (trainer/memory.py).
"""

from __future__ import annotations

from typing import Any

from hscache.cost_config import PlannedFit, PlannedProduce
from hscache.drafter_sizes import DrafterShape, num_parameters
from hscache.errors import ConfigError
from hscache.gpus import Gpu
from hscache.report import format_bytes
from hscache.target_shape import TargetShape

_BYTES_PER_WEIGHT = 4 + 2 + 4 + 4
"""Of a drafter in training, moments apart: master, bf16 copy, gradient, and one moment."""


def require_memory(
    produce: PlannedProduce,
    fit: PlannedFit,
    gpu: Gpu,
    target: TargetShape,
    drafter: DrafterShape,
    num_blocks: int,
    longest: int,
) -> dict[str, Any]:
    """Return what each side needs of a GPU; refuse one that cannot hold it, with the sum."""
    hidden = target.hidden_size
    weights = target.weight_bytes(num_blocks)
    # Of a token in a pack: the captured states, a few residual streams, gate, up and product, qkv.
    wide = 3 * target.intermediate_size + 3 * target.num_attention_heads * target.head_dim
    token = 2 * ((drafter.num_features + 4) * hidden + wide)
    if weights + token * longest > gpu.memory_bytes:
        raise ConfigError(
            f"the target does not fit {gpu.name} ({format_bytes(gpu.memory_bytes)}): embedding and "
            f"{num_blocks} blocks are {weights / 2:,.0f} bf16 weights = {format_bytes(weights)}, "
            f"and a document of {longest:,} tokens takes about {format_bytes(token * longest)} "
            f"({format_bytes(token)} a token). hscache puts a whole target on one GPU: take one "
            "with more memory, or capture fewer blocks."
        )
    largest = int((gpu.memory_bytes - weights) / token)
    moments = 4 if fit.optim.name == "adamw" else 0
    state = num_parameters(drafter) * (_BYTES_PER_WEIGHT + moments)
    slots = fit.anchors_per_row * fit.drafter.block_size
    q = drafter.num_attention_heads * drafter.head_dim
    kv = drafter.num_key_value_heads * drafter.head_dim
    slot = 2 * (4 * hidden + 3 * q + 4 * kv + 3 * drafter.intermediate_size)
    rows = drafter.num_hidden_layers * slots * slot + 8 * fit.row_tokens * hidden * (
        drafter.num_features
    )
    peak = state + target.frozen_bytes + rows
    if peak > gpu.memory_bytes:
        raise ConfigError(
            f"training does not fit {gpu.name} ({format_bytes(gpu.memory_bytes)}): "
            f"{num_parameters(drafter):,} weights x {_BYTES_PER_WEIGHT + moments} bytes (fp32 "
            f"master, bf16 copy, gradient, moments) = {format_bytes(state)}, frozen embedding and "
            f"head {format_bytes(target.frozen_bytes)}, rows of {fit.anchors_per_row} anchors "
            f"about {format_bytes(rows)}: {format_bytes(peak)} at least. Fewer anchors_per_row, "
            "optim.name muon (one moment), or a GPU with more memory."
        )
    return {
        "target_weights_bytes": weights,
        "target_pack_bytes": token * min(produce.token_budget, largest),
        "token_budget": produce.token_budget,
        "largest_token_budget": largest,
        "trainer_state_bytes": state,
        "trainer_frozen_bytes": target.frozen_bytes,
        "trainer_rows_bytes": rows,
        "both_fit_one_gpu": weights + token * longest + peak <= gpu.memory_bytes,
    }
