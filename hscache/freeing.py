"""Free shards that everybody is done with: a tombstone stays, the arrays go.

Takes an open cache and a shard's id; the shard's `zarr.json` is first replaced by one that says
`freed` and by whom (counts, statistics and checksums stay), then its arrays are deleted. Killed in
between, the rest is deleted by the next producer. Only producers call this.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from hscache import files, layout
from hscache.errors import CacheIncompleteError, CacheUnreadableError, HscacheError
from hscache.manifest import ShardManifest, cache_fingerprint, encode_group
from hscache.reader import Cache
from hscache.zarr_reader import refuse_link


def free_shard(cache: Cache, shard: int, consumers: Sequence[str]) -> None:
    """Replace a published shard by its tombstone; `consumers` had acknowledged it.

    They may have skipped it: for damaged attributes the tombstone has the counts of the plan.
    Raises CacheIncompleteError when it has been taken out meanwhile, ShardCorruptError for a link.
    """
    folder = layout.shard_dir(cache.path, shard)
    for part in (folder.parent, folder):
        refuse_link(part)
    try:
        manifest = cache.shard_manifest(shard)
    except (CacheUnreadableError, CacheIncompleteError):
        raise
    except HscacheError as error:
        manifest = _planned(cache, shard, str(error))
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


def _planned(cache: Cache, shard: int, damage: str) -> ShardManifest:
    documents = cache.plan.shard_documents(shard)
    return ShardManifest(
        shard=shard,
        state="damaged",
        cache=cache_fingerprint(cache.identity),
        codec=cache.identity.encoding.codec,
        num_documents=len(documents),
        num_tokens=int(cache.plan.lengths[documents.start : documents.stop].sum()),
        raw_bytes=0,
        stored_bytes=0,
        quarantined=(),
        statistics=(),
        arrays={},
        provenance={"damaged": damage},
    )


def _replace_attributes(cache: Cache, shard: int, data: bytes) -> None:
    # Written beside the shards, where what a killed producer leaves is looked for.
    folder = layout.shard_dir(cache.path, shard)
    temporary = folder.with_name(files.temporary_name())
    try:
        files.write_durable(temporary, data)
        os.replace(temporary, folder / "zarr.json")
    except FileNotFoundError as error:
        raise CacheIncompleteError(f"{folder} was taken out of the cache.") from error
    finally:
        temporary.unlink(missing_ok=True)
    files.fsync_folder(folder)


def delete_arrays(cache: Cache, shard: int) -> None:
    """Delete all but the attributes of a shard that is freed."""
    for path in _arrays(cache, shard):
        shutil.rmtree(path, ignore_errors=True)  # another producer may be at it too


def has_arrays(cache: Cache, shard: int) -> bool:
    """Say whether there is anything but the attributes of a shard."""
    return bool(_arrays(cache, shard))


def _arrays(cache: Cache, shard: int) -> list[Path]:
    try:
        entries = list(layout.shard_dir(cache.path, shard).iterdir())
    except FileNotFoundError:  # taken out by `hscache repair`
        return []
    return [path for path in entries if path.is_dir() and not path.is_symlink()]


def is_freed(cache: Cache, shard: int) -> bool:
    """Say whether a published shard has been freed."""
    return cache.shard_manifest(shard).state == "freed"


def freed_shards(cache: Cache) -> list[int]:
    """Return the ids of the training shards that are freed, ascending.

    They are freed in order, so it reads the attributes of one more. Damaged ones do not count.
    """
    freed = []
    for shard in cache.published_shards():
        if shard not in cache.plan.training_shards:
            continue
        try:
            if not is_freed(cache, shard):
                break
        except CacheUnreadableError:
            raise
        except HscacheError:  # whoever reads it says so, or skips it
            continue
        freed.append(shard)
    return freed
