"""Whether both models of a run fit a GPU, for `hscache plan`: what each side holds at its peak.

Takes shapes; hands on bytes, and refuses with the arithmetic what cannot fit. The drafter's sum is
that of `trainer fit` (hscache.fit_memory). The target's is that of the fused forward
(hscache.packed_forward), within 1 % of the one that was measured (tests/test_cost_command.py).
"""

from __future__ import annotations

from typing import Any

from hscache.cost_config import PlannedFit, PlannedProduce
from hscache.drafter_sizes import DrafterShape
from hscache.errors import ConfigError
from hscache.fit_memory import describe_memory, predict_memory
from hscache.forward_flops import SCAN_CHUNK
from hscache.gpus import Gpu
from hscache.report import format_bytes
from hscache.target_shape import TargetShape

_MLP_ROWS = 32_768
"""hscache.packed_forward.MLP_ROWS, without importing torch"""
_STATES_AHEAD = 2
"""Packs whose states lie on the GPU beside those of the forward (hscache.stages.AHEAD): as many are
launched before one is copied. This was not measured."""
_CHUNK_SIZE = 8192
"""Slots a chunk of the head on a GPU (trainer.config.LossConfig.slots_per_chunk)."""


def pack_bytes(target: TargetShape, num_blocks: int, num_captured: int, num_tokens: int) -> int:
    """Return what a packed forward holds at most beside weights, its states included, in bf16."""
    hidden = target.hidden_size
    # of a token in values, for all blocks: residual stream, its norm, captured states
    lasting = (2 + num_captured) * hidden
    kinds = target.layer_types[:num_blocks]
    mixers = []
    if "linear_attention" in kinds:
        heads = target.linear_num_value_heads
        keys = target.linear_num_key_heads * target.linear_key_head_dim
        values = heads * target.linear_value_head_dim
        projected = 2 * keys + 2 * values + 2 * heads
        # keys and values of a chunk as the solve leaves them, its corrected values, its result,
        # the state before it, and the triangle that is solved, in fp32
        state = target.linear_key_head_dim * values // SCAN_CHUNK
        scan = 4 * values + state + 2 * SCAN_CHUNK * heads
        mixers.append(projected + 2 * keys + values + scan)
    if "full_attention" in kinds:
        queries = target.num_attention_heads * target.head_dim
        keys = target.num_key_value_heads * target.head_dim
        # as projected, as turned, attended, and gated
        gated = queries if target.attn_output_gate else 0
        mixers.append(queries + gated + 2 * keys + queries + keys + queries + gated)
    inner = min(num_tokens, _MLP_ROWS) * 3 * target.intermediate_size
    return 2 * (num_tokens * lasting + max(num_tokens * max(mixers), inner))


def require_memory(
    produce: PlannedProduce,
    fit: PlannedFit,
    gpu: Gpu,
    target: TargetShape,
    drafter: DrafterShape,
    num_blocks: int,
    longest: int,
    num_gpus: int,
) -> dict[str, Any]:
    """Return what each side needs of a GPU; refuse one that cannot hold it, with the sum."""
    captured = drafter.num_features + produce.target.last_hidden
    weights = target.weight_bytes(num_blocks)
    document = pack_bytes(target, num_blocks, captured, longest)
    if weights + document > gpu.memory_bytes:
        raise ConfigError(
            f"the target does not fit {gpu.name} ({format_bytes(gpu.memory_bytes)}): embedding and "
            f"{num_blocks} blocks are {weights / 2:,.0f} bf16 weights = {format_bytes(weights)}, "
            f"and a document of {longest:,} tokens takes about {format_bytes(document)} "
            f"({format_bytes(document / longest)} a token). hscache puts a whole target on one "
            "GPU: take one with more memory, or capture fewer blocks."
        )
    pack = pack_bytes(target, num_blocks, captured, produce.token_budget)
    ahead = _STATES_AHEAD * 2 * produce.token_budget * captured * target.hidden_size
    largest = int((gpu.memory_bytes - weights) / ((pack + ahead) / produce.token_budget))
    trainer = predict_memory(
        drafter,
        row_tokens=fit.row_tokens,
        anchors_per_row=fit.anchors_per_row,
        rows_per_step=-(-fit.global_batch_rows // num_gpus),
        chunk_size=fit.loss.chunk_size or _CHUNK_SIZE,
        dtype_bytes=4 if fit.dtype == "float32" else 2,
        optimizer=fit.optim.name,
        tied_head=target.tied_head,
        soft_labels=fit.loss.labels == "soft",
        backend="flex",
    )
    if trainer.peak > gpu.memory_bytes:
        lines = "\n".join(f"  {name}: {text}" for name, text in describe_memory(trainer))
        raise ConfigError(
            f"training does not fit {gpu.name} ({format_bytes(gpu.memory_bytes)}):\n{lines}\n"
            "Fewer anchors_per_row or global_batch_rows, optim.name muon (one moment), or a GPU "
            "with more memory."
        )
    return {
        "target_weights_bytes": weights,
        "target_pack_bytes": pack,
        "target_ahead_bytes": ahead,
        "token_budget": produce.token_budget,
        "largest_token_budget": largest,
        "trainer": vars(trainer),
        "trainer_peak_bytes": trainer.peak,
        "both_fit_one_gpu": weights + document + trainer.peak <= gpu.memory_bytes,
    }
