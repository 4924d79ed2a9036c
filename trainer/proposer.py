"""The drafter as a proposer for real decoding: a growing context and one block a step.

Takes the target's features of committed positions as they come; hands back draft tokens.
"""

from __future__ import annotations

import torch

from trainer.drafter import ContextKV, Drafter
from trainer.frozen import FrozenTarget


class DrafterProposer:
    """Draft one prompt's blocks (trainer.decode.Proposer); make a new one for every prompt."""

    def __init__(self, drafter: Drafter, frozen: FrozenTarget) -> None:
        self._drafter = drafter
        self._frozen = frozen
        self._context: ContextKV = []
        self._num_context = 0

    def observe(self, features_nF: torch.Tensor) -> None:
        """Append the context's keys and values; they depend on each position alone."""
        start, count = self._num_context, len(features_nF)
        positions_n = torch.arange(start, start + count, device=features_nF.device)
        new = self._drafter.context_kv(features_nF, positions_n)
        if self._context:
            new = [
                (torch.cat([k, k_new]), torch.cat([v, v_new]))
                for (k, v), (k_new, v_new) in zip(self._context, new, strict=True)
            ]
        self._context, self._num_context = new, start + count

    def propose(self, anchor_id: int, position: int, num_tokens: int) -> list[int]:
        """Return the argmax of slots 1..num_tokens of the block anchored at `position`."""
        assert position == self._num_context
        device = self._frozen.embedding_VH.device
        embedding_VH = self._frozen.embedding_VH
        hidden_1KH = self._drafter(
            embedding_VH[torch.tensor([anchor_id], device=device)],
            embedding_VH[self._drafter.config.mask_token_id],
            self._context,
            torch.tensor([0], device=device),
            torch.tensor([position], device=device),
            block_size=num_tokens + 1,
        )
        return (hidden_1KH[0] @ self._frozen.head_VH.T).argmax(-1).tolist()
