"""Bytes and inodes: what a shard may take at the worst, what a cache takes now, what is left.

Takes layouts, counts and folders. Files count in blocks of 4 KiB and folders as one such block, as
on most filesystems, so what is summed here is what a disk loses.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hscache import layout
from hscache.manifest import Identity, WindowIdentity
from hscache.plan import Plan
from hscache.planes import Codec
from hscache.window import DiskNeeds
from hscache.zarr_array import CHECKSUM_BYTES, ArrayLayout

BLOCK_BYTES = 4096
_HEARTBEATS_BYTES = 64 * BLOCK_BYTES
"""producers/, consumers/, and what is being written beside a file to replace it"""


def filesystem(where: Path) -> os.statvfs_result:
    """Return the figures of the filesystem that holds `where`, which need not exist yet."""
    while not where.exists():
        where = where.parent
    return os.statvfs(where)


def free_bytes(where: Path) -> int:
    """Return the bytes that may still be written there."""
    status = filesystem(where)
    return status.f_bavail * status.f_frsize


def free_inodes(where: Path) -> int | None:
    """Return the files and folders that may still be made there; None where nobody counts."""
    status = filesystem(where)
    return status.f_favail if status.f_files else None


def in_blocks(size_bytes: int) -> int:
    """Round up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def array_bound(array: ArrayLayout, num_rows: int) -> int:
    """Return the bytes that an array's file has at most, if zstd cannot make its chunks smaller."""
    chunks = array.num_bands(num_rows) * array.chunks_per_band
    if array.row_shape == ():
        # Short and in one chunk: the padding behind its rows is zeros, which cost next to nothing.
        row_bytes = num_rows * np.dtype(array.dtype).itemsize
        payload = row_bytes + row_bytes // 128 + 1024 * chunks
    else:
        payload = chunks * (array.chunk_bytes + array.chunk_bytes // 256 + 128)
    return payload + chunks * CHECKSUM_BYTES + array.index_bytes(num_rows)


@dataclass(frozen=True, kw_only=True)
class ShardShape:
    """What the files of a shard follow from, beside its tokens and documents."""

    codec: Codec
    num_layers: int
    hidden_size: int
    last_hidden: bool

    @classmethod
    def of(cls, identity: Identity) -> ShardShape:
        """Return that of a cache."""
        states = identity.states
        return cls(
            codec=identity.encoding.codec,
            num_layers=len(states.target_layer_ids),
            hidden_size=states.hidden_size,
            last_hidden=states.last_hidden,
        )

    def arrays(self) -> dict[str, ArrayLayout]:
        """Return the layouts of all arrays of a shard."""
        return layout.SHARD_SIDE_ARRAYS | layout.state_layouts(
            self.codec, self.num_layers, self.hidden_size, last_hidden=self.last_hidden
        )


def attributes_bound(shape: ShardShape, num_documents: int) -> int:
    """Return the bytes of a shard's own folder and attributes, which a tombstone keeps."""
    layers = shape.num_layers + shape.last_hidden
    return BLOCK_BYTES + in_blocks(12 * 1024 + 512 * layers + 24 * num_documents)


def shard_bound(shape: ShardShape, num_tokens: int, num_documents: int) -> int:
    """Return the bytes on disk that a shard takes at most."""
    total = attributes_bound(shape, num_documents)
    for name, array in shape.arrays().items():
        rows = num_documents + 1 if name in layout.SHARD_SIDE_ARRAYS else num_tokens
        total += BLOCK_BYTES + in_blocks(len(name) + 2048) + in_blocks(array_bound(array, rows))
    return total


def shard_inodes(shape: ShardShape) -> int:
    """Return the files and folders of a shard: each array has its folder, attributes and bytes."""
    return 2 + 3 * len(shape.arrays())


def disk_needs(plan: Plan, identity: Identity, fixed_bytes: int) -> DiskNeeds:
    """Return what a plan takes at the worst; `fixed_bytes` is what lies beside the shards."""
    bounds = {shard: plan_shard_bound(plan, identity, shard) for shard in range(plan.num_shards)}
    tombstones = sum(
        attributes_bound(ShardShape.of(identity), len(plan.shard_documents(shard)))
        for shard in plan.training_shards
    )
    return DiskNeeds(
        fixed_bytes=in_blocks(fixed_bytes) + _HEARTBEATS_BYTES + tombstones,
        held_out_bytes=sum(bounds[shard] for shard in plan.held_out_shards),
        shard_bytes=max((bounds[shard] for shard in plan.training_shards), default=BLOCK_BYTES),
        num_shards=len(plan.training_shards),
        shard_tokens=identity.content.shard_tokens,
    )


def plan_shard_bound(plan: Plan, identity: Identity, shard: int) -> int:
    """Return the bytes on disk that a shard of the plan takes at most."""
    documents = plan.shard_documents(shard)
    num_tokens = int(plan.offsets[documents.stop] - plan.offsets[documents.start])
    return shard_bound(ShardShape.of(identity), num_tokens, len(documents))


def used_bytes(folder: Path, skip: Collection[str] = ()) -> int:
    """Return the bytes that a file or folder takes; entries of these names are left out.

    What is renamed or deleted meanwhile counts as it was seen, or not at all.
    """
    try:
        if not folder.is_dir() or folder.is_symlink():
            return in_blocks(folder.lstat().st_size)
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return 0
    total = BLOCK_BYTES
    for entry in entries:
        if entry.name in skip:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                total += used_bytes(Path(entry.path), skip)
            else:
                total += in_blocks(entry.stat(follow_symlinks=False).st_size)
        except FileNotFoundError:
            continue
    return total


def slots(window: WindowIdentity) -> int:
    """Return how many training shards may be on disk at a time."""
    return window.shards + window.reserve
