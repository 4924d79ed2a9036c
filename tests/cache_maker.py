"""Make caches of invented states, without a target: for tests of the format and the reader.

`python -m pytest` puts this folder on the path, so tests import it by name.
"""

from pathlib import Path

import ml_dtypes
import numpy as np

from hscache import files, layout
from hscache.manifest import (
    ContentIdentity,
    EncodingIdentity,
    Identity,
    StatesIdentity,
    encode_group,
)
from hscache.plan import TokenizedDocument, corpus_sha256, deal_into_shards, write_plan
from hscache.writer import ShardWriter

LAYER_IDS = (1, 3)
HIDDEN = 8


def make_documents(num_documents: int, seed: int = 0, longest: int = 40) -> list[TokenizedDocument]:
    """Random documents; every fifth is held out."""
    rng = np.random.default_rng(seed)
    documents = []
    for i in range(num_documents):
        length = int(rng.integers(1, longest + 1))
        documents.append(
            TokenizedDocument(
                ids_T=rng.integers(0, 1000, length).astype(np.int32),
                loss_mask_T=(rng.random(length) < 0.6).astype(np.uint8),
                source_row=i,
                held_out=i % 5 == 4,
            )
        )
    return documents


def make_identity(documents, shards, *, codec="lossless", shard_tokens=100, **states) -> Identity:
    """An identity that fits the documents; `states` replaces fields of the first tier."""
    ordered = [documents[i] for shard in shards for i in shard]
    fields = {
        "target": "/models/tiny",
        "revision": "",
        "config_sha256": "a" * 64,
        "weights_sha256": "b" * 64,
        "tokenizer_sha256": "c" * 64,
        "template_sha256": "d" * 64,
        "frozen_sha256": "e" * 64,
        "target_layer_ids": LAYER_IDS,
        "num_target_layers": 6,
        "hidden_size": HIDDEN,
        "vocab_size": 1000,
        "dtype": "bfloat16",
        "trust_remote_code": False,
    }
    return Identity(
        states=StatesIdentity(**{**fields, **states}),
        content=ContentIdentity(
            corpus_sha256=corpus_sha256(ordered),
            seed=0,
            max_tokens=4096,
            over_long="drop",
            shard_tokens=shard_tokens,
            num_documents=len(ordered),
            num_tokens=sum(len(d.ids_T) for d in ordered),
            num_held_out_shards=sum(documents[shard[0]].held_out for shard in shards),
            num_shards=len(shards),
        ),
        encoding=EncodingIdentity(codec=codec),
    )


def make_states(num_tokens: int, seed: int, layers: int = len(LAYER_IDS), hidden: int = HIDDEN):
    """Finite normal bf16 bits, uint16 [T, L, H], from integers alone (no floating-point maths)."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, layers, hidden)
    exponent = rng.integers(120, 134, shape)
    return (exponent << 7 | rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15).astype(
        np.uint16
    )


def make_cache(
    folder: Path,
    *,
    num_documents: int = 20,
    codec: str = "lossless",
    shard_tokens: int = 100,
    quarantine: tuple[int, ...] = (),
    only_shards: int | None = None,
    last_hidden: bool = False,
) -> tuple[list[TokenizedDocument], list[np.ndarray]]:
    """Write a cache; return its documents and their states (bf16 bits) in plan order.

    With `last_hidden` the states have one more layer, the last block's output.
    """
    documents = make_documents(num_documents)
    shards = deal_into_shards(documents, shard_tokens, seed=0)
    identity = make_identity(
        documents, shards, codec=codec, shard_tokens=shard_tokens, last_hidden=last_hidden
    )
    layers = len(LAYER_IDS) + last_hidden
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder, documents, shards, {"rows in": num_documents})
    files.create_once(layout.root_file(folder), encode_group(identity))
    ordered = [documents[i] for shard in shards for i in shard]
    states = [make_states(len(d.ids_T), seed=row, layers=layers) for row, d in enumerate(ordered)]
    row = 0
    for number, shard in enumerate(shards):
        if only_shards is not None and number >= only_shards:
            break
        with ShardWriter(folder, number, identity) as writer:
            for _ in shard:
                if row in quarantine:
                    writer.quarantine(row, "a test said so")
                else:
                    writer.add(row, states[row])
                row += 1
            writer.publish({"by": "test"})
    return ordered, states


def as_bf16(bits: np.ndarray) -> np.ndarray:
    """The numbers behind bf16 bits."""
    return bits.view(ml_dtypes.bfloat16)
