"""Answer prompts by real speculative decoding, and hold every text to plain greedy decoding.

Takes prompts, a drafter and the cache it was trained on; loads the target, which must be the
cache's. Hands on acceptance, times and the texts.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from hscache.device import DTYPES
from hscache.errors import CacheMismatchError
from hscache.fingerprint import (
    config_sha256,
    template_sha256,
    tokenizer_sha256,
    weights_sha256,
)
from hscache.pretrained import find_stop_ids, load_model, load_pretrained
from hscache.progress import Progress
from hscache.prompts import prompt_ids, read_prompts
from hscache.reader import Cache
from hscache.template_kwargs import parse_template_kwargs, set_template_kwargs
from trainer.acceptance import Acceptance
from trainer.config import EvalConfig
from trainer.decode import compare_with_greedy, plain_greedy, speculative_decode
from trainer.drafter import Drafter
from trainer.frozen import FrozenTarget
from trainer.proposer import DrafterProposer
from trainer.tables import Text


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Real decoding of all prompts."""

    acceptance: Acceptance
    """dense figures are empty: decoding visits one chain of anchors"""
    num_prompts: int
    num_tokens: int
    """new tokens, the prefills' included"""
    num_ties: int
    seconds_speculative: float
    seconds_greedy: float
    texts: list[Text]
    """the greedy texts, for the table drafters"""

    @property
    def tokens_per_target_step(self) -> float:
        """New tokens over target passes, prefills included."""
        return self.num_tokens / (self.acceptance.steps + self.num_prompts)


def decode_prompts(
    config: EvalConfig,
    cache: Cache,
    drafter: Drafter,
    frozen: FrozenTarget,
    device: torch.device,
) -> Decoded:
    """Answer prompts by speculative decoding, check each text against plain greedy decoding.

    Raises CacheMismatchError when the target, its tokenizer or template are not the cache's, and
    DecodeMismatchError when a text differs (in float32), or by more than a tie (bfloat16).
    """
    path = config.target or cache.identity.states.target
    if Path(path).is_dir() and weights_sha256(path) != cache.identity.states.weights_sha256:
        raise CacheMismatchError(
            f"the weights in {path} are not those the cache {cache.path} was made with. Give the "
            "target's folder with --target."
        )
    dtype = DTYPES[config.dtype]
    # A cache never switches on trust_remote_code; hub models are pinned to the cache's revision.
    revision = cache.identity.states.revision or None
    _require_config(path, revision, cache)
    tokenizer = load_pretrained(AutoTokenizer, path, revision=revision)
    values = parse_template_kwargs(cache.identity.states.template_kwargs)
    set_template_kwargs(tokenizer, values)  # prompts as those the drafter has learned from
    _require_tokenizer(tokenizer, path, cache)
    target = load_model(path, dtype=dtype, revision=revision).to(device).eval()
    _require_frozen(target, frozen, path, cache)
    stop_ids = find_stop_ids(target, tokenizer)
    prompts = read_prompts(config.prompts)[: config.max_prompts]
    parts, texts, ties, new_tokens = [], [], 0, 0
    spent = {"speculative": 0.0, "greedy": 0.0}
    with Progress(len(prompts), unit="prompts", label="decode") as progress:
        for prompt in prompts:
            ids = prompt_ids(prompt, tokenizer)
            started = time.perf_counter()
            result = speculative_decode(
                target,
                ids,
                DrafterProposer(drafter, frozen),
                target_layer_ids=drafter.config.target_layer_ids,
                block_size=drafter.config.block_size,
                max_new_tokens=config.max_new_tokens,
                stop_ids=stop_ids,
            )
            spent["speculative"] += time.perf_counter() - started
            started = time.perf_counter()
            greedy = plain_greedy(target, ids, config.max_new_tokens, stop_ids)
            spent["greedy"] += time.perf_counter() - started
            ties += compare_with_greedy(target, ids, result.ids, greedy, dtype).kind == "tie"
            mask = np.array([0] * len(ids) + [1] * len(greedy), bool)
            texts.append(Text(np.array(ids + greedy), mask))
            new_tokens += len(result.ids)
            if result.steps:
                mean = result.committed / result.steps
                parts.append(
                    Acceptance(
                        committed=result.committed, steps=result.steps, document_means=(mean,)
                    )
                )
            progress.advance(1)
    return Decoded(
        acceptance=sum(parts, Acceptance()),
        num_prompts=len(prompts),
        num_tokens=new_tokens,
        num_ties=ties,
        seconds_speculative=spent["speculative"],
        seconds_greedy=spent["greedy"],
        texts=texts,
    )


def _require_config(path: str, revision: str | None, cache: Cache) -> None:
    config = load_pretrained(AutoConfig, path, revision=revision).get_text_config()
    found = config_sha256(json.loads(config.to_json_string(use_diff=False)))
    if found != cache.identity.states.config_sha256:
        raise CacheMismatchError(
            f"the config of {path} is not that of the target of {cache.path}; the same weights "
            "under another config are another model. Give the target's folder with --target."
        )


def _require_tokenizer(tokenizer: Any, path: str, cache: Cache) -> None:
    states = cache.identity.states
    for what, found, expected in (
        ("tokenizer", tokenizer_sha256(tokenizer), states.tokenizer_sha256),
        ("chat template", template_sha256(tokenizer), states.template_sha256),
    ):
        if found != expected:
            raise CacheMismatchError(
                f"the {what} of {path} is not the one the cache {cache.path} was made with: the "
                "drafter has never seen such prompts. Give the target's folder with --target."
            )


def _require_frozen(target: Any, frozen: FrozenTarget, path: str, cache: Cache) -> None:
    # A hub model has no folder to hash; its embedding tells it from another one. In bfloat16,
    # because the producer may have run in another dtype.
    theirs, ours = target.get_input_embeddings().weight, frozen.embedding_VH
    if theirs.shape != ours.shape or not torch.equal(theirs.bfloat16(), ours.bfloat16()):
        raise CacheMismatchError(
            f"{path} has another embedding than the target of the cache {cache.path} "
            f"({cache.identity.states.target}). Give that target with --target."
        )
