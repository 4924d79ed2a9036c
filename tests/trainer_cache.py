"""Small caches to train on, made without a target: random or coded states, a random frozen part.

`python -m pytest` puts this folder on the path, so tests import it by name.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_maker import make_identity

from hscache import files, layout
from hscache.fingerprint import config_sha256
from hscache.frozen import Frozen
from hscache.manifest import WindowIdentity, encode_group
from hscache.plan import TokenizedDocument, deal_into_shards, write_plan
from hscache.writer import ShardWriter
from trainer.config import DrafterShape, FitConfig, LossConfig, OptimConfig

HIDDEN, VOCAB, LAYER_IDS, NUM_LAYERS = 32, 128, (0, 2), 5
PAD, EOS, MASK = 0, 2, 5
SHAPE = {
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "block_size": 4,
    "mask_token_id": MASK,
}


def documents(lengths, *, seed: int = 0, held_out=(), prompt: int = 3) -> list[TokenizedDocument]:
    """Documents of random ids; the first `prompt` tokens of each are not supervised."""
    rng = np.random.default_rng(seed)
    return [
        TokenizedDocument(
            ids_T=rng.integers(8, VOCAB, length).astype(np.int32),
            loss_mask_T=(np.arange(length) >= prompt).astype(np.uint8),
            source_row=i,
            held_out=i in held_out,
        )
        for i, length in enumerate(lengths)
    ]


def random_frozen(seed: int = 0, *, tied: bool = False) -> Frozen:
    """Embedding, head and norm of no particular target."""
    generator = torch.Generator().manual_seed(seed)
    return Frozen(
        embedding_VH=torch.randn(VOCAB, HIDDEN, generator=generator),
        head_VH=None if tied else torch.randn(VOCAB, HIDDEN, generator=generator),
        norm_H=torch.rand(HIDDEN, generator=generator) + 0.5,
        norm_eps=1e-5,
        norm_form="w",
    )


def to_bits(values: torch.Tensor) -> np.ndarray:
    """Round to bfloat16 and return the bits, uint16."""
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def random_bits(num_tokens: int, seed: int) -> np.ndarray:
    """Normal states, bf16 bits [T, L, H]."""
    generator = torch.Generator().manual_seed(seed)
    return to_bits(torch.randn(num_tokens, len(LAYER_IDS), HIDDEN, generator=generator))


def coded_bits(row: int, num_tokens: int) -> np.ndarray:
    """Bits that name document, position (below 30), layer and channel, as long as row < 26."""
    position, layer, channel = np.meshgrid(
        np.arange(num_tokens), np.arange(len(LAYER_IDS)), np.arange(HIDDEN), indexing="ij"
    )
    return (row * 900 + position * 30 + layer * 15 + channel % 15).astype(np.uint16)


def make_cache(
    folder: Path,
    corpus: list[TokenizedDocument],
    *,
    bits=lambda row, num_tokens: random_bits(num_tokens, row),
    frozen: Frozen | None = None,
    config: dict | None = None,
    shard_tokens: int = 120,
    quarantine: tuple[int, ...] = (),
    leave_out: tuple[int, ...] = (),
    window: WindowIdentity | None = None,
    **states,
) -> Path:
    """Write a cache; `bits(row, num_tokens)` gives the states of a plan row.

    `leave_out` names shards that are not published, `states` replaces fields of the identity.
    """
    folder.mkdir(parents=True)
    shards = deal_into_shards(corpus, shard_tokens, seed=0)
    weights = (frozen or random_frozen()).to_bytes()
    config = config or {
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 512,
    }
    identity = make_identity(
        corpus,
        shards,
        shard_tokens=shard_tokens,
        **{
            "config_sha256": config_sha256(config),
            "frozen_sha256": hashlib.sha256(weights).hexdigest(),
            "target_layer_ids": LAYER_IDS,
            "num_target_layers": NUM_LAYERS,
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            **states,
        },
    )
    if window is not None:
        identity = dataclasses.replace(identity, window=window)
    write_plan(folder, corpus, shards, {})
    layout.frozen_dir(folder).mkdir()
    layout.frozen_weights(folder).write_bytes(weights)
    layout.target_config_file(folder).write_text(json.dumps(config))
    files.create_once(layout.root_file(folder), encode_group(identity))
    row = 0
    for number, shard in enumerate(shards):
        rows = range(row, row + len(shard))
        row = rows.stop
        if number not in leave_out:
            publish(folder, number, identity, dict(zip(rows, shard, strict=True)), corpus, bits,
                    quarantine)  # fmt: skip
    return folder


def publish(folder, number, identity, members, corpus, bits, quarantine=()) -> None:
    """Write one shard; `members` maps its plan rows to indices into `corpus`."""
    with ShardWriter(folder, number, identity) as writer:
        for row, index in members.items():
            if row in quarantine:
                writer.quarantine(row, "a test said so")
            else:
                writer.add(row, bits(row, len(corpus[index].ids_T)))
        writer.publish({})


def fit_config(shards: Path, run_dir: Path, *, drafter=None, optim=None, loss=None, **changes):
    """A FitConfig of a tiny drafter in fp32 on the CPU."""
    return FitConfig(
        **{
            "shards": shards,
            "run_dir": run_dir,
            "drafter": DrafterShape(**{**SHAPE, **(drafter or {})}),
            "optim": OptimConfig(**{"lr": 3e-3, **(optim or {})}),
            "loss": LossConfig(**{"gamma": 4.0, **(loss or {})}),
            "passes": 2,
            "row_tokens": 64,
            "anchors_per_row": 12,
            "global_batch_rows": 2,
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "log_every": 1,
            **changes,
        }
    )


def metrics_of(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    """Mount a tmpfs of that size on a new folder; yield a function that changes the size."""
    folder.mkdir()

    def mount(size: str, option: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},{option}", "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if os.geteuid() != 0 or not mount(size, "rw"):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield lambda size: mount(size, "remount")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(place: Path) -> Path:
    """Take all that is free, and more: a program that does not give up."""
    with open(place / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return place / "filler"
