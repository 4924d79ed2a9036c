"""Where everything lies in a cache folder, and the exact shape of every array in it.

Takes counts and settings, hands on paths and `ArrayLayout`s. Names are fixed patterns: nothing read
from metadata is ever used as a path.
"""

import re
from pathlib import Path

from hscache.planes import ARRAYS, Codec
from hscache.zarr_array import ArrayLayout

CHUNK_TOKENS = 256
"""Tokens in an inner chunk: 2.6 MB of bf16 at hidden 5120, and layers never share one."""
FLAT_CHUNK = 65_536
LAST_HIDDEN = "last_hidden_"
"""Prefix of the arrays that hold the output of the last block, before the final norm."""

_SHARD_NAME = re.compile(r"[0-9]{6}|[1-9][0-9]{6,11}")
"""One name per number: `0000001` would be a second shard 1."""


def root_file(cache_dir: Path) -> Path:
    """Return the root group's metadata: the cache's identity."""
    return cache_dir / "zarr.json"


def plan_dir(cache_dir: Path) -> Path:
    """Return the folder of the tokenised corpus."""
    return cache_dir / "plan"


def tokens_dir(cache_dir: Path) -> Path:
    """Return the folder of what is tokenised until the plan is made of it."""
    return cache_dir / "tokenizing"


def frozen_dir(cache_dir: Path) -> Path:
    """Return the folder with the target's embedding, head and final norm."""
    return cache_dir / "frozen"


def frozen_weights(cache_dir: Path) -> Path:
    """Return the safetensors file in `frozen/`."""
    return frozen_dir(cache_dir) / "weights.safetensors"


def target_config_file(cache_dir: Path) -> Path:
    """Return the target's text config, for people and for export; hashed in the identity."""
    return frozen_dir(cache_dir) / "target_config.json"


def shards_dir(cache_dir: Path) -> Path:
    """Return the folder that holds one folder per published shard."""
    return cache_dir / "shards"


def shard_dir(cache_dir: Path, shard: int) -> Path:
    """Return a shard's folder."""
    return shards_dir(cache_dir) / f"{shard:06d}"


def producers_dir(cache_dir: Path) -> Path:
    """Return the folder of producers' heartbeats."""
    return cache_dir / "producers"


def consumers_dir(cache_dir: Path) -> Path:
    """Return the folder in which trainers that follow say what they are done with."""
    return cache_dir / "consumers"


def list_shards(cache_dir: Path) -> list[int]:
    """Return the ids of the shards that have been published (or freed), ascending."""
    folder = shards_dir(cache_dir)
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if _SHARD_NAME.fullmatch(p.name))


def state_layouts(
    codec: Codec, num_layers: int, hidden_size: int, *, last_hidden: bool
) -> dict[str, ArrayLayout]:
    """Return the arrays that hold a shard's hidden states, by name.

    With `last_hidden` those of the last block's output are among them: their names start with
    `LAST_HIDDEN`, and they have no axis of layers.
    """
    layouts = {}
    for name, stored in ARRAYS[codec].items():
        hidden = (hidden_size,) if stored.per_hidden else ()
        layouts[name] = ArrayLayout(
            dtype=stored.dtype,
            row_shape=(num_layers, *hidden),
            chunk_rows=CHUNK_TOKENS,
            chunk_row_shape=(1, *hidden),
            compressed=stored.compressed,
            axes=("token", "layer", "hidden")[: 2 + len(hidden)],
        )
        if last_hidden:
            layouts[LAST_HIDDEN + name] = ArrayLayout(
                dtype=stored.dtype,
                row_shape=hidden,
                chunk_rows=CHUNK_TOKENS,
                chunk_row_shape=hidden,
                compressed=stored.compressed,
                axes=("token", "hidden")[: 1 + len(hidden)],
            )
    return layouts


def flat_layout(dtype: str, axis: str) -> ArrayLayout:
    """Return the layout of a one-dimensional array."""
    return ArrayLayout(
        dtype=dtype,
        row_shape=(),
        chunk_rows=FLAT_CHUNK,
        chunk_row_shape=(),
        compressed=True,  # or a shard of ten documents would carry a megabyte of padding
        axes=(axis,),
    )


SHARD_SIDE_ARRAYS = {
    "doc_offsets": flat_layout("int64", "boundary"),
    "doc_rows": flat_layout("int64", "document"),
}
"""Where each document of a shard starts (one more entry than documents); its row in the plan."""

PLAN_ARRAYS = {
    "lengths": flat_layout("int32", "document"),
    "keys": flat_layout("uint64", "document"),
    "shards": flat_layout("int32", "document"),
    "source_rows": flat_layout("int64", "document"),
    "valid_anchors": flat_layout("int32", "document"),
    "tokens": flat_layout("int32", "token"),
    "loss_mask": flat_layout("uint8", "token"),
}
"""The corpus, documents in shard order: tokens in each, content hash, shard, input row, anchors the
loss mask allows; then all token ids and all mask values as flat arrays."""
