"""What the disk budget means for a plan, decided when producing starts: the window, or a refusal.

Takes the settings, the plan on disk and the identity without its window; hands on the window that
the root then keeps. With `retain all` it only checks that everything fits.
"""

import dataclasses
from pathlib import Path

from hscache import budget, layout
from hscache.config import DEFAULT_RESERVE, ProduceConfig
from hscache.errors import CacheMismatchError, ConfigError, DiskFullError
from hscache.manifest import Identity, WindowIdentity, identity_diff, read_group
from hscache.plan import Plan
from hscache.report import format_bytes
from hscache.sizes import parse_size
from hscache.window import DiskNeeds, choose_window

_ROOT_BYTES = 2 * budget.BLOCK_BYTES


def max_disk_bytes(config: ProduceConfig) -> int | None:
    """Return `max_disk` in bytes; None if there is no bound."""
    if config.max_disk is None:
        return None
    status = budget.filesystem(config.shard_dir)
    return parse_size(config.max_disk, "max_disk", status.f_blocks * status.f_frsize)


def needs_of(cache_dir: Path, identity: Identity) -> DiskNeeds:
    """Return what the plan in `cache_dir`, whose frozen parts are written, takes at the worst."""
    frozen_bytes = budget.used_bytes(layout.frozen_dir(cache_dir))
    return planned_needs(cache_dir, identity, frozen_bytes)


def planned_needs(folder: Path, identity: Identity, frozen_bytes: int) -> DiskNeeds:
    """Return what the plan in a folder takes at the worst, beside frozen parts of that size."""
    fixed_bytes = _ROOT_BYTES + budget.used_bytes(layout.plan_dir(folder)) + frozen_bytes
    return budget.disk_needs(Plan(folder), identity, fixed_bytes)


def window_for(
    config: ProduceConfig, identity: Identity, needs: DiskNeeds | None = None
) -> WindowIdentity:
    """Return the window of a cache whose plan and frozen parts are written, or need so much.

    Raises ConfigError when the budget is too small, DiskFullError when the disk is smaller than the
    budget, CacheMismatchError with a diff when the cache has been started with another window.
    """
    limit = max_disk_bytes(config)
    if limit is None:
        return WindowIdentity()
    needs = needs or needs_of(config.shard_dir, identity)
    if config.retain == "all":
        if limit < needs.all_bytes:
            raise ConfigError(
                f"max_disk is {format_bytes(limit)}, and {config.shard_dir} may take "
                f"{format_bytes(needs.all_bytes)} before compression ({needs.num_shards:,} shards "
                "to train on). Give more, or --retain window with --passes: then shards are freed "
                "once `trainer fit --follow` is done with them."
            )
        return WindowIdentity()
    assert config.passes is not None
    reserve = DEFAULT_RESERVE if config.reserve is None else config.reserve
    root = layout.root_file(config.shard_dir)
    if root.exists():
        _require_same_window(config, read_group(root, Identity).window, needs, limit, reserve)
    window = choose_window(limit, needs, passes=config.passes, reserve=reserve)
    if not root.exists():
        _require_disk(config, identity, needs, limit, window)
    return window


def _require_same_window(
    config: ProduceConfig, found: WindowIdentity, needs: DiskNeeds, limit: int, reserve: int
) -> None:
    if not found.shards:
        return  # the root's diff says so
    assert config.passes is not None
    fitting = (limit - needs.with_shards(reserve)) // needs.shard_bytes
    expected = WindowIdentity(
        shards=max(0, min(fitting, needs.num_shards)), passes=config.passes, reserve=reserve
    )
    if lines := identity_diff(found, expected, "window."):
        least = needs.with_shards(found.shards + found.reserve)
        raise CacheMismatchError(
            f"{config.shard_dir} was started with another window, which orders the training:\n"
            + "\n".join(lines)
            + f"\nRun with --max-disk {least} --passes {found.passes} --reserve {found.reserve}, "
            "or write to an empty --shard-dir."
        )


def _require_disk(
    config: ProduceConfig, identity: Identity, needs: DiskNeeds, limit: int, window: WindowIdentity
) -> None:
    """Refuse a budget that the disk does not have: the window would be made for more than fits."""
    free = budget.free_bytes(config.shard_dir)
    room = free + budget.used_bytes(config.shard_dir)
    wanted = needs.with_shards(budget.slots(window))
    if wanted > room:
        raise DiskFullError(
            f"max_disk {format_bytes(limit)} is more than the disk has: {format_bytes(free)} are "
            f"free on the filesystem of {config.shard_dir}, and a window of {window.shards} shards "
            f"and {window.reserve} in reserve may take {format_bytes(wanted)}. Give --max-disk "
            f"{room} or less (leave room for checkpoints if they go there too), or free some space."
        )
    num_shards = budget.slots(window) + identity.content.num_held_out_shards
    inodes = budget.free_inodes(config.shard_dir)
    files = num_shards * budget.shard_inodes(budget.ShardShape.of(identity)) + 2 * needs.num_shards
    if inodes is not None and inodes < files:
        raise DiskFullError(
            f"{config.shard_dir}: {inodes:,} inodes are free on that filesystem, and the window "
            f"takes up to {files:,} files and folders. Delete some files, or make a new cache "
            "of fewer, larger shards (store.shard_tokens)."
        )


def with_window(config: ProduceConfig, identity: Identity) -> Identity:
    """Return the identity with its window in it; raises as `window_for` does."""
    return dataclasses.replace(identity, window=window_for(config, identity))
