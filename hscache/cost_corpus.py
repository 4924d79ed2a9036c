"""The corpus of a planned run: counted from its files, or assumed from a number of tokens.

Takes the settings of `hscache plan`; hands on tokens, documents, lengths and shards.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from hscache import cost
from hscache.cost_config import CostConfig, PlannedProduce
from hscache.errors import ConfigError


def describe_corpus(config: CostConfig, produce: PlannedProduce) -> dict[str, Any]:
    """Return tokens, documents, lengths and shards, counted or assumed, and how."""
    data = produce.data
    share = data.held_out_fraction if config.held_out_fraction is None else config.held_out_fraction
    if config.tokens is None:
        return _tokenised(config, produce)
    if config.lengths is not None:
        lengths_D = np.minimum(_read_lengths(config.lengths), data.max_tokens)
        lengths = cost.lengths_of(lengths_D, config.tokens)
        how = f"{len(lengths_D):,} lengths of {config.lengths}, cut at {data.max_tokens:,}"
    else:
        assert config.mean_tokens is not None
        lengths = cost.log_normal_lengths(config.mean_tokens, data.max_tokens, config.tokens)
        how = (
            f"log-normal of mean {config.mean_tokens:,.0f} and spread 0.8 (assumed), cut at "
            f"{data.max_tokens:,}"
        )
    shard_tokens = produce.store.shard_tokens
    held_out_shards = math.ceil(cost.num_shards(lengths, shard_tokens) * share) if share else 0
    training = dataclasses.replace(lengths, num_tokens=round(lengths.num_tokens * (1 - share)))
    return {
        "tokens": lengths.num_tokens,
        "training_tokens": training.num_tokens,
        "documents": lengths.num_documents,
        "mean_square": lengths.mean_square,
        "longest": lengths.longest,
        "shards": cost.num_shards(training, shard_tokens) + held_out_shards,
        "held_out_shards": held_out_shards,
        "lengths": how,
        "tokenise_s": None,
    }


def _read_lengths(path: Path) -> Any:
    try:
        lengths_D = np.array([int(word) for word in path.read_text().split()], np.int64)
    except (OSError, ValueError) as error:
        raise ConfigError(f"lengths {path}: {error}; expected one whole number a line.") from error
    if not len(lengths_D) or lengths_D.min() < 1:
        raise ConfigError(f"lengths {path} has no lengths, or one below 1.")
    return lengths_D


def _tokenised(config: CostConfig, produce: PlannedProduce) -> dict[str, Any]:
    """Count the corpus itself: all of it is tokenised and dealt, as `produce` would."""
    from hscache.config import ProduceConfig
    from hscache.documents import load_corpus
    from hscache.plan import deal_into_shards
    from hscache.pretrained import load_tokenizer

    whole = ProduceConfig(
        shard_dir=config.shard_dir,
        target=produce.target,
        data=produce.data,
        store=produce.store,
        token_budget=produce.token_budget,
    )
    tokenizer = load_tokenizer(whole.target)
    started = time.perf_counter()
    corpus = load_corpus(whole.data, tokenizer, whole.store.seed)
    shards = deal_into_shards(corpus.documents, whole.store.shard_tokens, whole.store.seed)
    tokenise_s = time.perf_counter() - started  # produce does the same before its first pack
    lengths_D = np.array([len(document.ids_T) for document in corpus.documents], np.int64)
    training = np.array([not document.held_out for document in corpus.documents])
    lengths = cost.lengths_of(lengths_D)
    return {
        "tokens": lengths.num_tokens,
        "training_tokens": int(lengths_D[training].sum()),
        "documents": lengths.num_documents,
        "mean_square": lengths.mean_square,
        "longest": lengths.longest,
        "shards": len(shards),
        "held_out_shards": sum(corpus.documents[shard[0]].held_out for shard in shards),
        "lengths": "counted",
        "tokenise_s": tokenise_s,
    }
