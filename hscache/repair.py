"""`hscache repair`: take damaged shards out of a cache; the next `produce` makes them again.

Takes a cache folder; looks as `hscache verify` does, and requeues exactly the shards that are not
what was written: each loses its name by one atomic rename, and its files are deleted afterwards.
Everything else stays as it is, and what a live producer is making is never touched.

    hscache repair /nvme/cache --deep --dry-run
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hscache import files, layout, producers
from hscache.config import RepairConfig
from hscache.errors import HscacheError
from hscache.progress import configure_logging
from hscache.reader import Cache, open_cache
from hscache.report import format_table
from hscache.verify import Damage, check_shard, verify


@dataclass(frozen=True, kw_only=True)
class Requeued:
    """What became of a shard that should be made again."""

    shard: int
    reason: str
    documents: tuple[int, ...]
    """plan rows whose states could not be used; the others of the shard are made again with them"""
    action: str
    """requeued, would be requeued, or why it was left alone"""


def run(config: RepairConfig, *, dry_run: bool = False) -> int:
    """Run the command; 1 if damage is left, which the text explains."""
    configure_logging()
    cache = open_cache(config.cache)
    damaged = verify(cache, deep=config.deep, threads=config.threads)
    bad = [damage for damage in damaged if damage.shard is not None]
    others = [damage for damage in damaged if damage.shard is None]
    if config.quarantined:
        bad += _quarantined(cache, {damage.shard for damage in bad})
    done = [requeue(cache, damage, deep=config.deep, dry_run=dry_run) for damage in bad]
    print(_summary(cache, done, others, dry_run))
    left = [one for one in done if not one.action.endswith("requeued")]
    return int(not dry_run and bool(others or left))


def requeue(cache: Cache, damage: Damage, *, deep: bool, dry_run: bool = False) -> Requeued:
    """Take one shard out of the cache, unless a producer works on it or it is sound by now.

    Raises HscacheError when the folder cannot be written.
    """
    shard = damage.shard
    assert shard is not None
    claims = producers.live_claims(cache.path)
    if damage.unreadable:
        action = "left alone: it cannot be read here and now"
    elif shard in claims:
        action = f"left to {claims[shard]}, which is making it"
    elif dry_run:
        action = "would be requeued"
    elif not _is_still_bad(cache, damage, shard, deep):
        action = "left alone: it is sound now, or freed"
    else:
        action = "requeued" if _take_out(layout.shard_dir(cache.path, shard)) else "gone already"
    return Requeued(shard=shard, reason=damage.problem, documents=damage.documents, action=action)


def _is_still_bad(cache: Cache, damage: Damage, shard: int, deep: bool) -> bool:
    """Look once more: a check of terabytes takes hours, in which others may have worked here."""
    fresh = open_cache(cache.path)
    if found := check_shard(fresh, shard, deep):
        return not found[0].unreadable
    return damage.quarantine and bool(fresh.shard_manifest(shard).quarantined)


def _take_out(folder: Path) -> bool:
    """Rename a shard away and delete it; False if it was gone. Readers see all of it or nothing."""
    aside = folder.with_name(files.temporary_name())
    try:
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return False
        files.fsync_folder(folder.parent)
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()
    except OSError as error:
        raise HscacheError(
            f"cannot take {folder} out of the cache: {error.strerror}. Run `hscache repair` as a "
            "user who may write there, on a disk that is not mounted read-only."
        ) from error
    return True


def _quarantined(cache: Cache, known: set[int | None]) -> list[Damage]:
    """Return the sound shards in which documents are missing because of their states."""
    found = []
    for shard in cache.published_shards():
        if shard in known:
            continue
        manifest = cache.shard_manifest(shard)
        if manifest.state == "freed" or not manifest.quarantined:
            continue
        first = manifest.quarantined[0]
        found.append(
            Damage(
                part=f"shard {shard}",
                shard=shard,
                quarantine=True,
                problem=f"quarantined: document {first.document}: {first.reason}",
                documents=tuple(q.document for q in manifest.quarantined),
            )
        )
    return found


def _summary(
    cache: Cache, done: Sequence[Requeued], others: Sequence[Damage], dry_run: bool
) -> str:
    if not done and not others:
        return f"{cache.path}: nothing to repair"
    lines = []
    if done:
        rows = [[one.shard, len(one.documents), one.action] for one in done]
        lines.append(format_table(["shard", "documents lost", str(cache.path)], rows))
        lines += [f"shard {one.shard}: {one.reason}" for one in done]
    lines += [
        f"{one.part}, which is no shard and is left as it is: {one.problem}" for one in others
    ]
    if any(one.action == "requeued" for one in done):
        command = "hscache import" if cache.identity.states.origin else "hscache produce"
        lines.append(f"run `{command}` again with the same settings: it makes these shards anew")
    if dry_run:
        lines.append("nothing was changed")
    return "\n".join(lines)
