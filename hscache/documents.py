"""The documents of a corpus: all rows tokenised, duplicates of held-out ones left out.

Takes the inputs of a corpus and a tokenizer with a chat template; hands on documents that lie in
flat files, so that a corpus larger than memory is no trouble, and a count of what was dropped and
why.
"""

import hashlib
import math
import mmap
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
import numpy.typing as npt

from hscache import files, fingerprint
from hscache.config import DataConfig
from hscache.errors import DataError, HscacheError
from hscache.inputs import SUFFIXES, InputFile, find_files
from hscache.plan import TokenizedDocument
from hscache.token_files import Range, cut_ranges, tokenize_files
from hscache.tokenize_rows import REASONS
from hscache.zarr_array import canonical_json

_SCHEMA = 1
"""To be raised when the same rows and settings come to give other tokens or other files of them."""
_HASH_RANGE = 1 << 64


class FlatDocuments(Sequence[TokenizedDocument]):
    """Documents one behind the other in two arrays, which may be larger than memory."""

    def __init__(
        self,
        ids_T: npt.NDArray[np.int32],
        loss_mask_T: npt.NDArray[np.uint8],
        lengths_D: npt.NDArray[np.int32],
        source_rows_D: npt.NDArray[np.int64],
        held_out_D: npt.NDArray[np.bool_],
    ) -> None:
        self._ids_T = ids_T
        self._loss_mask_T = loss_mask_T
        self._offsets = np.concatenate([[0], np.cumsum(lengths_D, dtype=np.int64)])
        self._source_rows_D = source_rows_D
        self._held_out_D = held_out_D

    def __len__(self) -> int:
        return len(self._source_rows_D)

    @overload
    def __getitem__(self, index: int) -> TokenizedDocument: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenizedDocument]: ...
    def __getitem__(self, index: int | slice) -> TokenizedDocument | Sequence[TokenizedDocument]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        span = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        return TokenizedDocument(
            ids_T=self._ids_T[span],
            loss_mask_T=self._loss_mask_T[span],
            source_row=int(self._source_rows_D[index]),
            held_out=bool(self._held_out_D[index]),
        )


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents of all files in order of their rows, and a report of what happened to the rows."""

    documents: Sequence[TokenizedDocument]
    report: dict[str, int | float]


def load_corpus(data: DataConfig, tokenizer: Any, seed: int, folder: Path | None = None) -> Corpus:
    """Read, render and tokenise every row; count drops by reason.

    `folder`, named by `tokens_key`, keeps what was tokenised: a run that was killed goes on there.
    None stands for a temporary one. A training document that equals a held-out one is dropped.
    Raises DataError on unusable rows, when no document to train on is left, or when too few of its
    tokens are supervised.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="hscache-") as temporary:
            return load_corpus(data, tokenizer, seed, Path(temporary))
    train, held_out = find_files(data.train), find_files(data.held_out)
    inputs = [*train, *held_out]
    before = [_stamp(file) for file in inputs]
    counts = [file.count_rows() for file in inputs]
    num_rows, num_train = sum(counts), sum(counts[: len(train)])
    chosen = _sample(num_train, data.max_documents, seed)
    report: dict[str, int | float] = {"rows in": num_rows}
    if chosen is not None:
        report["not in the sample of max_documents"] = num_train - len(chosen)
        chosen = np.concatenate([chosen, np.arange(num_train, num_rows)])
    ranges = cut_ranges(counts, chosen, folder)
    tokenize_files(inputs, ranges, data, tokenizer)
    for file, stamp in zip(inputs, before, strict=True):
        if _stamp(file) != stamp:
            shutil.rmtree(folder)
            raise DataError(
                f"{file.path} was changed while it was read. Run again when nobody writes to it."
            )
    parts = [part for parts in ranges for part in parts if part.num_rows]
    return _join(parts, data, num_train, report, folder)


def tokens_key(data: DataConfig, tokenizer: Any, seed: int) -> str:
    """Return a hash of all that decides the tokens of a corpus, files by their content."""
    sides = [find_files(data.train), find_files(data.held_out)]
    with ThreadPoolExecutor(8) as pool:
        hashes = [list(pool.map(_file_hash, side)) for side in sides]
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    decisive = {
        "schema": _SCHEMA,
        "files": hashes,
        "max_tokens": data.max_tokens,
        "over_long": data.over_long,
        "answers": data.answers,
        "sample": data.max_documents and [data.max_documents, seed],
        "tokenizer": fingerprint.tokenizer_sha256(tokenizer),
        "template": fingerprint.template_sha256(tokenizer),
        "special_tokens": special,
    }
    return hashlib.sha256(canonical_json(decisive)).hexdigest()


