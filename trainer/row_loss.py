"""One row through the drafter: context, blocks, scored slots, loss.

Takes a `Batch`; hands back sums that the caller adds over rows and ranks and divides once, by the
sum of the batches' `weight_sum`. With D-PACE that is the count of scored slots, as speculators
divides: its own weights are known on the device alone, and dividing by them would undo that a block
counts the more the further the drafter gets.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from trainer.attention import Backend
from trainer.batches import Batch
from trainer.dpace import dpace_weights
from trainer.drafter import ContextKV, Drafter
from trainer.frozen import FrozenTarget
from trainer.loss import frozen_head_cross_entropy

Weighting = Literal["decay", "dpace"]


def row_loss(
    drafter: Drafter,
    frozen: FrozenTarget,
    batch: Batch,
    *,
    chunk_size: int,
    backend: Backend | None = None,
    weighting: Weighting = "decay",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weighted loss sum, number of right predictions) of one row's scored slots.

    A batch with `last_hidden_SH` is compared with the target's distribution, else with its labels.
    """
    context_kv = drafter.context_kv(batch.features_SF, batch.position_ids_S, backend=backend)
    hidden_NKH = row_hidden(drafter, frozen, batch, context_kv, backend=backend)
    num_blocks, num_predicted = hidden_NKH.shape[:2]
    hidden_CH = hidden_NKH.flatten(0, 1)
    reweight = partial(
        dpace_weights, scored_M=batch.scored_M, num_blocks=num_blocks, num_predicted=num_predicted
    )
    loss_sum, _, right_M = frozen_head_cross_entropy(
        hidden_CH.index_select(0, batch.scored_M),
        frozen.head_VH,
        batch.labels_M,
        batch.weights_M,
        # with static shapes, as many rows as there can be: a compiled softmax never sees another
        chunk_size=min(chunk_size, len(hidden_CH)),
        compiled=backend == "flex",
        teacher_MH=teacher_hidden(frozen, batch, num_predicted),
        reweight=reweight if weighting == "dpace" else None,
    )
    return loss_sum, right_M.sum()


def row_hidden(
    drafter: Drafter,
    frozen: FrozenTarget,
    batch: Batch,
    context_kv: ContextKV,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return what the head reads at every slot to predict, [N, K, H]."""
    return drafter(
        frozen.embedding_VH[batch.anchor_ids_N],
        frozen.embedding_VH[drafter.config.mask_token_id],
        context_kv,
        batch.context_start_N,
        batch.context_end_N,
        backend=backend,
    )


def teacher_hidden(frozen: FrozenTarget, batch: Batch, num_predicted: int) -> torch.Tensor | None:
    """Return what the target's head reads where it predicts each scored slot, [M, H].

    Slot k of the block anchored at a stands at a + k, which the target predicts at a + k - 1.
    """
    if batch.last_hidden_SH is None:
        return None
    block_M = batch.scored_M // num_predicted
    at_M = batch.context_end_N[block_M] + batch.scored_M % num_predicted
    return frozen.final_norm(batch.last_hidden_SH.index_select(0, at_M))
