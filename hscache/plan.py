"""The plan: every document of the corpus, its tokens and its shard, fixed before the target runs.

Takes documents (ids and loss mask), deals them into shards by a seeded shuffle, writes `plan/`, and
reads it back. Documents lie in shard order, so a shard's documents are one contiguous range of plan
rows. Held-out documents fill the first shards and share none with training.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hscache import files
from hscache.errors import ShardCorruptError
from hscache.layout import PLAN_ARRAYS, plan_dir
from hscache.manifest import SCHEMA_VERSION, encode_group, read_group, require_arrays
from hscache.zarr_array import ArrayRecord, ZarrArrayWriter
from hscache.zarr_reader import ZarrArrayReader, refuse_link

_CACHED_CHUNKS = 64
"""16 MB of token ids"""


@dataclass(frozen=True, kw_only=True)
class TokenizedDocument:
    """One document: `ids_T` int32, `loss_mask_T` uint8 (1 where supervised), and its input row."""

    ids_T: npt.NDArray[np.int32]
    loss_mask_T: npt.NDArray[np.uint8]
    source_row: int
    held_out: bool

    @property
    def key(self) -> int:
        """A 64-bit content hash."""
        digest = hashlib.blake2b(self.ids_T.astype("<i4").tobytes(), digest_size=8)
        digest.update(self.loss_mask_T.tobytes())
        return int.from_bytes(digest.digest(), "little")

    @property
    def num_valid_anchors(self) -> int:
        """Positions that are supervised and followed by a supervised one (dflash.md 2.1)."""
        mask = self.loss_mask_T
        return int(np.count_nonzero(mask[:-1] & mask[1:]))


def deal_into_shards(
    documents: Sequence[TokenizedDocument], shard_tokens: int, seed: int
) -> list[list[int]]:
    """Return, per shard, the indices of its documents: held-out shards first, then training.

    Each side is shuffled with the seed and cut where the next document would exceed
    `shard_tokens`; a document longer than that has a shard of its own.
    """
    shards: list[list[int]] = []
    for held_out in (True, False):
        side = [i for i, document in enumerate(documents) if document.held_out == held_out]
        order = np.random.default_rng([seed, int(held_out)]).permutation(len(side))
        tokens = shard_tokens + 1  # forces a new shard for the first document
        for position in order:
            index = side[int(position)]
            length = len(documents[index].ids_T)
            if tokens + length > shard_tokens:
                shards.append([])
                tokens = 0
            shards[-1].append(index)
            tokens += length
    return shards


@dataclass(frozen=True, kw_only=True)
class PlanManifest:
    """Attributes of `plan/`."""

    schema_version: int = SCHEMA_VERSION
    corpus_sha256: str
    num_shards: int
    num_held_out_shards: int
    arrays: dict[str, ArrayRecord]
    report: dict[str, Any] = field(default_factory=dict)
    """rows in, kept, dropped by reason"""
    source_sha256: str = ""
    """of the files and settings it was made of; "" if it was made of something else"""


def write_plan(
    cache_dir: Path,
    documents: Sequence[TokenizedDocument],
    shards: list[list[int]],
    report: dict[str, Any],
    source_sha256: str = "",
) -> None:
    """Write `plan/` atomically; if another producer was faster its equal plan stays."""
    order = [(i, number) for number, shard in enumerate(shards) for i in shard]
    columns = {
        name: np.empty(len(order), layout.dtype)
        for name, layout in PLAN_ARRAYS.items()
        if name not in ("tokens", "loss_mask")
    }
    digest = _CorpusHash()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(files.temporary_folder(cache_dir))
        writers = {
            name: stack.enter_context(ZarrArrayWriter(folder / name, layout))
            for name, layout in PLAN_ARRAYS.items()
        }
        # One by one: a corpus may be larger than memory.
        for position, (index, shard) in enumerate(order):
            document = documents[index]
            columns["lengths"][position] = len(document.ids_T)
            columns["keys"][position] = document.key
            columns["shards"][position] = shard
            columns["source_rows"][position] = document.source_row
            columns["valid_anchors"][position] = document.num_valid_anchors
            writers["tokens"].append(document.ids_T)
            writers["loss_mask"].append(document.loss_mask_T)
            digest.update(document)
        for name, column in columns.items():
            writers[name].append(column)
        manifest = PlanManifest(
            corpus_sha256=digest.hexdigest(),
            num_shards=len(shards),
            num_held_out_shards=sum(documents[shard[0]].held_out for shard in shards),
            arrays={name: writer.close() for name, writer in writers.items()},
            report=report,
            source_sha256=source_sha256,
        )
        files.write_durable(folder / "zarr.json", encode_group(manifest))
        files.publish_folder(folder, plan_dir(cache_dir))


def corpus_sha256(documents: Iterable[TokenizedDocument]) -> str:
    """Hash every document's ids and mask in order; lengths are part of it."""
    digest = _CorpusHash()
    for document in documents:
        digest.update(document)
    return digest.hexdigest()


