"""Write one shard: documents go in one by one, a finished shard appears under its name at once.

Takes bf16 bits per document from produce, streams them through the codec into Zarr arrays in a
temporary folder, and publishes by rename. A crash, an error or a full disk publishes nothing.
"""

import contextlib
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

from hscache import files, layout
from hscache.bands import BandWriter
from hscache.manifest import (
    Identity,
    Quarantined,
    ShardManifest,
    cache_fingerprint,
    encode_group,
)
from hscache.planes import LOSSY, Bits
from hscache.sums import StateSums, Statistics
from hscache.zarr_array import ZarrArrayWriter


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
        self._statistics = Statistics(
            len(self._captured_ids), states.hidden_size, lossy=self._codec in LOSSY
        )

    def __enter__(self) -> "ShardWriter":
        parent = layout.shards_dir(self._cache_dir)
        states = self._identity.states
        layouts = layout.state_layouts(
            self._codec, self._num_layers, states.hidden_size, last_hidden=states.last_hidden
        )
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(files.temporary_folder(parent))
            self._arrays = {
                name: stack.enter_context(ZarrArrayWriter(self._folder / name, array_layout))
                for name, array_layout in layouts.items()
            }
            self._bands = BandWriter(
                self._arrays,
                self._codec,
                num_layers=self._num_layers,
                hidden_size=states.hidden_size,
                last_hidden=states.last_hidden,
                executor=self._executor,
            )
            stack.callback(self._bands.cancel)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, document: int, bits_TLH: Bits) -> None:
        """Append a document's states, uint16 bf16 bits [tokens, layers, hidden].

        Where the identity says `last_hidden`, the last block's output is one more layer, the last.
        """
        assert bits_TLH.shape[1] == len(self._captured_ids)
        self._count(document, self._bands.add(bits_TLH))

    def add_encoded(self, document: int, arrays: dict[str, np.ndarray], sums: StateSums) -> None:
        """Append a document whose stored arrays [tokens, layers, ...] were made elsewhere.

        They are copied: the caller may use their memory again.
        """
        for rows in arrays.values():
            assert rows.shape[:2] == (sums.num_tokens, len(self._captured_ids))
        self._bands.add_encoded(arrays)
        self._count(document, sums)

    def _count(self, document: int, sums: StateSums) -> None:
        self._statistics.add(sums)
        self._rows.append(document)
        self._offsets.append(self._offsets[-1] + sums.num_tokens)

    def quarantine(self, document: int, reason: str) -> None:
        """Record that a document's states were refused; it is in the shard by name only."""
        self._quarantined.append(Quarantined(document=document, reason=reason))

    def publish(self, provenance: dict[str, Any]) -> bool:
        """Make the shard durable and visible; return False if another producer was faster."""
        self._bands.finish()
        run = self._executor.map if self._executor is not None else map
        closed = run(ZarrArrayWriter.close, self._arrays.values())  # each waits for the disk
        records = dict(zip(self._arrays, closed, strict=True))
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
