"""Acceptance length of a drafter from held-out shards alone, for `trainer eval`.

Takes a drafter and documents with their states; hands on acceptance counts
(`trainer.held_out` computes them, for documents of any length and without a compiler).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainer.acceptance import Acceptance
from trainer.drafter import Drafter
from trainer.frozen import FrozenTarget
from trainer.held_out import RecordedDocument, evaluate_held_out

_BLOCKS, _ROW_TOKENS, _CHUNK = 128, 4096, 2048


def estimate_acceptance(
    drafter: Drafter,
    frozen: FrozenTarget,
    documents: Iterable[RecordedDocument],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Acceptance:
    """Return the acceptance counts of a drafter over documents whose shards are published."""
    documents = list(documents)
    longest = max((len(document.input_ids) for document in documents), default=0)
    return evaluate_held_out(
        drafter,
        frozen,
        documents,
        gamma=1.0,  # weighs the loss, which is not asked for here
        row_tokens=max(longest, _ROW_TOKENS),
        anchors_per_row=_BLOCKS,
        device=device,
        dtype=dtype,
        chunk_size=_CHUNK,
    ).acceptance
