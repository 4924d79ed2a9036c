"""Acceptance length from held-out shards alone: no target, no decoding, exact for greedy text.

Takes a drafter and documents with their states; drafts a block at every supervised position and
walks each answer as decoding would. Where the recorded text is the target's greedy text (answers
sampled at temperature 0) the walk is what real decoding does; elsewhere it is an estimate
(dflash.md 4.3).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from hscache.reader import Document
from trainer.acceptance import Acceptance, document_acceptance, leading_matches
from trainer.anchors import valid_anchors
from trainer.drafter import Drafter
from trainer.frozen import FrozenTarget

_BLOCKS = 128


@torch.inference_mode()
def estimate_acceptance(
    drafter: Drafter,
    frozen: FrozenTarget,
    documents: Iterable[Document],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Acceptance:
    """Return the acceptance counts of a drafter over documents whose shards are published."""
    return sum(
        (_document(drafter, frozen, document, device, dtype) for document in documents),
        Acceptance(),
    )


def _document(
    drafter: Drafter,
    frozen: FrozenTarget,
    document: Document,
    device: torch.device,
    dtype: torch.dtype,
) -> Acceptance:
    block_size = drafter.config.block_size
    data = document.torch()
    mask_T = document.loss_mask
    anchors_A = valid_anchors(mask_T)
    ids_T = data.input_ids.to(device)
    features_TF = data.hidden_states.flatten(1).to(device, dtype)
    context_kv = drafter.context_kv(features_TF, torch.arange(len(features_TF), device=device))
    proposed = []
    for start in range(0, len(anchors_A), _BLOCKS):
        anchors_N = torch.from_numpy(anchors_A[start : start + _BLOCKS]).to(device)
        hidden_NKH = drafter(
            frozen.embedding_VH[ids_T[anchors_N]],
            frozen.embedding_VH[drafter.config.mask_token_id],
            context_kv,
            torch.zeros_like(anchors_N),
            anchors_N,
        )
        # Two-dimensional on purpose: a batched product with the head is many times slower.
        logits_MV = hidden_NKH.flatten(0, 1) @ frozen.head_VH.T
        proposed.append(logits_MV.argmax(-1).view(-1, block_size - 1).cpu().numpy())
    num_matches_T = np.zeros(len(mask_T), np.int64)
    if proposed:
        num_matches_T[anchors_A] = leading_matches(
            np.concatenate(proposed), document.input_ids, anchors_A
        )
    return document_acceptance(num_matches_T, mask_T)