def _file_hash(file: InputFile) -> list[str]:
    # How a file is read depends on its name's end, and on nothing else of the name.
    suffix = next(suffix for suffix in SUFFIXES if file.path.name.endswith(suffix))
    try:
        return [suffix, fingerprint.file_sha256(file.path)]
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror or error}.") from error


def _stamp(file: InputFile) -> tuple[int, int, int]:
    status = file.path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _sample(num_rows: int, max_rows: int | None, seed: int) -> npt.NDArray[np.int64] | None:
    """Return the rows of a seeded sample, ascending, over all files alike; None means all."""
    if max_rows is None or max_rows >= num_rows:
        return None
    return np.sort(np.random.default_rng(seed).permutation(num_rows)[:max_rows])


def _join(
    parts: list[Range],
    data: DataConfig,
    num_train: int,
    report: dict[str, int | float],
    folder: Path,
) -> Corpus:
    """Choose among the documents of all ranges, and copy these into one pair of flat files."""
    columns = [_load(part, ("keys_D", "lengths_D", "rows_D", "counts")) for part in parts]
    counts = np.sum([column["counts"] for column in columns], axis=0).tolist()
    report.update(zip(REASONS, counts, strict=True))
    keys_D = np.concatenate([column["keys_D"] for column in columns])
    lengths_D = np.concatenate([column["lengths_D"] for column in columns])
    rows_D = np.concatenate(
        [part.first_row + column["rows_D"] for part, column in zip(parts, columns, strict=True)]
    )
    # A whole number, for float64 cannot tell all keys apart.
    limit = np.uint64(math.ceil(data.held_out_fraction * _HASH_RANGE))
    held_out_D = (rows_D >= num_train) | (keys_D < limit)
    kept_D = held_out_D | ~np.isin(keys_D, keys_D[held_out_D])
    report["dropped: also held out"] = int(np.count_nonzero(~kept_D))
    report["kept to train on"] = int(np.count_nonzero(kept_D & ~held_out_D))
    report["kept held out"] = int(np.count_nonzero(held_out_D))
    if not report["kept to train on"]:
        raise DataError(
            "no document is left to train on: "
            f"{', '.join(f'{reason}: {n}' for reason, n in report.items() if n)}. Rows need an "
            "assistant turn with at least two tokens within data.max_tokens."
        )
    with (
        files.disk_full_named(folder),
        tempfile.TemporaryFile(dir=folder) as ids,
        tempfile.TemporaryFile(dir=folder) as masks,
    ):
        supervised, start = 0, 0
        for part, column in zip(parts, columns, strict=True):
            stop = start + len(column["keys_D"])
            arrays = _load(part, ("ids_T", "loss_mask_T"))
            kept_T = np.repeat(kept_D[start:stop], column["lengths_D"])
            mask_T = arrays["loss_mask_T"][kept_T]
            ids.write(arrays["ids_T"][kept_T].tobytes())
            masks.write(mask_T.tobytes())
            supervised += int(np.count_nonzero(mask_T))
            start = stop
        ids_T = np.frombuffer(_map(ids), np.int32)
        loss_mask_T = np.frombuffer(_map(masks), np.uint8)
    report["supervised tokens"] = supervised
    share = supervised / len(ids_T)
    require_share(share, data.min_supervised_share)
    return Corpus(
        documents=FlatDocuments(
            ids_T, loss_mask_T, lengths_D[kept_D], rows_D[kept_D], held_out_D[kept_D]
        ),
        report={
            **{key: n for key, n in report.items() if n},
            "supervised share": round(share, 4),
        },
    )


def _map(file: IO[bytes]) -> mmap.mmap:
    """Map a nameless file, which lives as long as the mapping and dies with the process."""
    file.flush()
    return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def _load(part: Range, names: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(part.path) as arrays:
            return {name: arrays[name] for name in names}
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
        raise HscacheError(
            f"{part.path} is damaged: {error}. Delete it and run the same command again."
        ) from error


def require_share(share: float, floor: float) -> None:
    """Raise DataError if a smaller share of a corpus' tokens is supervised than the floor."""
    if share < floor:
        raise DataError(
            f"only {share:.2%} of the tokens are supervised, and data.min_supervised_share is "
            f"{floor:.2%}: the rest would be run through the target for nothing. Look at the "
            "loss mask (answers far shorter than prompts, a role that is not `assistant`?), or "
            "lower the setting."
        )
