"""Read the target cache of deepseek-ai/DeepSpec: raw `shard-NNNNN.bin` files and `samples.idx`.

Layout (afdfa7c, deepspec/data/target_cache_dataset.py, version 2): `manifest.json` names layers
(0-based block outputs) and sizes; the index has a record of 56 bytes a sample with the offsets of
int32 ids, uint8 masks, bf16 states [T, L*H], and the final state [T, H], which is after the final
norm and not imported.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hscache.errors import DataError
from hscache.peer import PeerDocument

_VERSION = 2
_RECORD = np.dtype(
    [
        ("sample", "<u8"),
        ("shard", "<u4"),
        ("tokens", "<u4"),
        ("ids", "<u8"),
        ("attention", "<u8"),
        ("loss_mask", "<u8"),
        ("states", "<u8"),
        ("final", "<u8"),
    ]
)
_EXPECTED = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8"}


class DeepSpecCache:
    """A folder with manifest, index and shards; raises DataError if they do not agree."""

    title = "DeepSpec shards"
    final_state = "the final state (after the final norm) is not imported"
    may_append_final = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        manifest = _read_manifest(folder / "manifest.json")
        self.layer_ids: tuple[int, ...] | None = tuple(manifest["target_layer_ids"])
        self._width = len(self.layer_ids) * manifest["hidden_size"]
        index = folder / "samples.idx"
        size_bytes = index.stat().st_size if index.is_file() else 0
        self.num_documents = manifest["num_samples"]
        if size_bytes != self.num_documents * _RECORD.itemsize or not size_bytes:
            raise DataError(
                f"{index} has {size_bytes:,} bytes, and the {self.num_documents:,} samples of the "
                f"manifest need {_RECORD.itemsize} each. Copy the cache whole."
            )
        self._index = np.fromfile(index, _RECORD)

    def read_documents(self) -> Iterator[PeerDocument]:
        """Yield the samples in order."""
        sizes: dict[int, int] = {}
        for number, record in enumerate(self._index):
            path, tokens = self._path(record), int(record["tokens"])
            where = f"{path}, sample {number}"
            shard = int(record["shard"])
            if shard not in sizes:
                sizes[shard] = path.stat().st_size if path.is_file() else 0
            parts = {"states": self._width * 2, "ids": 4, "loss_mask": 1}
            end = max(int(record[part]) + tokens * size for part, size in parts.items())
            if int(record["sample"]) != number or end > sizes[shard]:
                problem = f"its index entry ends at byte {end:,}, the shard has {sizes[shard]:,}"
                yield PeerDocument(number=number, where=where, problem=problem)
                continue
            with path.open("rb") as file:
                ids_T = _read(file, "<i4", tokens, int(record["ids"]))
                mask_T = _read(file, "u1", tokens, int(record["loss_mask"]))
            yield PeerDocument(
                number=number,
                where=where,
                ids_T=ids_T.astype(np.int64),
                loss_mask_T=mask_T.astype(np.int64),
                shape=(tokens, self._width),
            )

    def read_states(self, number: int) -> torch.Tensor:
        """Return a sample's states, [T, L*H]."""
        record = self._index[number]
        tokens = int(record["tokens"])
        with self._path(record).open("rb") as file:
            bits = _read(file, "<i2", tokens * self._width, int(record["states"]))
        return torch.from_numpy(bits).view(torch.bfloat16).reshape(tokens, self._width)

    def _path(self, record: np.void) -> Path:
        return self._folder / f"shard-{int(record['shard']):05d}.bin"


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _read(file: Any, dtype: str, count: int, offset: int) -> np.ndarray:
    file.seek(offset)
    return np.fromfile(file, dtype, count)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        whole = {name: _whole(manifest[name]) for name in ("version", "hidden_size", "num_samples")}
        layer_ids = [_whole(i) for i in manifest["target_layer_ids"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} cannot be used: {error!r}. Expected the manifest of a finished DeepSpec "
            "target cache; an unfinished one has none and cannot be imported."
        ) from error
    if whole["version"] != _VERSION:
        raise DataError(f"{path} is of version {whole['version']}; version {_VERSION} is read.")
    for name, expected in _EXPECTED.items():
        if manifest.get(name) != expected:
            raise DataError(f"{path}: {name} is {manifest.get(name)!r}; expected {expected!r}.")
    return {**whole, "target_layer_ids": layer_ids}
