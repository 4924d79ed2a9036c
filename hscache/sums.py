"""Sums over hidden states, and the statistics of a shard that are made of them.

Takes bf16 bits of documents, a layer at a time, so that threads share the work without locks; hands
on norms, outlier channels and, where a codec loses something, its error per channel.

Axes: T tokens, L captured layers, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hscache.manifest import LayerStatistics
from hscache.planes import Bits, blocks, to_float32

NUM_OUTLIERS = 4


@dataclass(frozen=True, kw_only=True)
class StateSums:
    """Sums over the tokens of a document, from which a shard's statistics are made."""

    num_tokens: int
    squares_LH: npt.NDArray[np.float64]
    norms_L: npt.NDArray[np.float64]
    max_L: npt.NDArray[np.float64]
    errors_LH: npt.NDArray[np.float64] | None = None
    """squared differences to what the codec gives back; None if not known, or the codec is exact"""

    @classmethod
    def zeros(cls, num_tokens: int, num_layers: int, hidden: int, *, lossy: bool) -> StateSums:
        """Return sums to which `add_layer` adds."""
        return cls(
            num_tokens=num_tokens,
            squares_LH=np.zeros((num_layers, hidden)),
            norms_L=np.zeros(num_layers),
            max_L=np.zeros(num_layers),
            errors_LH=np.zeros((num_layers, hidden)) if lossy else None,
        )

    def add_layer(self, layer: int, bits_TH: Bits, stored_TH: Bits | None = None) -> None:
        """Add some tokens' states of one layer; `stored_TH` is what is left after the codec."""
        largest = 0
        for rows in blocks(bits_TH):
            values = to_float32(bits_TH[rows])
            squares = np.square(values)
            self.squares_LH[layer] += squares.sum(axis=0)
            self.norms_L[layer] += np.sqrt(np.vecdot(values, values)).sum(dtype=np.float64)
            largest = max(largest, int((bits_TH[rows] & 0x7FFF).max()))
            if stored_TH is not None:
                assert self.errors_LH is not None
                values -= to_float32(stored_TH[rows])
                self.errors_LH[layer] += np.square(values, out=squares).sum(axis=0)
        found = float(to_float32(np.array([largest], np.uint16))[0])
        self.max_L[layer] = max(self.max_L[layer], found)


def state_sums(bits_TLH: Bits) -> StateSums:
    """Sum a document's states, bf16 bits [T, L, H]; the totals are float64."""
    sums = StateSums.zeros(*bits_TLH.shape, lossy=False)
    for layer in range(bits_TLH.shape[1]):
        sums.add_layer(layer, bits_TLH[:, layer])
    return sums


class Statistics:
    """Sums of a shard."""

    def __init__(self, num_layers: int, hidden_size: int, *, lossy: bool) -> None:
        self._squares_LH = np.zeros((num_layers, hidden_size))
        self._norms_L = np.zeros(num_layers)
        self._max_L = np.zeros(num_layers)
        self._errors_LH = np.zeros((num_layers, hidden_size)) if lossy else None
        self._num_tokens = 0

    def add(self, sums: StateSums) -> None:
        """Add a document's."""
        self._squares_LH += sums.squares_LH
        self._norms_L += sums.norms_L
        self._max_L = np.maximum(self._max_L, sums.max_L)
        if sums.errors_LH is None:
            self._errors_LH = None  # then the shard's is not known either
        elif self._errors_LH is not None:
            self._errors_LH += sums.errors_LH
        self._num_tokens += sums.num_tokens

    def summary(self, layer_ids: tuple[int, ...]) -> tuple[LayerStatistics, ...]:
        """Return the statistics of each layer, named by its id."""
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
                    channel_error=self._channel_error(index),
                )
            )
        return tuple(summary)

    def _channel_error(self, layer: int) -> float | None:
        """Return the error after each channel is divided by its root mean square: of all channels
        alike, where a plain norm would see the few massive ones only."""
        if self._errors_LH is None:
            return None
        squares_H = self._squares_LH[layer]
        used_H = squares_H > 0
        if not used_H.any():
            return 0.0
        ratio_H = self._errors_LH[layer][used_H] / squares_H[used_H]
        return round(float(np.sqrt(ratio_H.mean())), 6)