class _CorpusHash:
    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, document: TokenizedDocument) -> None:
        self._digest.update(len(document.ids_T).to_bytes(8, "little"))
        self._digest.update(document.ids_T.astype("<i4").tobytes())
        self._digest.update(document.loss_mask_T.tobytes())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class Plan:
    """Read `plan/`. Per-document columns are numpy arrays; tokens are read on demand."""

    def __init__(self, cache_dir: Path) -> None:
        folder = plan_dir(cache_dir)
        refuse_link(folder)
        self.manifest = read_group(folder / "zarr.json", PlanManifest)
        require_arrays(self.manifest.arrays, PLAN_ARRAYS, folder / "zarr.json")
        readers = {
            name: ZarrArrayReader(folder / name, layout, self.manifest.arrays[name])
            for name, layout in PLAN_ARRAYS.items()
        }
        self._tokens = _cached_reads(readers.pop("tokens"))
        self._loss_mask = _cached_reads(readers.pop("loss_mask"))
        column = {name: reader.read(0, reader.num_rows) for name, reader in readers.items()}
        self.lengths: npt.NDArray[np.int32] = column["lengths"]
        self.keys: npt.NDArray[np.uint64] = column["keys"]
        self.shards: npt.NDArray[np.int32] = column["shards"]
        self.source_rows: npt.NDArray[np.int64] = column["source_rows"]
        self.valid_anchors: npt.NDArray[np.int32] = column["valid_anchors"]
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self._require_sense(folder)
        self._shard_starts = np.searchsorted(self.shards, np.arange(self.num_shards + 1))

    def _require_sense(self, folder: Path) -> None:
        """Refuse columns that contradict each other, whatever their checksums say."""
        rows = {name: record.num_rows for name, record in self.manifest.arrays.items()}
        tokens = {rows.pop("tokens"), rows.pop("loss_mask")}
        sense = (
            set(rows.values()) == {len(self.lengths)}
            and tokens == {int(self.offsets[-1])}
            and bool((self.lengths > 0).all() and (np.diff(self.shards) >= 0).all())
            and (len(self.shards) == 0 or self.shards[0] >= 0)
            and (len(self.shards) == 0 or self.shards[-1] < self.num_shards)
        )
        if not sense:
            raise ShardCorruptError(
                f"{folder} contradicts itself. Delete it and run `hscache produce` again with the "
                "same settings."
            )

    @property
    def num_documents(self) -> int:
        """Documents of the corpus, held-out ones included."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of the corpus, held-out ones included."""
        return int(self.offsets[-1])

    @property
    def num_shards(self) -> int:
        """Shards of the plan, published or not."""
        return self.manifest.num_shards

    @property
    def held_out_shards(self) -> range:
        """Ids of the shards that hold the held-out documents."""
        return range(self.manifest.num_held_out_shards)

    @property
    def training_shards(self) -> range:
        """Ids of the shards to train on."""
        return range(self.manifest.num_held_out_shards, self.num_shards)

    def shard_documents(self, shard: int) -> range:
        """Return the plan rows of a shard's documents."""
        return range(int(self._shard_starts[shard]), int(self._shard_starts[shard + 1]))

    def shard_tokens(self, shard: int) -> int:
        """Return the tokens of a shard's documents, quarantined ones included."""
        documents = self.shard_documents(shard)
        return int(self.offsets[documents.stop] - self.offsets[documents.start])

    def input_ids(self, document: int) -> npt.NDArray[np.int32]:
        """Return a document's token ids, int32 [T]."""
        return self._tokens(*self._span(document))

    def loss_mask(self, document: int) -> npt.NDArray[np.uint8]:
        """Return a document's loss mask, uint8 [T]."""
        return self._loss_mask(*self._span(document))

    def document(self, document: int) -> TokenizedDocument:
        """Return a document as it was tokenised."""
        return TokenizedDocument(
            ids_T=self.input_ids(document),
            loss_mask_T=self.loss_mask(document),
            source_row=int(self.source_rows[document]),
            held_out=int(self.shards[document]) in self.held_out_shards,
        )

    def _span(self, document: int) -> tuple[int, int]:
        return int(self.offsets[document]), int(self.offsets[document + 1])


def _cached_reads(reader: ZarrArrayReader) -> Callable[[int, int], Any]:
    # Neighbouring documents share inner chunks of 65,536 tokens, and whoever reads one usually
    # reads the next one too: without this, each document would decode its chunk anew.
    chunk_rows = reader.layout.chunk_rows

    @lru_cache(maxsize=_CACHED_CHUNKS)
    def chunk(number: int) -> npt.NDArray[Any]:
        first = number * chunk_rows
        return reader.read(first, min(first + chunk_rows, reader.num_rows))

    def read(start: int, stop: int) -> npt.NDArray[Any]:
        out = np.empty(stop - start, reader.layout.dtype)
        for number in range(start // chunk_rows, -(-stop // chunk_rows)):
            first = number * chunk_rows
            low, high = max(start, first), min(stop, first + chunk_rows)
            out[low - start : high - start] = chunk(number)[low - first : high - first]
        return out

    return read
