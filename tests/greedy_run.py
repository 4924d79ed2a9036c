"""A tiny random Llama, its greedy answers in a cache, and a drafter overfitted to them.

`python -m pytest` puts this folder on the path, so tests import it by name.
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from trainer_cache import documents, fit_config, make_cache, to_bits
from transformers import LlamaConfig, LlamaForCausalLM

from hscache.frozen import Frozen
from hscache.plan import TokenizedDocument
from hscache.reader import open_cache
from trainer.config import FitConfig
from trainer.decode import plain_greedy
from trainer.fit import fit

BLOCK = 8
LAYER_IDS, NUM_NEW = (0, 2), 24


def tiny_llama() -> LlamaForCausalLM:
    """Five blocks, hidden 32; its greedy text does not repeat itself soon."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=5,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
        initializer_range=0.3, tie_word_embeddings=False, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@dataclasses.dataclass(frozen=True)
class Greedy:
    """A target's greedy answers, in a cache, and a drafter trained on them."""

    target: LlamaForCausalLM
    folder: Path
    prompts: dict[int, list[int]]
    answers: dict[int, list[int]]
    states: dict[int, torch.Tensor]
    """fp32 [T, L, H], before the rounding of the cache"""
    config: FitConfig


def train_on_greedy_text(base: Path) -> Greedy:
    """Answer five prompts greedily, cache them, and train until the drafter knows them."""
    target = tiny_llama()
    prompts = [d.ids_T.tolist() for d in documents([6, 4, 9, 5, 7], seed=9)]
    answers = [plain_greedy(target, p, NUM_NEW, ()) for p in prompts]
    corpus = [
        TokenizedDocument(
            ids_T=np.array(p + a, np.int32),
            loss_mask_T=np.array([0] * len(p) + [1] * len(a), np.uint8),
            source_row=i,
            held_out=False,
        )
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    states = []
    for document in corpus:
        with torch.inference_mode():
            ids = torch.from_numpy(document.ids_T.astype(np.int64))[None]
            hidden = target(ids, output_hidden_states=True).hidden_states
        states.append(torch.stack([hidden[i + 1][0] for i in LAYER_IDS], dim=1).clone())
    # Plan rows are in shard order: find each document again by its ids.
    by_ids = {tuple(d.ids_T.tolist()): i for i, d in enumerate(corpus)}
    order = open_cache(
        make_cache(base / "order", corpus, leave_out=range(9), target_layer_ids=LAYER_IDS)
    ).plan
    index = [by_ids[tuple(order.input_ids(row).tolist())] for row in range(len(corpus))]
    folder = make_cache(
        base / "cache", corpus,
        bits=lambda row, _: to_bits(states[index[row]]),
        frozen=Frozen(
            embedding_VH=target.model.embed_tokens.weight.detach(),
            head_VH=target.lm_head.weight.detach(),
            norm_H=target.model.norm.weight.detach(),
            norm_eps=1e-6, norm_form="w",
        ),
        target_layer_ids=LAYER_IDS,
    )  # fmt: skip
    config = fit_config(
        folder, base / "run", passes=150, optim={"lr": 8e-3}, anchors_per_row=100, row_tokens=160,
        drafter={"block_size": BLOCK, "intermediate_size": 96}, global_batch_rows=1, log_every=50,
    )  # fmt: skip
    fit(config)
    return Greedy(
        target=target,
        folder=folder,
        prompts={row: prompts[i] for row, i in enumerate(index)},
        answers={row: answers[i] for row, i in enumerate(index)},
        states={row: states[i] for row, i in enumerate(index)},
        config=config,
    )
