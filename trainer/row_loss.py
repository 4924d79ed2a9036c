"""One row through the drafter: context, blocks, scored slots, loss.

Takes a `Batch`; hands back sums that the caller adds over rows and ranks and divides once.
"""

from __future__ import annotations

import torch

from trainer.attention import Backend
from trainer.batches import Batch
from trainer.drafter import Drafter
from trainer.frozen import FrozenTarget
from trainer.loss import frozen_head_cross_entropy


def row_loss(
    drafter: Drafter,
    frozen: FrozenTarget,
    batch: Batch,
    *,
    chunk_size: int,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weighted loss sum, number of right predictions) of one row's scored slots."""
    context_kv = drafter.context_kv(batch.features_SF, batch.position_ids_S, backend=backend)
    hidden_NKH = drafter(
        frozen.embedding_VH[batch.anchor_ids_N],
        frozen.embedding_VH[drafter.config.mask_token_id],
        context_kv,
        batch.context_start_N,
        batch.context_end_N,
        backend=backend,
    )
    hidden_CH = hidden_NKH.flatten(0, 1)
    loss_sum, _, predicted_M = frozen_head_cross_entropy(
        hidden_CH.index_select(0, batch.scored_M),
        frozen.head_VH,
        batch.labels_M,
        batch.weights_M,
        # with static shapes, as many rows as there can be: a compiled softmax never sees another
        chunk_size=min(chunk_size, len(hidden_CH)),
        compiled=backend == "flex",
    )
    return loss_sum, (predicted_M == batch.labels_M).sum()
