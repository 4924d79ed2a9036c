"""Read the offline features of SpecForge: one `torch.save` dict a sample, `data_N.ckpt[.gz]`.

Layout (sgl-project/SpecForge a6b6b02, scripts/prepare_hidden_states.py): folders `rows_A-B` of
files with `input_ids` [T], `loss_mask` [T] and the captured layers side by side, `hidden_states`
[1, T, L*H] for DFlash, Domino and DSpark, `aux_hidden_state` for EAGLE3. Which layers is not
stored. Rows are stored with the zeros that padded their batch on the right.

The files are pickles: read with torch's weights-only loader, which builds tensors and runs nothing.
"""

import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from hscache.errors import DataError
from hscache.peer import DamagedStates, PeerDocument

_NAME = re.compile(r"data_(\d+)\.ckpt(\.gz)?")
_STATES = ("hidden_states", "aux_hidden_state")


class SpecForgeCache:
    """A folder of .ckpt files; raises DataError if it has none."""

    title = "SpecForge .ckpt files"
    final_state = "the final state of EAGLE3 and DSpark files (after the final norm) is not read"
    layer_ids: tuple[int, ...] | None = None
    may_append_final = False

    def __init__(self, folder: Path) -> None:
        found: dict[int, Path] = {}
        for path in sorted(folder.rglob("data_*.ckpt*")):
            if match := _NAME.fullmatch(path.name):
                found.setdefault(int(match[1]), path)  # .ckpt sorts before .ckpt.gz
        if not found:
            raise DataError(
                f"{folder} holds no SpecForge features: expected files named data_0.ckpt or "
                "data_0.ckpt.gz in it or in its folders rows_0-2000, ..."
            )
        self._paths = dict(sorted(found.items()))
        self.num_documents = len(found)

    def read_documents(self) -> Iterator[PeerDocument]:
        """Yield the samples by number; of an unpacked file only ids and mask are read."""
        for number, path in self._paths.items():
            try:
                sample = _load(path)
            except (OSError, RuntimeError, EOFError, ValueError, zlib.error) as error:
                problem = f"it cannot be read, is it cut? ({_first_line(error)})"
                yield PeerDocument(number=number, where=str(path), problem=problem)
                continue
            yield _document(number, path, sample)

    def read_states(self, number: int) -> torch.Tensor:
        """Return a document's captured layers, [1, T, L*H].

        Torch checks no checksum of a mapped file, so that is done here; raises DamagedStates.
        """
        path = self._paths[number]
        if path.suffix != ".gz":
            with zipfile.ZipFile(path) as file:
                if damaged := file.testzip():
                    raise DamagedStates(f"its checksums do not match ({damaged})")
        sample = _load(path)
        return next(sample[name] for name in _STATES if name in sample)


def _document(number: int, path: Path, sample: Any) -> PeerDocument:
    names = [name for name in _STATES if isinstance(sample, dict) and name in sample]
    if not names or not all(
        isinstance(sample.get(name), torch.Tensor) for name in ("input_ids", "loss_mask", names[0])
    ):
        found = sorted(map(str, sample)) if isinstance(sample, dict) else type(sample).__name__
        problem = f"found {found}, expected tensors input_ids, loss_mask and {' or '.join(_STATES)}"
        return PeerDocument(number=number, where=str(path), problem=problem)
    states = sample[names[0]]
    for name in ("input_ids", "loss_mask", names[0]):
        if sample[name].layout != torch.strided or sample[name].device.type != "cpu":
            problem = f"{name} is no plain tensor ({sample[name].layout}, {sample[name].device})"
            return PeerDocument(number=number, where=str(path), problem=problem)
    for name in ("input_ids", "loss_mask"):
        values = sample[name]
        if values.is_complex() or not torch.equal(values, values.long().to(values.dtype)):
            problem = f"{name} holds values of {values.dtype} that are no whole numbers"
            return PeerDocument(number=number, where=str(path), problem=problem)
    ids_T = sample["input_ids"].reshape(-1).long().numpy()
    mask_T = sample["loss_mask"].reshape(-1).long().numpy()
    num_padding = _count_padding(ids_T, mask_T) if len(ids_T) == len(mask_T) else 0
    stop = len(ids_T) - num_padding
    return PeerDocument(
        number=number,
        where=str(path),
        ids_T=ids_T[:stop],
        loss_mask_T=mask_T[:stop],
        num_padding=num_padding,
        shape=tuple(states.shape),
        dtype=str(states.dtype).removeprefix("torch."),
    )


def _count_padding(ids_T: np.ndarray, mask_T: np.ndarray) -> int:
    """Count the unsupervised zeros at the end. No attention mask is stored; should one of them be
    a token, nothing is lost: no anchor comes after it."""
    kept = np.flatnonzero(ids_T | mask_T)
    return len(ids_T) - (int(kept[-1]) + 1 if len(kept) else 0)


def _load(path: Path) -> Any:
    try:
        if path.suffix != ".gz":
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        with gzip.open(path) as file:
            data = io.BytesIO(file.read())
        return torch.load(data, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise DataError(
            f"{path} holds more than tensors, and nothing of it was run: {_first_line(error)}. "
            "SpecForge's own files hold tensors only; find out where this one comes from, and "
            "delete it."
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error)
    reason = re.search(r"WeightsUnpickler error: ([^\n]*)", text)  # below a paragraph of advice
    return (reason[1] if reason else (text.strip().splitlines() or [""])[0])[:200]
