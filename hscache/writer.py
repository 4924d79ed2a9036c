"""Write one shard: documents go in one by one, a finished shard appears under its name at once.

Takes bf16 bits per document from produce, streams them through the codec into Zarr arrays in a
temporary folder, and publishes by rename. A crash, an error or a full disk publishes nothing.
"""

import contextlib
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from hscache import files, layout
from hscache.manifest import (
    Identity,
    LayerStatistics,
    Quarantined,
    ShardManifest,
    cache_fingerprint,
    encode_group,
)
from hscache.planes import Bits, encode
from hscache.zarr_array import ZarrArrayWriter

NUM_OUTLIERS = 4


@dataclass(frozen=True, kw_only=True)
class StateSums:
    """Sums over the tokens of a document, from which a shard's statistics are made."""

    num_tokens: int
    squares_LH: np.ndarray
    norms_L: np.ndarray
    max_L: np.ndarray


def state_sums(bits_TLH: Bits) -> StateSums:
    """Sum a document's states, bf16 bits [T, L, H], in float64."""
    values = bits_TLH.view(ml_dtypes.bfloat16).astype(np.float32)
    squares = np.square(values)
    return StateSums(
        num_tokens=len(values),
        squares_LH=squares.sum(axis=0, dtype=np.float64),
        norms_L=np.sqrt(squares.sum(axis=2)).sum(axis=0, dtype=np.float64),
        max_L=np.abs(values).max(axis=(0, 2)),
    )


class ShardWriter:
    """Context manager: `add` or `quarantine` each document in order, then `publish`."""

    def __init__(
        self, cache_dir: Path, shard: int, identity: Identity, executor: Executor | None = None
    ) -> None:
        self._cache_dir = cache_dir
        self._shard = shard
        self._identity = identity
        self._codec = identity.encoding.codec
        self._executor = executor
        states = identity.states
        self._num_layers = len(states.target_layer_ids)
        last = (states.num_target_layers - 1,) if states.last_hidden else ()
        self._captured_ids = (*states.target_layer_ids, *last)
        self._offsets = [0]
        self._rows: list[int] = []
        self._quarantined: list[Quarantined] = []
        self._statistics = _Statistics(len(self._captured_ids), states.hidden_size)

    def __enter__(self) -> "ShardWriter":
        parent = layout.shards_dir(self._cache_dir)
        states = self._identity.states
        layouts = layout.state_layouts(
            self._codec, self._num_layers, states.hidden_size, last_hidden=states.last_hidden
        )
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(files.temporary_folder(parent))
            self._arrays = {
                name: stack.enter_context(
                    ZarrArrayWriter(self._folder / name, array_layout, self._executor)
                )
                for name, array_layout in layouts.items()
            }
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def add(self, document: int, bits_TLH: Bits) -> None:
        """Append a document's states, uint16 bf16 bits [tokens, layers, hidden].

        Where the identity says `last_hidden`, the last block's output is one more layer, the last.
        """
        self.add_encoded(document, encode(bits_TLH, self._codec), state_sums(bits_TLH))

    def add_encoded(self, document: int, arrays: dict[str, np.ndarray], sums: StateSums) -> None:
        """Append a document whose stored arrays [tokens, layers, ...] were made elsewhere."""
        for name, rows in arrays.items():
            assert rows.shape[:2] == (sums.num_tokens, len(self._captured_ids))
            self._arrays[name].append(rows[:, : self._num_layers])
            if self._num_layers < len(self._captured_ids):
                self._arrays[layout.LAST_HIDDEN + name].append(rows[:, -1])
        self._statistics.add(sums)
        self._rows.append(document)
        self._offsets.append(self._offsets[-1] + sums.num_tokens)

    def quarantine(self, document: int, reason: str) -> None:
        """Record that a document's states were refused; it is in the shard by name only."""
        self._quarantined.append(Quarantined(document=document, reason=reason))

    def publish(self, provenance: dict[str, Any]) -> bool:
        """Make the shard durable and visible; return False if another producer was faster."""
        records = {name: writer.close() for name, writer in self._arrays.items()}
        stored_bytes = sum(record.size_bytes for record in records.values())
        side = {
            "doc_offsets": np.array(self._offsets, np.int64),
            "doc_rows": np.array(self._rows, np.int64),
        }
        for name, values in side.items():
            with ZarrArrayWriter(self._folder / name, layout.SHARD_SIDE_ARRAYS[name]) as writer:
                writer.append(values)
                records[name] = writer.close()
        num_tokens = self._offsets[-1]
        manifest = ShardManifest(
            shard=self._shard,
            state="published" if self._rows else "empty",
            cache=cache_fingerprint(self._identity),
            codec=self._codec,
            num_documents=len(self._rows),
            num_tokens=num_tokens,
            raw_bytes=num_tokens * len(self._captured_ids) * self._identity.states.hidden_size * 2,
            stored_bytes=stored_bytes,
            quarantined=tuple(self._quarantined),
            statistics=self._statistics.summary(self._captured_ids) if self._rows else (),
            arrays=records,
            provenance=provenance,
        )
        files.write_durable(self._folder / "zarr.json", encode_group(manifest))
        return files.publish_folder(self._folder, layout.shard_dir(self._cache_dir, self._shard))


class _Statistics:
    """Running sums per layer and channel, in float64."""

    def __init__(self, num_layers: int, hidden_size: int) -> None:
        self._squares_LH = np.zeros((num_layers, hidden_size))
        self._norms_L = np.zeros(num_layers)
        self._max_L = np.zeros(num_layers)
        self._num_tokens = 0

    def add(self, sums: StateSums) -> None:
        self._squares_LH += sums.squares_LH
        self._norms_L += sums.norms_L
        self._max_L = np.maximum(self._max_L, sums.max_L)
        self._num_tokens += sums.num_tokens

    def summary(self, layer_ids: tuple[int, ...]) -> tuple[LayerStatistics, ...]:
        rms_LH = np.sqrt(self._squares_LH / self._num_tokens)
        summary = []
        for index, layer_id in enumerate(layer_ids):
            top = np.argsort(-rms_LH[index], kind="stable")[:NUM_OUTLIERS]
            summary.append(
                LayerStatistics(
                    layer_id=layer_id,
                    mean_norm=round(float(self._norms_L[index] / self._num_tokens), 6),
                    max_abs=float(self._max_L[index]),
                    outlier_channels=tuple(int(channel) for channel in top),
                    outlier_rms=tuple(round(float(rms_LH[index, c]), 6) for c in top),
                    median_channel_rms=round(float(np.median(rms_LH[index])), 6),
                )
            )
        return tuple(summary)
