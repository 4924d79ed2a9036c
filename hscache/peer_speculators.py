"""Read the offline data of vllm-project/speculators: `hs_N.safetensors` beside an Arrow dataset.

Layout (c05b95b, scripts/prepare_data.py and data_generation_offline.py): a `save_to_disk` dataset
with `input_ids` and `loss_mask`, and a folder (`hidden_states` in it by default) with a file for
row N: `token_ids` [T] and `hidden_states` [T, L, H]. Layer ids are those given to vLLM and not
stored; its launcher appends the last block's output, before the final norm.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from hscache.conversations import Tokens, parse_row
from hscache.errors import ConfigError, DataError
from hscache.inputs import RawRow, find_files
from hscache.peer import PeerDocument

_NAME = re.compile(r"hs_(\d+)\.safetensors")
_COLUMNS = ("input_ids", "loss_mask")
_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}


class SpeculatorsCache:
    """A folder of hs files and the dataset whose rows they belong to; raises DataError."""

    title = "speculators hs_*.safetensors files"
    final_state = "the last block's output (before the final norm) is not imported"
    layer_ids: tuple[int, ...] | None = None
    may_append_final = True

    def __init__(self, folder: Path, rows: Path | None) -> None:
        self._folder = folder
        names = map(_NAME.fullmatch, (path.name for path in folder.iterdir()))
        self._numbers = sorted(int(match[1]) for match in names if match)
        if not self._numbers:
            raise DataError(f"{folder} holds no files named hs_0.safetensors, hs_1.safetensors ...")
        if rows is None and not (folder.parent / "state.json").is_file():
            raise ConfigError(
                f"{folder.parent} is not the dataset that {folder} belongs to (it has no "
                "state.json), and loss masks are stored only there. Name the folder that "
                "prepare_data.py wrote with --rows."
            )
        self._files = find_files([rows or folder.parent])
        self.num_documents = len(self._numbers)

    def read_documents(self) -> Iterator[PeerDocument]:
        """Yield the rows that have a file, in order; then the files that have no row."""
        missing = set(self._numbers)
        rows = (row for file in self._files for row in file.read_rows())
        for number, row in enumerate(rows):
            if number in missing:
                missing.remove(number)
                yield self._document(number, row)
        for number in sorted(missing):
            problem = "the dataset has no such row"
            yield PeerDocument(number=number, where=str(self._path(number)), problem=problem)

    def read_states(self, number: int) -> torch.Tensor:
        """Return a row's states, [T, L, H]."""
        with safe_open(self._path(number), "pt") as file:
            return file.get_tensor("hidden_states")

    def _path(self, number: int) -> Path:
        return self._folder / f"hs_{number}.safetensors"

    def _document(self, number: int, row: RawRow) -> PeerDocument:
        where = str(self._path(number))
        values = {name: row.values.get(name) for name in _COLUMNS}
        tokens = parse_row(RawRow(values=values, number=row.number, where=row.where))
        assert isinstance(tokens, Tokens)
        try:
            with safe_open(self._path(number), "pt") as file:
                if not {"token_ids", "hidden_states"} <= set(file.keys()):
                    problem = f"found tensors {sorted(file.keys())}, expected hidden_states and "
                    return PeerDocument(number=number, where=where, problem=problem + "token_ids")
                found_T = file.get_tensor("token_ids").to(torch.int64).numpy()
                states = file.get_slice("hidden_states")
                shape, dtype = tuple(states.get_shape()), states.get_dtype()
        except (SafetensorError, OSError) as error:
            problem = f"it cannot be read, is it cut? ({error})"
            return PeerDocument(number=number, where=where, problem=problem)
        if not np.array_equal(found_T, tokens.ids_T):
            problem = f"its token_ids are not the input_ids of {row.where}"
            return PeerDocument(number=number, where=where, problem=problem)
        return PeerDocument(
            number=number,
            where=where,
            ids_T=tokens.ids_T,
            loss_mask_T=tokens.loss_mask_T.astype(np.int64),
            shape=shape,
            dtype=_DTYPES.get(dtype, dtype),
        )
