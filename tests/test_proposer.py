"""Drafting with a growing context equals drafting with all of it at once."""

import pytest
import torch
from trainer_cache import HIDDEN, LAYER_IDS, MASK, NUM_LAYERS, SHAPE, VOCAB

from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.frozen import FrozenTarget
from trainer.proposer import DrafterProposer


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    config = DrafterConfig(
        **SHAPE, hidden_size=HIDDEN, rms_norm_eps=1e-5, rope_theta=1e4, vocab_size=VOCAB,
        max_position_embeddings=512, target_layer_ids=LAYER_IDS, num_target_layers=NUM_LAYERS,
    )  # fmt: skip
    return Drafter(config, torch.Generator().manual_seed(2)).eval()


@pytest.fixture(scope="module")
def frozen() -> FrozenTarget:
    generator = torch.Generator().manual_seed(3)
    return FrozenTarget(
        embedding_VH=torch.randn(VOCAB, HIDDEN, generator=generator),
        head_VH=torch.randn(VOCAB, HIDDEN, generator=generator),
        norm_H=torch.ones(HIDDEN),
        norm_eps=1e-5,
    )


@torch.inference_mode()
def draft_at_once(drafter, frozen, features, anchor_id, num_tokens):
    """All features in one product, one block behind them."""
    end = len(features)
    kv = drafter.context_kv(features, torch.arange(end))
    anchor, mask = frozen.embedding_VH[[anchor_id]], frozen.embedding_VH[MASK]
    hidden = drafter(
        anchor, mask, kv, torch.tensor([0]), torch.tensor([end]), block_size=num_tokens + 1
    )
    return (hidden[0] @ frozen.head_VH.T).argmax(-1).tolist()


@torch.inference_mode()
def test_growing_context_equals_the_whole(drafter, frozen):
    features = torch.randn(23, len(LAYER_IDS) * HIDDEN, generator=torch.Generator().manual_seed(4))
    proposer = DrafterProposer(drafter, frozen)
    start = 0
    for end, num_tokens in ((9, 3), (10, 3), (13, 2), (17, 3), (23, 1)):
        proposer.observe(features[start:end])
        found = proposer.propose(end, end, num_tokens)
        assert found == draft_at_once(drafter, frozen, features[:end], end, num_tokens)
        start = end


@torch.inference_mode()
def test_a_prompt_has_a_proposer_of_its_own(drafter, frozen):
    features = torch.randn(9, len(LAYER_IDS) * HIDDEN)
    drafts = []
    for _ in range(2):
        proposer = DrafterProposer(drafter, frozen)
        proposer.observe(features)
        drafts.append(proposer.propose(7, 9, 3))
    assert drafts[0] == drafts[1]
