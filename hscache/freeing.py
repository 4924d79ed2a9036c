"""Free shards that everybody is done with: a tombstone stays, the arrays go.

Takes an open cache and a shard's id; the shard's `zarr.json` is first replaced by one that says
`freed` and by whom (counts, statistics and checksums stay), then its arrays are deleted. Killed in
between, the rest is deleted by the next producer. Only producers call this.
"""

import dataclasses
import itertools
import os
import shutil
import time
from collections.abc import Sequence

from hscache import files, layout
from hscache.manifest import encode_group
from hscache.reader import Cache


def free_shard(cache: Cache, shard: int, consumers: Sequence[str]) -> None:
    """Replace a published shard by its tombstone; `consumers` had acknowledged it."""
    manifest = cache.shard_manifest(shard)
    if manifest.state != "freed":
        freed = {
            "by": files.process_name(),
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "acknowledged_by": list(consumers),
        }
        tombstone = dataclasses.replace(
            manifest, state="freed", provenance={**manifest.provenance, "freed": freed}
        )
        _replace_attributes(cache, shard, encode_group(tombstone))
    delete_arrays(cache, shard)


def _replace_attributes(cache: Cache, shard: int, data: bytes) -> None:
    # Written beside the shards, where what a killed producer leaves is looked for.
    folder = layout.shard_dir(cache.path, shard)
    temporary = folder.with_name(files.temporary_name())
    try:
        files.write_durable(temporary, data)
        os.replace(temporary, folder / "zarr.json")
    finally:
        temporary.unlink(missing_ok=True)
    files.fsync_folder(folder)


def delete_arrays(cache: Cache, shard: int) -> None:
    """Delete all but the attributes of a shard that is freed."""
    for path in layout.shard_dir(cache.path, shard).iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # another producer may be at it too


def is_freed(cache: Cache, shard: int) -> bool:
    """Say whether a published shard has been freed."""
    return cache.shard_manifest(shard).state == "freed"


def freed_shards(cache: Cache) -> list[int]:
    """Return the ids of the training shards that are freed, ascending.

    They are freed in order, so it reads the attributes of one more.
    """
    published = (s for s in cache.published_shards() if s in cache.plan.training_shards)
    return list(itertools.takewhile(lambda shard: is_freed(cache, shard), published))
