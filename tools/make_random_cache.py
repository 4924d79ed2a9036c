"""Write a cache of random states in the shape of a large target, to bench without its weights.

    python tools/make_random_cache.py /dev/shm/cache --documents 18 --document-tokens 4096

States are normal with a scale per channel, so they compress about as real ones do; embedding, head
and norm are random too. Everything else is an ordinary cache that `trainer bench` and `fit` take;
nothing learned from it means anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from hscache import files, layout
from hscache.fingerprint import config_sha256
from hscache.frozen import Frozen
from hscache.manifest import (
    ContentIdentity,
    EncodingIdentity,
    Identity,
    StatesIdentity,
    encode_group,
)
from hscache.plan import TokenizedDocument, corpus_sha256, deal_into_shards, write_plan
from hscache.writer import ShardWriter


def main() -> int:
    """Parse arguments and write the cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=18, help="one of them is held out")
    parser.add_argument("--document-tokens", type=int, default=4096)
    parser.add_argument("--shortest", type=int, help="draw lengths from here to document-tokens")
    parser.add_argument("--hidden-size", type=int, default=5120)
    parser.add_argument("--vocab-size", type=int, default=248320)
    parser.add_argument("--layer-ids", type=int, nargs="+", default=[1, 16, 31, 46, 61])
    parser.add_argument("--num-target-layers", type=int, default=64)
    parser.add_argument("--codec", default="lossless")
    parser.add_argument("--shard-tokens", type=int, default=65536)
    parser.add_argument("--threads", type=int, default=8)
    arguments = parser.parse_args()
    started = time.perf_counter()
    write_cache(arguments)
    print(f"{arguments.folder}: {time.perf_counter() - started:.0f} s")
    return 0


def write_cache(arguments: argparse.Namespace) -> None:
    """Write plan, frozen weights and shards, then the root: a killed run leaves no cache."""
    folder, hidden, vocab = arguments.folder, arguments.hidden_size, arguments.vocab_size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(shape, device=device, generator=generator, dtype=torch.float32)
        return (drawn * scale).bfloat16()

    rng = np.random.default_rng(0)
    longest, shortest = arguments.document_tokens, arguments.shortest or arguments.document_tokens
    corpus = []
    for i in range(arguments.documents):
        length = int(rng.integers(shortest, longest + 1))
        mask_T = np.ones(length, np.uint8)
        mask_T[: length // 16] = 0  # a prompt
        corpus.append(
            TokenizedDocument(
                ids_T=rng.integers(0, vocab, length).astype(np.int32),
                loss_mask_T=mask_T,
                source_row=i,
                held_out=i == 0,
            )
        )
    shards = deal_into_shards(corpus, arguments.shard_tokens, seed=0)
    ordered = [corpus[i] for shard in shards for i in shard]
    folder.mkdir(parents=True)
    frozen = Frozen(
        embedding_VH=normal(vocab, hidden, scale=0.02),
        head_VH=normal(vocab, hidden, scale=0.02),
        norm_H=torch.ones(hidden),
        norm_eps=1e-6,
        norm_form="w",
    ).to_bytes()
    layout.frozen_dir(folder).mkdir()
    layout.frozen_weights(folder).write_bytes(frozen)
    config = {
        "hidden_size": hidden,
        "vocab_size": vocab,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "max_position_embeddings": 262144,
    }
    layout.target_config_file(folder).write_text(json.dumps(config))
    identity = Identity(
        states=StatesIdentity(
            target="random states",
            revision="",
            config_sha256=config_sha256(config),
            weights_sha256="none",
            tokenizer_sha256="none",
            template_sha256="none",
            frozen_sha256=hashlib.sha256(frozen).hexdigest(),
            target_layer_ids=tuple(arguments.layer_ids),
            num_target_layers=arguments.num_target_layers,
            hidden_size=hidden,
            vocab_size=vocab,
            dtype="bfloat16",
            trust_remote_code=False,
        ),
        content=ContentIdentity(
            corpus_sha256=corpus_sha256(ordered),
            seed=0,
            max_tokens=longest,
            over_long="drop",
            shard_tokens=arguments.shard_tokens,
            num_documents=len(ordered),
            num_tokens=sum(len(document.ids_T) for document in ordered),
            num_held_out_shards=1,
            num_shards=len(shards),
        ),
        encoding=EncodingIdentity(codec=arguments.codec),
    )
    write_plan(folder, corpus, shards, {})
    num_layers = len(arguments.layer_ids)
    scale_LH = normal(num_layers, hidden).float().exp()
    row = 0
    with ThreadPoolExecutor(arguments.threads) as pool:
        for number, shard in enumerate(shards):
            with ShardWriter(folder, number, identity, pool) as writer:
                for index in shard:
                    states = normal(len(corpus[index].ids_T), num_layers, hidden).float() * scale_LH
                    bits = states.bfloat16().view(torch.int16).cpu().numpy().view(np.uint16)
                    writer.add(row, bits)
                    row += 1
                writer.publish({"by": "make_random_cache"})
    files.create_once(layout.root_file(folder), encode_group(identity))


if __name__ == "__main__":
    sys.exit(main())
