"""The shards of a cache as `hscache inspect` shows them: attributes, sizes, statistics, visits.

Takes an open cache; reads attributes and the sizes of files, never states. A damaged shard is a
view with a problem, not an error.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hscache import layout
from hscache.errors import CacheIncompleteError, HscacheError, ShardCorruptError
from hscache.manifest import ShardManifest
from hscache.planes import Codec
from hscache.producers import read_record
from hscache.reader import Cache


@dataclass(frozen=True, kw_only=True)
class ShardView:
    """One shard on disk: its attributes, or what is wrong with it."""

    shard: int
    manifest: ShardManifest | None
    problem: str = ""

    @property
    def state(self) -> str:
        """What its attributes say, or damaged."""
        return self.manifest.state if self.manifest and not self.problem else "damaged"

    @property
    def ratio(self) -> float | None:
        """bf16 bytes over stored bytes."""
        m = self.manifest
        return m.raw_bytes / m.stored_bytes if m and m.stored_bytes else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of the process that made it."""
        seconds = self.manifest.provenance.get("seconds") if self.manifest else None
        return self.manifest.num_tokens / seconds if self.manifest and seconds else None

    def age_s(self, now_s: float) -> float | None:
        """Return the seconds since it was finished, by its attributes."""
        finished = self.manifest.provenance.get("finished") if self.manifest else None
        if not isinstance(finished, str):
            return None
        end = np.datetime64(finished.removesuffix("Z"), "s").astype(np.int64)
        return max(0.0, now_s - float(end))


def look_at(cache: Cache, shard: int) -> ShardView:
    """Read a shard's attributes and the sizes of its files."""
    manifest = None
    try:
        manifest = cache.shard_manifest(shard)
        _check_sizes(cache, manifest)
    except CacheIncompleteError:  # the folder is there
        problem = "it has no zarr.json. Run `hscache repair`, then `hscache produce`."
        return ShardView(shard=shard, manifest=None, problem=problem)
    except HscacheError as error:
        return ShardView(shard=shard, manifest=manifest, problem=str(error))
    return ShardView(shard=shard, manifest=manifest)


def _check_sizes(cache: Cache, manifest: ShardManifest) -> None:
    """Compare the size of every array's file with the manifest; a freed shard has none."""
    if manifest.state == "freed":
        return
    states = cache.identity.states
    num_layers, hidden = len(states.target_layer_ids), states.hidden_size
    where = str(layout.shard_dir(cache.path, manifest.shard))
    for name, file in _file_names(manifest.codec, num_layers, hidden, states.last_hidden):
        path = f"{where}/{name}/{file}"
        expected = manifest.arrays[name].size_bytes
        try:
            found: int | None = os.stat(path).st_size
        except OSError:
            found = None
        if found != expected:
            size = "is missing" if found is None else f"has {found:,} bytes"
            raise ShardCorruptError(
                f"{path} {size}, expected {expected:,} bytes. Run `hscache repair` on the "
                "cache, then `hscache produce` again."
            )


@functools.cache
def _file_names(
    codec: Codec, num_layers: int, hidden: int, last_hidden: bool
) -> list[tuple[str, str]]:
    states = layout.state_layouts(codec, num_layers, hidden, last_hidden=last_hidden)
    arrays = layout.SHARD_SIDE_ARRAYS | states
    return [(name, array.file_name) for name, array in arrays.items()]


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One captured layer over all shards, weighted by tokens."""

    layer_id: int
    mean_norm: float
    max_abs: float
    median_channel_rms: float
    outliers: list[tuple[int, float]]
    """(channel, its root mean square over the median channel's), the largest four"""
    channel_error: float | None
    """of a lossy codec, relative, per channel"""


def summarise_layers(sound: Sequence[ShardManifest]) -> list[LayerSummary]:
    """Return the statistics of every layer over shards; [] without any."""
    shards = [m for m in sound if m.statistics]
    weights = [m.num_tokens for m in shards]
    found = []
    for layers in zip(*(m.statistics for m in shards), strict=True):
        outliers: dict[int, list[float]] = collections.defaultdict(list)
        for s in layers:
            for channel, rms in zip(s.outlier_channels, s.outlier_rms, strict=True):
                outliers[channel].append(rms / s.median_channel_rms if s.median_channel_rms else 0)
        top = sorted(outliers.items(), key=lambda item: (-sum(item[1]), item[0]))[:4]
        errors = [s.channel_error for s in layers if s.channel_error is not None]
        found.append(
            LayerSummary(
                layer_id=layers[0].layer_id,
                mean_norm=_mean((s.mean_norm for s in layers), weights),
                max_abs=max(s.max_abs for s in layers),
                median_channel_rms=_mean((s.median_channel_rms for s in layers), weights),
                outliers=[(channel, float(np.mean(x))) for channel, x in top],
                channel_error=_mean(errors, weights) if len(errors) == len(layers) else None,
            )
        )
    return found


def _mean(values: Iterable[float], weights: Sequence[int]) -> float:
    return float(np.average(list(values), weights=weights))


def visits_done(cache: Cache) -> dict[int, int]:
    """Return how many passes every following trainer has saved, of each training shard.

    Of several trainers the slowest counts. {} where none has registered.
    """
    progress = [
        record.get("progress") or {}
        for path in sorted(layout.consumers_dir(cache.path).glob("*.json"))
        if not path.name.startswith(".") and (record := read_record(path)) is not None
    ]
    if not progress:
        return {}
    return {
        shard: min(
            sum(
                number + visit * p.get("stride", 1) < p.get("ticks", 0)
                for visit in range(p.get("passes", 0))
            )
            for p in progress
        )
        for number, shard in enumerate(cache.plan.training_shards)
    }
