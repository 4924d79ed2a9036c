"""What a store is measured with: random states, or those of a cache in another width.

Takes a shape [T, L, H]; hands on uint16 bf16 bits. T tokens, L captured layers, H hidden.
"""

import ml_dtypes
import numpy as np

from hscache.errors import ConfigError
from hscache.manifest import (
    ContentIdentity,
    EncodingIdentity,
    Identity,
    StatesIdentity,
)
from hscache.plan import TokenizedDocument, corpus_sha256
from hscache.planes import Bits, Codec
from hscache.reader import Cache


def random_states(shape: tuple[int, int, int]) -> Bits:
    """Return random states as bf16 bits, uint16 [T, L, H], as hard to compress as real ones.

    Normal with a log-normal scale per channel: the exponents' entropy is that of residual streams.
    """
    rng = np.random.default_rng(0)
    tokens = shape[0]
    scale_LH = np.exp(rng.standard_normal(shape[1:], dtype=np.float32))
    bits_TLH = np.empty(shape, np.uint16)
    for start in range(0, tokens, 256):
        values = rng.standard_normal((min(256, tokens - start), *shape[1:]), dtype=np.float32)
        bits_TLH[start : start + 256] = (values * scale_LH).astype(ml_dtypes.bfloat16).view("u2")
    return bits_TLH


def regrouped(cache: Cache, shape: tuple[int, int, int]) -> Bits:
    """Return a cache's states as `shape` [T, L, H], each layer's values in their order.

    Raises ConfigError when the cache holds too few.
    """
    tokens, num_layers, hidden = shape
    found_layers = len(cache.identity.states.target_layer_ids)
    pieces: list[Bits] = []
    found = 0
    for number in cache.published_shards():
        if cache.shard_manifest(number).state != "published":
            continue
        shard = cache.shard(number)
        for row in shard.doc_rows.tolist():
            pieces.append(shard.bits(row).swapaxes(1, 2).reshape(-1, found_layers))
            found += len(pieces[-1])
            if found < tokens * hidden:
                continue
            values = np.concatenate(pieces)[: tokens * hidden]
            bits_TLH = np.empty(shape, np.uint16)
            for layer in range(num_layers):
                bits_TLH[:, layer] = values[:, layer % found_layers].reshape(tokens, hidden)
            return bits_TLH
    raise ConfigError(
        f"{cache.path} holds {found // hidden:,} rows of {hidden} values a layer, and {tokens:,} "
        "are needed. Give a larger cache or a smaller size_gb."
    )


def store_identity(
    corpus: list[TokenizedDocument], codec: Codec, num_layers: int, hidden_size: int
) -> Identity:
    """Return the identity of a cache of one shard that nobody trains from."""
    num_tokens = sum(len(document.ids_T) for document in corpus)
    return Identity(
        states=StatesIdentity(
            target="hscache bench store",
            revision="",
            config_sha256="",
            weights_sha256="",
            tokenizer_sha256="",
            template_sha256="",
            frozen_sha256="",
            target_layer_ids=tuple(range(num_layers)),
            num_target_layers=num_layers + 1,
            hidden_size=hidden_size,
            vocab_size=1,
            dtype="bfloat16",
            trust_remote_code=False,
        ),
        content=ContentIdentity(
            corpus_sha256=corpus_sha256(corpus),
            seed=0,
            max_tokens=max(len(document.ids_T) for document in corpus),
            over_long="drop",
            shard_tokens=num_tokens,
            num_documents=len(corpus),
            num_tokens=num_tokens,
            num_held_out_shards=0,
            num_shards=1,
        ),
        encoding=EncodingIdentity(codec=codec),
    )
